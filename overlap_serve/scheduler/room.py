"""`Room`: what requests hold, KV pages and slots, and how both move between the pools, the prefix cache and a `Req`.

Knows no queue, no step and no time: the scheduler says when. Who owns which page is in the interval map of `req`.
"""

from __future__ import annotations

from collections.abc import Iterable

from overlap_serve.cache.pages import PagePool, SlotPool
from overlap_serve.cache.prefix import NO_MATCH, PrefixCache
from overlap_serve.scheduler.limits import Limits
from overlap_serve.scheduler.req import Req


class Room:
    """Owns the pools and the prefix cache of one engine."""

    def __init__(self, limits: Limits, cache: PrefixCache) -> None:
        self.pages = PagePool(limits.num_pages)
        self.slots = SlotPool(limits.num_slots)
        self.cache = cache
        self._limits = limits

    def available(self) -> int:
        """Pages that can be had now: free, or cached and under no lock."""
        return self.pages.num_free + self.cache.num_evictable

    def take_pages(self, count: int) -> list[int]:
        """`count` pages, evicting the least recently used; the caller has checked `available`."""
        if count > self.pages.num_free:
            self.pages.give(self.cache.evict(count - self.pages.num_free))
        return self.pages.take(count)

    def reserve(self, req: Req, margin: int) -> bool:
        """Lock the cached prefix and take pages for all known tokens, if `margin` pages stay available then. All or nothing."""
        page_size = self._limits.page_size
        found = self.cache.match(req.tokens.tobytes(), req.salt, req.reusable_tokens // page_size)
        match = self.cache.lock(found)
        needed = -(-len(req.tokens) // page_size) - len(match.pages)
        if needed + margin > self.available():
            self.cache.unlock(match)
            return False
        req.lock, req.num_shared = match, len(match.pages)
        req.pages = [*match.pages, *self.take_pages(needed)]
        req.num_computed = len(match.pages) * page_size
        return True

    def share_prompt(self, req: Req) -> None:
        """Hand the full pages of the prompt to the prefix cache while the request runs, and lock them there.

        Where another request was first, keep our own copies instead: a running request never changes its pages (pains A17).
        """
        num_pages = req.prompt_len // self._limits.page_size
        token_ids = req.tokens[: num_pages * self._limits.page_size].tobytes()
        if num_pages <= req.num_shared or len(self.cache.match(token_ids, req.salt, num_pages).pages) > req.num_shared:
            return
        if self.cache.insert(token_ids, req.pages[:num_pages], req.salt) == num_pages:
            return
        locked = self.cache.lock(self.cache.match(token_ids, req.salt, num_pages))
        self.cache.unlock(req.lock)
        req.lock, req.num_shared = locked, num_pages

    def release(self, req: Req) -> None:
        """Take back everything that a request holds; what is computed goes to the prefix cache. No step in flight may hold it."""
        assert req.inflight == 0, "released under a step in flight"
        page_size = self._limits.page_size
        num_full = min(req.num_computed, len(req.tokens)) // page_size
        known = self.cache.insert(req.tokens[: num_full * page_size].tobytes(), req.pages[:num_full], req.salt)
        self.pages.give(req.pages[req.num_shared : known])
        self.pages.give(req.pages[max(num_full, req.num_shared) :])
        self.cache.unlock(req.lock)
        self.slots.give([req.slot])
        req.lock, req.num_shared, req.pages, req.slot, req.num_computed = NO_MATCH, 0, [], -1, 0

    def by_state(self, holders: Iterable[Req]) -> dict[str, int]:
        """free + cached + owned == total (invariant 5): `owned` is counted from the requests that hold pages, not derived."""
        owned = sum(len(req.pages) - req.num_shared for req in holders)
        return {"free": self.pages.num_free, "cached": self.cache.num_cached, "owned": owned}

    def check(self, holders: Iterable[Req], at_rest: bool) -> None:
        """Invariant 5, and at rest: nothing owned, nothing locked, every slot free. Raises AssertionError."""
        pages = self.by_state(holders)
        assert sum(pages.values()) == self._limits.num_pages, (
            f"pages do not add up: {pages} of {self._limits.num_pages}"
        )
        if at_rest:
            assert pages["owned"] == 0 and self.cache.num_evictable == self.cache.num_cached, f"leak at rest: {pages}"
            assert self.slots.num_free == self._limits.num_slots, "a slot leaked"

    def reset(self) -> None:
        """Forget the prefix cache and count every page and slot as free; nobody may hold any."""
        self.cache.reset()
        self.pages = PagePool(self._limits.num_pages)
        self.slots = SlotPool(self._limits.num_slots)
