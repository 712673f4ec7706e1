"""ReferenceAttention against a naive float64 attention, written from the definition.

T tokens, N query heads, K kv heads, H head dim, C token places, L context.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from overlap_serve.attention.base import AttentionShape, RowLayout
from overlap_serve.attention.reference import BLOCK_TOKENS, MAX_PADDING, SPREAD_MIN_ROWS, ReferenceAttention, split_rows

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2}


class Cache:
    """A paged cache with random contents, pages dealt in random order."""

    def __init__(
        self, contexts: list[int], page_size: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype
    ) -> None:
        generator = torch.Generator().manual_seed(sum(contexts) + page_size)
        pages = [-(-context // page_size) for context in contexts]
        num_pages = sum(pages) + 3
        order = torch.randperm(num_pages, generator=generator).tolist()
        self.page_size = page_size
        self.page_table_SP = torch.full((len(contexts), max(pages) + 2), order[-1], dtype=torch.int32)
        for slot, count in enumerate(pages):
            self.page_table_SP[slot, :count] = torch.tensor(order[:count], dtype=torch.int32)
            order = order[count:]
        shape = (num_pages * page_size, num_kv_heads, head_dim)
        self.k_CKH = torch.randn(shape, generator=generator).to(dtype)
        self.v_CKH = torch.randn(shape, generator=generator).to(dtype)

    def places(self, slot: int, length: int) -> list[int]:
        table = self.page_table_SP[slot].tolist()
        return [table[p // self.page_size] * self.page_size + p % self.page_size for p in range(length)]


def naive(
    q_TNH: Tensor, k_LKH: Tensor, v_LKH: Tensor, start: int, shape: AttentionShape, window: int | None
) -> np.ndarray:
    """Softmax attention of tokens at positions start.. in float64, loop by loop."""
    q, k, v = (x.double().numpy() for x in (q_TNH, k_LKH, v_LKH))
    out = np.zeros_like(q)
    group = q.shape[1] // k.shape[1]
    for t in range(q.shape[0]):
        for n in range(q.shape[1]):
            last = start + t + 1
            seen = slice(0 if window is None else max(0, last - window), last)
            scores = k[seen, n // group] @ q[t, n]
            scores *= 1 / math.sqrt(q.shape[2]) if shape.scale is None else shape.scale
            if shape.soft_cap is not None:
                scores = shape.soft_cap * np.tanh(scores / shape.soft_cap)
            weights = np.exp(scores - scores.max())
            out[t, n] = (weights / weights.sum()) @ v[seen, n // group]
    return out


def layout(slots: list[int], starts: list[int], lengths: list[int]) -> RowLayout:
    return RowLayout(np.array(slots), np.array(starts), np.array(lengths))


def run_and_check(
    rows: RowLayout,
    *,
    page_size: int,
    heads: tuple[int, int] = (6, 2),
    head_dim: int = 16,
    dtype: torch.dtype = torch.float32,
    group_tokens: int = 1024,
    poison: bool = False,
    device: str = "cpu",
    scale: float | None = None,
    soft_cap: float | None = None,
    windows: tuple[int | None, ...] = (),
) -> None:
    contexts = [0] * (int(rows.slots_B.max()) + 1)
    for slot, start, length in zip(rows.slots_B, rows.starts_B, rows.lengths_B, strict=True):
        contexts[slot] = int(start + length)
    cache = Cache([max(1, context) for context in contexts], page_size, heads[1], head_dim, dtype)
    k_before, v_before = cache.k_CKH.clone(), cache.v_CKH.clone()
    written: list[int] = []
    for slot, start, length in zip(rows.slots_B.tolist(), rows.starts_B, rows.lengths_B, strict=True):
        written += cache.places(slot, int(start + length))[int(start) :]
    if poison:
        owned = {place for slot, context in enumerate(contexts) for place in cache.places(slot, context)}
        others = [place for place in range(len(cache.k_CKH)) if place not in owned]
        cache.k_CKH[others] = float("nan")
        cache.v_CKH[others] = float("nan")
    generator = torch.Generator().manual_seed(7)
    num_tokens = rows.num_tokens
    q_TNH = torch.randn((num_tokens, heads[0], head_dim), generator=generator).to(dtype)
    k_TKH = torch.randn((num_tokens, heads[1], head_dim), generator=generator).to(dtype)
    v_TKH = torch.randn((num_tokens, heads[1], head_dim), generator=generator).to(dtype)

    shape = AttentionShape(*heads, head_dim, scale, soft_cap, windows)
    backend = ReferenceAttention(shape, page_size, dtype, group_tokens=group_tokens)
    k_cache_CKH, v_cache_CKH = cache.k_CKH.to(device), cache.v_CKH.to(device)
    plan = backend.plan(rows, cache.page_table_SP.to(device))
    qkv = (q_TNH.to(device), k_TKH.to(device), v_TKH.to(device))
    # A plan serves every layer of its step.
    outs = [backend.run(layer, *qkv, k_cache_CKH, v_cache_CKH, plan).cpu() for layer in range(len(windows) or 2)]
    cache.k_CKH, cache.v_CKH = k_cache_CKH.cpu(), v_cache_CKH.cpu()

    assert {out_TNH.shape for out_TNH in outs} == {q_TNH.shape}
    assert torch.equal(cache.k_CKH[written], k_TKH)
    assert torch.equal(cache.v_CKH[written], v_TKH)
    kept = [place for place in range(len(k_before)) if place not in set(written)]
    if not poison:
        assert torch.equal(cache.k_CKH[kept], k_before[kept])
        assert torch.equal(cache.v_CKH[kept], v_before[kept])
    first = 0
    for slot, start, length in zip(rows.slots_B.tolist(), rows.starts_B.tolist(), rows.lengths_B.tolist(), strict=True):
        places = cache.places(slot, start + length)
        tokens = slice(first, first + length)
        for out_TNH, window in zip(outs, windows or (None, None), strict=True):
            expected = naive(q_TNH[tokens], cache.k_CKH[places], cache.v_CKH[places], start, shape, window)
            torch.testing.assert_close(
                out_TNH[tokens].double(), torch.from_numpy(expected), rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype]
            )
        first += length


MIXED = layout([3, 0, 5, 1, 4, 2], [0, 19, 7, 33, 0, 16], [9, 1, 5, 1, 1, 1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("heads", [(4, 4), (6, 2), (9, 3), (8, 1)], ids=str)
def test_mixed_rows_equal_the_definition(heads: tuple[int, int], page_size: int, dtype: torch.dtype) -> None:
    run_and_check(MIXED, page_size=page_size, heads=heads, dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("head_dim", [8, 64, 80, 128])
def test_head_dims(head_dim: int, dtype: torch.dtype) -> None:
    run_and_check(MIXED, page_size=16, head_dim=head_dim, dtype=dtype)


@pytest.mark.parametrize("page_size", [1, 5, 16])
def test_decode_rows_only(page_size: int) -> None:
    run_and_check(layout([0, 1, 2, 3], [0, 31, 32, 2], [1, 1, 1, 1]), page_size=page_size)


@pytest.mark.parametrize(("start", "length"), [(0, 1), (0, 40), (1, 40), (15, 2), (16, 16), (33, 7)])
@pytest.mark.parametrize("page_size", [1, 16])
def test_one_row(start: int, length: int, page_size: int) -> None:
    run_and_check(layout([0], [start], [length]), page_size=page_size)


def test_decode_rows_between_chunks_keep_their_places() -> None:
    run_and_check(layout([0, 1, 2, 3, 4], [40, 3, 8, 0, 41], [1, 4, 1, 6, 1]), page_size=16)


@pytest.mark.parametrize("group_tokens", [1, 50, 128])
def test_decode_rows_in_several_groups(group_tokens: int) -> None:
    slots = list(range(9))
    run_and_check(layout(slots, [3, 60, 4, 61, 5, 200, 0, 59, 1], [1] * 9), page_size=16, group_tokens=group_tokens)


@pytest.mark.parametrize("starts", [[40] * SPREAD_MIN_ROWS, list(range(30, 30 + 2 * SPREAD_MIN_ROWS))], ids=str)
@pytest.mark.parametrize("heads", [(6, 2), (9, 3), (16, 4), (4, 1)], ids=str)
@pytest.mark.parametrize("window", [None, 20])
def test_many_decode_rows_in_bfloat16(window: int | None, heads: tuple[int, int], starts: list[int]) -> None:
    num_rows = len(starts)
    rows = layout(list(range(num_rows)), starts, [1] * num_rows)
    run_and_check(rows, page_size=16, heads=heads, dtype=torch.bfloat16, poison=True, scale=0.3, windows=(window,))


@pytest.mark.parametrize(("start", "length"), [(0, BLOCK_TOKENS), (0, 2 * BLOCK_TOKENS + 9), (37, BLOCK_TOKENS + 20)])
@pytest.mark.parametrize("heads", [(6, 2), (4, 4), (4, 1)], ids=str)
@pytest.mark.parametrize("window", [None, 50])
def test_long_chunks_in_bfloat16(window: int | None, heads: tuple[int, int], start: int, length: int) -> None:
    rows = layout([0, 1], [start, 5], [length, 1])
    run_and_check(rows, page_size=16, heads=heads, dtype=torch.bfloat16, poison=True, scale=0.3, windows=(window,))


@pytest.mark.parametrize("page_size", [1, 16])
def test_stale_nan_outside_a_rows_own_context_never_reaches_it(page_size: int) -> None:
    """Pages are not cleaned when they change hands: the last request may have left anything in them."""
    run_and_check(MIXED, page_size=page_size, poison=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("heads", [(4, 4), (6, 2), (8, 1)], ids=str)
def test_scale_soft_cap_and_windows_together(heads: tuple[int, int], page_size: int, dtype: torch.dtype) -> None:
    run_and_check(MIXED, page_size=page_size, heads=heads, dtype=dtype, scale=0.4, soft_cap=1.5, windows=(None, 5, 17))


@pytest.mark.parametrize("page_size", [1, 5, 16])
@pytest.mark.parametrize("window", [1, 2, 15, 16, 17, 33, 34, 1000])
def test_windows_of_mixed_rows(window: int, page_size: int) -> None:
    """Other rows' pages hold NaN, and the longest row has 34 tokens."""
    run_and_check(MIXED, page_size=page_size, windows=(window, None), poison=True)


