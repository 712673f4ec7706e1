"""`RadixCache`: a radix tree over token ids in whole pages, with locks and LRU eviction.

Layout after SGLang's RadixAttention (arXiv:2312.07104); here an edge is a byte string of int32 ids, so that comparing and
slicing run in C, and children are found by the bytes of their first page. One root for each cache salt.

    root -- [page page page] --+-- [page]            evictable leaf: lock_count 0, no children
                               +-- [page page]       locked: lock_count of a node covers all its ancestors

Eviction trims a leaf from its tail, page by page. Time is a logical clock that ticks on `lock`: no wall clock, so that equal
histories give equal evictions on every machine.
"""

from __future__ import annotations

import heapq
from itertools import count

from overlap_serve.cache.prefix import NO_MATCH, Match

ID_BYTES = 4


class Node:
    """An edge and what hangs below it. `key` holds len(pages) pages of ids."""

    __slots__ = ("children", "key", "lock_count", "pages", "parent", "salt", "used_at")

    def __init__(self, parent: Node | None, key: bytes, pages: list[int], salt: str) -> None:
        self.parent = parent
        self.key = key
        self.pages = pages
        self.salt = salt
        self.children: dict[bytes, Node] = {}
        self.lock_count = 0
        self.used_at = 0


class RadixCache:
    """See `PrefixCache` for the contract."""

    shares = True

    def __init__(self, page_size: int) -> None:
        self._page_bytes = page_size * ID_BYTES
        self._clock = 0
        self._ties = count()
        self.reset()

    def reset(self) -> None:
        self._roots: dict[str, Node] = {}
        self._num_cached = 0
        self._num_locked = 0
        self._heap: list[tuple[int, int, Node]] = []  # (used_at, tie, leaf); stale entries are skipped when popped
        self._heap_limit = 64

    @property
    def num_cached(self) -> int:
        return self._num_cached

    @property
    def num_evictable(self) -> int:
        return self._num_cached - self._num_locked

    def match(self, token_ids: bytes, salt: str, max_pages: int) -> Match:
        pages: list[int] = []
        node = self._roots.get(salt)
        last = node
        limit = min(len(token_ids), max_pages * self._page_bytes) // self._page_bytes
        while node is not None and len(pages) < limit:
            child = self._child(node, token_ids, len(pages))
            if child is None:
                break
            shared = min(self._common_pages(child.key, token_ids, len(pages)), limit - len(pages))
            if shared == 0:
                break
            pages += child.pages[:shared]
            last = child
            node = child if shared == len(child.pages) else None
        return Match(tuple(pages), last) if pages else NO_MATCH

    def lock(self, match: Match) -> Match:
        self._clock += 1
        node = match.node
        if isinstance(node, Node):
            above = sum(len(upper.pages) for upper in self._path(node.parent))
            if len(match.pages) < above + len(node.pages):
                # Locking more than the match would keep pages from a request that may need every page there is.
                node = self._split(node, len(match.pages) - above)
        for locked in self._path(node):
            locked.used_at = self._clock
            if locked.lock_count == 0:
                self._num_locked += len(locked.pages)
            locked.lock_count += 1
        return Match(match.pages, node)

    def unlock(self, locked: Match) -> None:
        for node in self._path(locked.node):
            assert node.lock_count > 0, "unlocked more often than locked"
            node.lock_count -= 1
            if node.lock_count == 0:
                self._num_locked -= len(node.pages)
                self._offer(node)

    def insert(self, token_ids: bytes, pages: list[int], salt: str) -> int:
        assert len(token_ids) == len(pages) * self._page_bytes, "insert takes whole pages"
        if not pages:
            return 0
        node = self._roots.get(salt)
        if node is None:
            node = self._roots[salt] = Node(None, b"", [], salt)
        self._clock += 1
        known = 0
        while known < len(pages):
            child = self._child(node, token_ids, known)
            if child is None:
                break
            shared = self._common_pages(child.key, token_ids, known)
            if shared < len(child.pages):
                child = self._split(child, shared)
            child.used_at = self._clock
            known += shared
            node = child
        if known < len(pages):
            leaf = Node(node, token_ids[known * self._page_bytes :], pages[known:], salt)
            leaf.used_at = self._clock
            node.children[leaf.key[: self._page_bytes]] = leaf
            self._num_cached += len(leaf.pages)
            node = leaf
        self._offer(node)
        return known

    def evict(self, num_pages: int) -> list[int]:
        evicted: list[int] = []
        while len(evicted) < num_pages and self._heap:
            used_at, _, leaf = heapq.heappop(self._heap)
            if used_at != leaf.used_at or not self._evictable(leaf):
                continue
            keep = max(0, len(leaf.pages) - (num_pages - len(evicted)))
            evicted += leaf.pages[keep:]
            self._num_cached -= len(leaf.pages) - keep
            if keep:
                leaf.key, leaf.pages = leaf.key[: keep * self._page_bytes], leaf.pages[:keep]
                self._offer(leaf)
            else:
                self._remove(leaf)
        return evicted

    def check(self) -> None:
        """Recount everything from the tree; for tests. AssertionError names the first difference."""
        cached = locked = 0
        stack = list(self._roots.values())
        while stack:
            node = stack.pop()
            assert len(node.key) == len(node.pages) * self._page_bytes
            assert node.parent is None or node.pages, "a node without pages"
            cached += len(node.pages)
            locked += len(node.pages) if node.lock_count else 0
            for first, child in node.children.items():
                assert child.parent is node and child.key.startswith(first)
                assert node.parent is None or child.lock_count <= node.lock_count, "a lock that misses an ancestor"
                stack.append(child)
        assert (cached, locked) == (self._num_cached, self._num_locked), "counters differ from the tree"

    def _child(self, node: Node, token_ids: bytes, known: int) -> Node | None:
        begin = known * self._page_bytes
        return node.children.get(token_ids[begin : begin + self._page_bytes])

    def _common_pages(self, key: bytes, token_ids: bytes, known: int) -> int:
        """Pages that `key` shares with token_ids from page `known` on."""
        size = self._page_bytes
        rest = token_ids[known * size : known * size + len(key)]
        if rest == key:
            return len(key) // size
        low, high = 0, min(len(rest), len(key)) // size  # the answer is in [low, high]
        while low < high:
            middle = (low + high + 1) // 2
            if rest[: middle * size] == key[: middle * size]:
                low = middle
            else:
                high = middle - 1
        return low

    def _split(self, node: Node, num_pages: int) -> Node:
        """Put a new node above `node` that takes its first pages. `node` stays the lower one: locks on it keep their path."""
        cut = num_pages * self._page_bytes
        upper = Node(node.parent, node.key[:cut], node.pages[:num_pages], node.salt)
        upper.lock_count, upper.used_at = node.lock_count, node.used_at
        assert node.parent is not None
        node.parent.children[upper.key[: self._page_bytes]] = upper
        node.parent, node.key, node.pages = upper, node.key[cut:], node.pages[num_pages:]
        upper.children[node.key[: self._page_bytes]] = node
        return upper

    def _path(self, node: object | None) -> list[Node]:
        """The node and its ancestors, without the root."""
        path: list[Node] = []
        while isinstance(node, Node) and node.parent is not None:
            path.append(node)
            node = node.parent
        return path

    def _evictable(self, node: Node) -> bool:
        return node.parent is not None and node.lock_count == 0 and not node.children and bool(node.pages)

    def _offer(self, node: Node) -> None:
        if self._evictable(node):
            heapq.heappush(self._heap, (node.used_at, next(self._ties), node))
            if len(self._heap) > self._heap_limit:
                self._drop_stale()

    def _drop_stale(self) -> None:
        """Keep one entry for each evictable leaf; without evictions the stale ones would pile up."""
        fresh = {
            id(entry[2]): entry for entry in self._heap if entry[0] == entry[2].used_at and self._evictable(entry[2])
        }
        self._heap = list(fresh.values())
        heapq.heapify(self._heap)
        self._heap_limit = 64 + 2 * len(self._heap)

    def _remove(self, leaf: Node) -> None:
        parent = leaf.parent
        assert parent is not None
        del parent.children[leaf.key[: self._page_bytes]]
        leaf.pages = []
        if parent.parent is None and not parent.children:
            del self._roots[parent.salt]
        self._offer(parent)
