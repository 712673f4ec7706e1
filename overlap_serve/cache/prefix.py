"""What the scheduler needs of a prefix cache, and the cache that keeps nothing.

Keys are token ids as int32 bytes. The unit is the whole page: only full pages are shared. A cache owns the pages that it
took by `insert` until `evict` hands them back; requests only borrow them, under a lock.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol


class Match(NamedTuple):
    """Longest cached prefix. `pages` stay valid only while the match is locked. node: the cache's own business."""

    pages: tuple[int, ...]
    node: object | None


NO_MATCH = Match((), None)


class PrefixCache(Protocol):
    """Pages by prefix. `num_cached` counts the pages it owns, `num_evictable` those under no lock."""

    @property
    def shares(self) -> bool:
        """Whether `insert` ever keeps anything."""

    @property
    def num_cached(self) -> int: ...

    @property
    def num_evictable(self) -> int: ...

    def match(self, token_ids: bytes, salt: str, max_pages: int) -> Match:
        """Longest cached prefix, in whole pages, max_pages at most. Read only: splits nothing, touches no clock."""

    def lock(self, match: Match) -> Match:
        """Protect exactly the match from eviction and mark it used. Returns the handle for `unlock`. Call it right after `match`."""

    def unlock(self, locked: Match) -> None:
        """Undo one `lock`."""

    def insert(self, token_ids: bytes, pages: list[int], salt: str) -> int:
        """Offer the pages of whole-page prefix `token_ids`. Takes over pages[k:] and returns k: the first k are known already,
        and the caller still owns its own copies of them."""

    def reset(self) -> None:
        """Forget everything, locks too; the pages belong to nobody then."""

    def evict(self, num_pages: int) -> list[int]:
        """Give up to num_pages unlocked pages, least recently used first; the caller owns them."""


class NoPrefixCache:
    """`prefix_cache: none`."""

    shares = False
    num_cached = 0
    num_evictable = 0

    def match(self, token_ids: bytes, salt: str, max_pages: int) -> Match:
        return NO_MATCH

    def lock(self, match: Match) -> Match:
        return match

    def unlock(self, locked: Match) -> None:
        return None

    def insert(self, token_ids: bytes, pages: list[int], salt: str) -> int:
        return len(pages)

    def reset(self) -> None:
        return None

    def evict(self, num_pages: int) -> list[int]:
        return []