@pytest.mark.parametrize("window", [3, 16, 40])
@pytest.mark.parametrize(
    ("start", "length"), [(0, 1), (0, 40), (1, 40), (15, 2), (16, 16), (33, 7), (100, 1), (100, 9)]
)
@pytest.mark.parametrize("page_size", [1, 16])
def test_windows_of_one_row(start: int, length: int, page_size: int, window: int) -> None:
    run_and_check(layout([0], [start], [length]), page_size=page_size, windows=(window,), poison=True)


@pytest.mark.parametrize("window", [7, 8, 9, 10])
def test_a_window_about_as_long_as_a_first_chunk_beside_a_longer_row(window: int) -> None:
    run_and_check(layout([0, 1], [0, 60], [9, 1]), page_size=16, windows=(window,))


@pytest.mark.parametrize("window", [8, 60])
@pytest.mark.parametrize("group_tokens", [1, 50, 128, 4096])
def test_windows_of_decode_rows_in_several_groups(group_tokens: int, window: int) -> None:
    run_and_check(
        layout(list(range(9)), [3, 60, 4, 61, 5, 200, 0, 59, 1], [1] * 9),
        page_size=16,
        group_tokens=group_tokens,
        windows=(window, None),
        poison=True,
    )


@pytest.mark.parametrize("soft_cap", [0.5, 50.0])
def test_soft_caps_without_windows(soft_cap: float) -> None:
    run_and_check(MIXED, page_size=16, soft_cap=soft_cap)
    run_and_check(layout([0, 1], [40, 12], [1, 1]), page_size=16, soft_cap=soft_cap, poison=True)


