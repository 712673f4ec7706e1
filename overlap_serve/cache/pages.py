"""Free lists of KV pages and slots: plain ints, and the identity `free + taken == total` by construction.

Knows nothing of requests or trees: whoever takes an id gives it back exactly once.
"""

from __future__ import annotations

from collections.abc import Iterable


class IdPool:
    """Ids 0..total-1, last given back is first taken (its page is the likeliest to be warm)."""

    def __init__(self, total: int) -> None:
        self.total = total
        self._free = list(range(total - 1, -1, -1))
        self._is_free = bytearray(b"\x01") * total

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(self, count: int) -> list[int]:
        """`count` ids; the caller has checked `num_free`."""
        assert count <= len(self._free), f"took {count} of {len(self._free)} free ids"
        taken = [self._free.pop() for _ in range(count)]
        for i in taken:
            self._is_free[i] = 0
        return taken

    def give(self, ids: Iterable[int]) -> None:
        """Return taken ids. A double free is our own mistake and is caught here, not two steps later as a wrong token."""
        for i in ids:
            assert not self._is_free[i], f"id {i} is given back twice"
            self._is_free[i] = 1
            self._free.append(i)


PagePool = IdPool
SlotPool = IdPool
