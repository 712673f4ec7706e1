"""The radix cache against a naive model (pains A9), and what its contract promises."""

from __future__ import annotations

import random
from itertools import count

import pytest

from overlap_serve.cache.pages import IdPool
from overlap_serve.cache.prefix import Match, NoPrefixCache
from overlap_serve.cache.radix import RadixCache
from overlap_serve.messages import pack_ids


class NaiveCache:
    """Whole prefixes in a dict: (salt, ids of the first k pages) -> page. Locks and use times are kept per prefix."""

    def __init__(self, page_size: int) -> None:
        self.size = page_size
        self.pages: dict[tuple[str, tuple[int, ...]], int] = {}
        self.locks: dict[tuple[str, tuple[int, ...]], int] = {}

    def prefixes(self, ids: list[int], salt: str) -> list[tuple[str, tuple[int, ...]]]:
        return [(salt, tuple(ids[: (i + 1) * self.size])) for i in range(len(ids) // self.size)]

    def match(self, ids: list[int], salt: str) -> list[tuple[str, tuple[int, ...]]]:
        found = []
        for key in self.prefixes(ids, salt):
            if key not in self.pages:
                break
            found.append(key)
        return found

    def insert(self, ids: list[int], pages: list[int], salt: str) -> int:
        known = len(self.match(ids, salt))
        for key, page in list(zip(self.prefixes(ids, salt), pages, strict=True))[known:]:
            self.pages[key] = page
        return known

    def evictable(self) -> int:
        return sum(not self.locks.get(key) for key in self.pages)


@pytest.mark.parametrize("page_size", [1, 2, 16])
@pytest.mark.parametrize("seed", range(30))
def test_a09_tree_equals_a_naive_model_under_random_insert_match_lock_evict(page_size: int, seed: int) -> None:
    rng = random.Random(seed)
    tree, naive, fresh = RadixCache(page_size), NaiveCache(page_size), count()
    locked: list[tuple[Match, list[tuple[str, tuple[int, ...]]]]] = []
    alphabet = rng.choice((1, 2, 50))
    for _ in range(300):
        ids = [rng.randrange(alphabet) for _ in range(page_size * rng.randint(0, 8))]
        salt = rng.choice(("", "x"))
        action = rng.random()
        if action < 0.4:
            pages = [next(fresh) for _ in range(len(ids) // page_size)]
            assert tree.insert(pack_ids(ids), pages, salt) == naive.insert(ids, pages, salt)
        elif action < 0.7:
            keys = naive.match(ids, salt)
            match = tree.match(pack_ids(ids), salt, len(ids))
            assert list(match.pages) == [naive.pages[key] for key in keys]
            if keys and rng.random() < 0.5:
                locked.append((tree.lock(match), keys))
                for key in keys:
                    naive.locks[key] = naive.locks.get(key, 0) + 1
        elif action < 0.85 and locked:
            match, keys = locked.pop(rng.randrange(len(locked)))
            tree.unlock(match)
            for key in keys:
                naive.locks[key] -= 1
        else:
            wanted = rng.randint(0, 6)
            gone = tree.evict(wanted)
            assert len(gone) == min(wanted, naive.evictable())
            owner = {page: key for key, page in naive.pages.items()}
            for page in gone:
                assert not naive.locks.get(owner[page]), "a locked page was evicted"
                del naive.pages[owner[page]]
            for salt_of, prefix in naive.pages:  # what is left is closed under prefixes
                assert len(prefix) == page_size or (salt_of, prefix[:-page_size]) in naive.pages
        tree.check()
        assert tree.num_cached == len(naive.pages)
        assert tree.num_evictable == naive.evictable()


def test_least_recently_used_prefix_goes_first() -> None:
    tree = RadixCache(1)
    for name, page in (("a", 0), ("b", 1), ("c", 2)):
        tree.insert(pack_ids([ord(name)]), [page], "")
    tree.unlock(tree.lock(tree.match(pack_ids([ord("a")]), "", 1)))
    assert tree.evict(2) == [1, 2]
    assert tree.match(pack_ids([ord("a")]), "", 1).pages == (0,)


def test_match_only_looks() -> None:
    tree = RadixCache(1)
    tree.insert(pack_ids([1, 2, 3]), [0, 1, 2], "")
    before = (tree.num_cached, tree.num_evictable, len(tree._heap), tree._clock)
    assert tree.match(pack_ids([1, 2, 9]), "", 3).pages == (0, 1)
    assert tree.match(pack_ids([1, 2, 3]), "", 2).pages == (0, 1)
    assert (tree.num_cached, tree.num_evictable, len(tree._heap), tree._clock) == before


def test_lock_protects_the_match_and_no_more() -> None:
    tree = RadixCache(1)
    tree.insert(pack_ids([1, 2, 3]), [0, 1, 2], "")
    locked = tree.lock(tree.match(pack_ids([1, 2]), "", 2))
    assert tree.num_evictable == 1
    assert tree.evict(5) == [2]
    tree.unlock(locked)
    assert sorted(tree.evict(5)) == [0, 1]


def test_a37_nothing_grows_with_use_alone() -> None:
    tree = RadixCache(1)
    tree.insert(pack_ids([1, 2, 3]), [0, 1, 2], "s")
    for _ in range(10_000):
        tree.unlock(tree.lock(tree.match(pack_ids([1, 2, 3]), "s", 3)))
    assert len(tree._heap) < 200
    tree.evict(3)
    assert not tree._roots


def test_no_prefix_cache_keeps_nothing() -> None:
    cache = NoPrefixCache()
    assert cache.insert(pack_ids([1, 2]), [0, 1], "") == 2
    assert cache.match(pack_ids([1, 2]), "", 2).pages == ()
    assert cache.evict(4) == []


def test_pool_catches_a_double_free() -> None:
    pool = IdPool(4)
    ids = pool.take(3)
    pool.give(ids)
    with pytest.raises(AssertionError, match="twice"):
        pool.give(ids[:1])
    assert pool.num_free == 4