def test_a_scale_of_the_model_wins_over_the_default() -> None:
    run_and_check(MIXED, page_size=16, scale=1.0)


def test_windowed_decode_reads_only_the_pages_that_its_window_touches() -> None:
    backend = ReferenceAttention(AttentionShape(6, 2, 16, windows=(20, None)), 16, torch.float32)
    cache = Cache([500, 40, 10], 16, 2, 16, torch.float32)
    plan = backend.plan(layout([0, 1, 2], [499, 39, 9], [1, 1, 1]), cache.page_table_SP)
    windowed = torch.cat([group.pages for group in plan.by_window[20].groups])
    # 500 tokens: places 480 to 499 in pages 30 and 31; 40: places 20 to 39 in pages 1 and 2; 10: page 0, padded to 2 pages.
    assert len(windowed) == 6
    assert windowed.tolist()[:4] == [*cache.page_table_SP[0, 30:32].tolist(), *cache.page_table_SP[1, 1:3].tolist()]


def test_layers_of_windows_that_hide_nothing_share_the_plan() -> None:
    backend = ReferenceAttention(AttentionShape(6, 2, 16, windows=(64, 20, None)), 16, torch.float32)
    cache = Cache([40], 16, 2, 16, torch.float32)
    plan = backend.plan(layout([0], [39], [1]), cache.page_table_SP)
    assert plan.by_window[64] is plan.by_window[None]
    assert plan.by_window[20] is not plan.by_window[None]


def test_a_nan_row_leaves_its_neighbours_alone() -> None:
    cache = Cache([20, 35], 16, 2, 16, torch.float32)
    rows = layout([0, 1], [19, 34], [1, 1])
    q, k, v = torch.randn(2, 6, 16), torch.randn(2, 2, 16), torch.randn(2, 2, 16)
    q[0] = float("nan")
    backend = ReferenceAttention(AttentionShape(6, 2, 16), 16, torch.float32)
    out = backend.run(0, q, k, v, cache.k_CKH, cache.v_CKH, backend.plan(rows, cache.page_table_SP))
    assert out[0].isnan().all()
    assert out[1].isfinite().all()


def test_queries_and_keys_may_be_views_of_one_tensor() -> None:
    cache = Cache([20, 8], 16, 2, 16, torch.float32)
    rows = layout([0, 1], [19, 4], [1, 4])
    qk = torch.randn(5, 8, 16)
    v = torch.randn(5, 2, 16)
    backend = ReferenceAttention(AttentionShape(6, 2, 16), 16, torch.float32)
    plan = backend.plan(rows, cache.page_table_SP)
    of_views = backend.run(0, qk[:, :6], qk[:, 6:], v, cache.k_CKH, cache.v_CKH, plan)
    own = backend.run(0, qk[:, :6].clone(), qk[:, 6:].clone(), v, cache.k_CKH, cache.v_CKH, plan)
    assert torch.equal(of_views, own)


def test_groups_are_bounded_in_size_and_padding() -> None:
    rng = np.random.default_rng(0)
    contexts = rng.integers(1, 3000, size=64)
    rows = np.flatnonzero(rng.random(64) < 0.8)
    groups = split_rows(rows, contexts, 1024)
    assert sorted(np.concatenate(groups).tolist()) == rows.tolist()
    for group in groups:
        longest, shortest = contexts[group].max(), contexts[group].min()
        assert len(group) == 1 or len(group) * longest <= 1024
        assert longest - shortest <= MAX_PADDING
        assert (np.diff(group) > 0).all()
    assert split_rows(rows[:0], contexts, 1024) == []


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("page_size", [1, 16])
def test_mixed_rows_equal_the_definition_on_a_gpu(page_size: int, dtype: torch.dtype) -> None:
    run_and_check(MIXED, page_size=page_size, heads=(9, 3), head_dim=64, dtype=dtype, poison=True, device="cuda")
    run_and_check(
        MIXED, page_size=page_size, dtype=dtype, poison=True, device="cuda", soft_cap=1.5, windows=(None, 5, 17)
    )
