"""The sampler against an independent float64 reference in numpy, row by row and token by token."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from overlap_serve.engine.params import SlotParams
from overlap_serve.engine.philox import uniforms
from overlap_serve.engine.sampler import (
    DrawRows,
    SampleInputs,
    draw_top_p_by_buckets,
    draw_top_p_by_sort,
    sample,
    top_ids,
)
from overlap_serve.messages import pack_ids
from overlap_serve.sampling import SamplingParams
from overlap_serve.step import Join

INF = float("inf")


class Row:
    """One sampled row: its logits, its history and what it asks for."""

    def __init__(
        self,
        logits: list[float] | np.ndarray,
        history: list[int] | None = None,
        prompt_len: int = 1,
        choice: int = 0,
        **asks: Any,
    ) -> None:
        self.logits = np.asarray(logits, dtype=np.float32)
        self.history = history or [0]
        self.prompt_len = prompt_len
        self.choice = choice
        self.sampling = SamplingParams(max_tokens=1000, **asks)

    def uniform(self) -> float:
        position = len(self.history)
        return float(uniforms(np.array([self.sampling.seed]), np.array([self.choice]), np.array([position]))[0])


def run(rows: list[Row], num_valid_ids: int | None = None, device: str = "cpu") -> list[int]:
    """Sample the rows in one batch, through the host's grouping; slots are not in row order."""
    vocab = len(rows[0].logits)
    num_slots = len(rows) + 2
    slots = [(7 * index + 1) % num_slots for index in range(len(rows))]
    if len(set(slots)) < len(slots):
        slots = list(range(len(rows)))
    params = SlotParams(num_slots, num_valid_ids or vocab)
    tokens_SM = torch.full((num_slots, 64), vocab - 1, dtype=torch.int32)
    for slot, row in zip(slots, rows, strict=True):
        tokens_SM[slot, : len(row.history)] = torch.tensor(row.history, dtype=torch.int32)
        params.join(Join(slot, pack_ids(row.history), row.prompt_len, 0, (), row.sampling, row.choice))
    groups = params.groups(np.array(slots), np.array([len(row.history) for row in rows]))
    logits_RV = torch.from_numpy(np.stack([row.logits for row in rows])).to(device)
    inputs = SampleInputs.of(groups.map(lambda array: torch.from_numpy(array).to(device)))
    ids = sample(logits_RV, inputs, tokens_SM.to(device), num_valid_ids or vocab)
    assert ids.dtype == torch.int32
    return ids.tolist()


def reference(row: Row, num_valid_ids: int | None = None) -> int:
    """http-api 2.4, written out for one row in float64."""
    s = row.sampling
    num_valid = num_valid_ids or len(row.logits)
    x = [float(v) if not math.isnan(v) else -INF for v in row.logits]
    x = [v if token < num_valid else -INF for token, v in enumerate(x)]
    for token, value in s.logit_bias.items():
        x[token] += value
    if len(row.history) - row.prompt_len < s.min_tokens:
        masked = [-INF if token in s.end_token_ids() else v for token, v in enumerate(x)]
        x = masked if max(masked) > -INF else x
    generated = row.history[row.prompt_len :]
    for token in set(row.history):
        x[token] = x[token] / s.repetition_penalty if x[token] > 0 else x[token] * s.repetition_penalty
    for token in set(generated):
        x[token] -= s.presence_penalty + s.frequency_penalty * generated.count(token)
    best = max(x)
    if s.greedy or best == -INF:
        return x.index(best)
    p = {token: math.exp((v - best) / s.temperature) for token, v in enumerate(x)}
    order = sorted(p, key=lambda token: (-x[token], token))
    top_k = s.top_k if s.top_k < num_valid else 0  # a top_k that cuts nothing is off
    order = order[: top_k or None]
    if top_k or s.top_p < 1:
        total, reached, nucleus = sum(p[t] for t in order), 0.0, []
        for token in order:
            if reached < s.top_p * total:
                nucleus.append(token)
            reached += p[token]
        order = nucleus
    order = order if top_k else sorted(order)
    order = [token for token in order if p[token] >= s.min_p]
    target, reached = row.uniform() * sum(p[token] for token in order), 0.0
    for token in order:
        reached += p[token]
        if reached > target:
            return token
    raise AssertionError("no token")


def spread(seed: int, vocab: int = 211) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal(vocab) * 3).astype(np.float32)


ASKS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "temperature": {"temperature": 0.7},
    "hot": {"temperature": 2.0},
    "top_k": {"top_k": 5},
    "top_k_1": {"top_k": 1},
    "top_k_over_vocab": {"top_k": 10_000},
    "top_p": {"top_p": 0.6},
    "top_p_tiny": {"top_p": 1e-9},
    "top_p_almost_1": {"top_p": 0.999999},
    "min_p": {"min_p": 0.2},
    "min_p_1": {"min_p": 1.0},
    "top_k_top_p": {"top_k": 20, "top_p": 0.5},
    "top_p_min_p": {"top_p": 0.9, "min_p": 0.1, "temperature": 1.5},
    "all_filters": {"top_k": 30, "top_p": 0.8, "min_p": 0.05, "temperature": 0.9},
    "bias": {"logit_bias": {3: 100.0, 5: -100.0, 210: 99.0}},
    "bias_greedy": {"temperature": 0.0, "logit_bias": {3: 100.0, 5: -100.0}},
    "presence": {"presence_penalty": 2.0},
    "frequency": {"frequency_penalty": 1.5, "temperature": 0.0},
    "negative": {"frequency_penalty": -2.0, "presence_penalty": -1.0},
    "repetition": {"repetition_penalty": 1.8, "temperature": 0.0},
    "repetition_below_1": {"repetition_penalty": 0.5},
    "all_penalties": {"repetition_penalty": 1.3, "presence_penalty": 0.7, "frequency_penalty": 0.4, "top_k": 40},
    "min_tokens": {"min_tokens": 50, "eos_token_ids": (1, 4), "stop_token_ids": (9,), "temperature": 0.0},
    "min_tokens_reached": {"min_tokens": 2, "eos_token_ids": (1, 4), "temperature": 1.3},
}


def rows_of(name: str, count: int) -> list[Row]:
    rng = np.random.default_rng(len(name))
    return [
        Row(
            spread(100 + index),
            history=[*rng.integers(0, 211, size=3 + index % 20).tolist(), 7, 7, 8],
            prompt_len=1 + index % 3,
            seed=index - 5,
            choice=index % 4,
            **ASKS[name],
        )
        for index in range(count)
    ]


@pytest.mark.parametrize("name", ASKS)
def test_each_feature_equals_the_reference(name: str) -> None:
    rows = rows_of(name, 40)
    assert run(rows) == [reference(row) for row in rows]


def test_a23_a_row_is_the_same_alone_and_among_any_neighbours() -> None:
    """Bit for bit: vLLM's seeded rows changed when a neighbour had no seed (#51226) or the order changed (#17524)."""
    rows = [row for name in ASKS for row in rows_of(name, 3)]
    alone = [run([row])[0] for row in rows]
    rng = np.random.default_rng(3)
    for num_neighbours in (0, 1, 2, 5, 31):
        for _ in range(6):
            chosen = rng.permutation(len(rows))[: num_neighbours + 1]
            assert run([rows[index] for index in chosen]) == [alone[index] for index in chosen]
    assert run(rows) == alone


def test_a23_equal_logits_do_not_depend_on_neighbours() -> None:
    """bf16 heads make ties common; topk and sort promise no order for them."""
    flat = np.round(spread(5, 4096)).astype(np.float32)
    rows = [Row(flat, top_k=k, top_p=p, seed=k) for k in (1, 3, 50, 700) for p in (0.3, 1.0)]
    rows += [Row(flat, top_p=0.5, seed=seed) for seed in range(4)]
    alone = [run([row])[0] for row in rows]
    assert alone == [reference(row) for row in rows]
    assert run(rows) == alone
    assert run(rows[::-1]) == alone[::-1]


def test_ties_go_to_the_lowest_ids() -> None:
    logits = [1.0, 5.0, 5.0, 5.0, 0.0]
    assert run([Row(logits, temperature=0.0)]) == [1]
    assert {run([Row(logits, top_k=2, seed=seed)])[0] for seed in range(40)} == {1, 2}
    assert {run([Row(logits, top_p=0.34, temperature=0.01, seed=seed)])[0] for seed in range(40)} == {1, 2}
    signed_zeros = torch.tensor([[-0.0, 0.0, -0.0, -1.0]])
    assert top_ids(signed_zeros, 3).tolist() == [[0, 1, 2]]


def test_the_nucleus_by_buckets_equals_the_full_sort() -> None:
    """The two forms of top_p (CPU, accelerator) give the same ids, because their sums are exact."""
    generator = torch.Generator().manual_seed(0)
    for scale in (0.0, 0.1, 2.0, 8.0):
        logits_BV = torch.randn((24, 3001), generator=generator) * scale
        rows = DrawRows(
            rows_B=torch.arange(24),
            top_k_B=torch.zeros(24, dtype=torch.int64),
            uniforms_B=torch.rand(24, generator=generator, dtype=torch.float64),
            temperature_B=torch.full((24,), 0.8, dtype=torch.float64),
            top_p_B=torch.linspace(1e-6, 0.999999, 24, dtype=torch.float64),
            min_p_B=torch.zeros(24, dtype=torch.float64),
        )
        by_sort = draw_top_p_by_sort(logits_BV, rows)
        for index in range(24):
            one = DrawRows(*(field[index : index + 1] for field in rows))
            assert draw_top_p_by_buckets(logits_BV[index : index + 1], one).item() == by_sort[index].item()


def test_samples_follow_the_distribution() -> None:
    logits = np.array([2.0, 1.0, 0.0, -1.0, 1.5, -3.0], dtype=np.float32)
    p = np.exp(logits.astype(np.float64))
    num = 1500
    for asks, kept in (({}, [0, 1, 2, 3, 4, 5]), ({"top_k": 3}, [0, 1, 4]), ({"top_p": 0.95}, [0, 1, 2, 4])):
        ids = run([Row(logits, seed=seed, **asks) for seed in range(num)])
        expected = p[kept] / p[kept].sum() * num
        counts = np.bincount(ids, minlength=6)
        assert counts.sum() == counts[kept].sum()
        chi_square = float(((counts[kept] - expected) ** 2 / expected).sum())
        assert chi_square < 20.5  # 5 degrees of freedom, p = 0.001; seeds are fixed


def test_padding_of_the_head_is_never_sampled() -> None:
    logits = spread(1)
    logits[200:] = 50.0
    rows = [
        Row(logits, seed=index, **asks)
        for index, (name, asks) in enumerate(ASKS.items())
        if not name.startswith("bias")
    ]
    ids = run(rows, num_valid_ids=200)
    assert max(ids) < 200
    assert ids == [reference(row, 200) for row in rows]


def test_a24_ids_between_tokenizer_and_padded_vocab_change_nothing() -> None:
    row = Row(spread(2), history=[210, 205, 3], logit_bias={205: 100.0}, temperature=0.0, repetition_penalty=1.5)
    plain = Row(spread(2), history=[3], temperature=0.0, repetition_penalty=1.5)
    assert run([row], num_valid_ids=200) == run([plain], num_valid_ids=200)


@pytest.mark.parametrize("name", ASKS)
def test_nan_and_infinite_logits_have_a_defined_result(name: str) -> None:
    nan, inf = float("nan"), INF
    some, peak, nothing = spread(3), spread(4), np.full(211, -INF, dtype=np.float32)
    some[[0, 50, 100]] = nan
    peak[150] = inf
    only_nan = np.full(211, nan, dtype=np.float32)
    rows = [Row(logits, **ASKS[name]) for logits in (some, peak, nothing, only_nan)]
    ids = run(rows)
    assert ids[0] == reference(rows[0])
    assert ids[1] == 150 or name in ("bias",)
    assert ids[2:] == [0, 0]


def test_a25_a_mask_that_leaves_nothing_is_dropped() -> None:
    for asks in ({"temperature": 0.0}, {"temperature": 1.0}, {"top_k": 2}):
        all_end = Row([1.0, 9.0, 2.0], min_tokens=5, stop_token_ids=(0, 1, 2), **asks)
        only_end_is_finite = Row([-INF, 4.0, float("nan")], min_tokens=5, eos_token_ids=(1,), **asks)
        with_choice = Row([1.0, 9.0, 2.0], min_tokens=5, stop_token_ids=(1, 2), **asks)
        ids = run([all_end, only_end_is_finite, with_choice])
        assert ids == [reference(all_end), 1, 0]


def test_min_tokens_counts_generated_tokens_only() -> None:
    logits = [0.0, 9.0, 1.0]
    asks: dict[str, Any] = {"temperature": 0.0, "min_tokens": 2, "eos_token_ids": (1,)}
    assert run([Row(logits, history=[0] * 9, prompt_len=8, **asks)]) == [2]
    assert run([Row(logits, history=[0] * 10, prompt_len=8, **asks)]) == [1]
    assert run([Row(logits, history=[0] * 9, prompt_len=8, ignore_eos=True, **asks)]) == [1]


def test_penalties_see_prompt_and_output_as_they_should() -> None:
    logits = [1.0, 1.1, 1.2, 1.3]
    assert run([Row(logits, history=[3, 3, 3], prompt_len=3, temperature=0.0, presence_penalty=2.0)]) == [3]
    assert run([Row(logits, history=[3, 3, 3], prompt_len=2, temperature=0.0, presence_penalty=2.0)]) == [2]
    assert run([Row(logits, history=[3, 3, 3], prompt_len=3, temperature=0.0, repetition_penalty=2.0)]) == [2]
    assert run([Row(logits, history=[0, 3, 1], prompt_len=2, temperature=0.0, repetition_penalty=2.0)]) == [2]


def test_greedy_rows_alone_need_no_inputs() -> None:
    params = SlotParams(4, 100)
    for slot in range(4):
        params.join(Join(slot, pack_ids([1]), 1, 0, (), SamplingParams(max_tokens=5, temperature=0.0), 0))
    groups = params.groups(np.array([2, 0]), np.array([1, 1]))
    assert [groups.bias, groups.ends, groups.penalties, groups.greedy, groups.plain, groups.top_k, groups.top_p] == [
        None
    ] * 7


def test_a_new_request_in_a_slot_inherits_nothing() -> None:
    params = SlotParams(1, 100)
    everything = SamplingParams(
        max_tokens=5, min_tokens=3, eos_token_ids=(1,), logit_bias={3: 1.0}, presence_penalty=1.0, top_k=4, top_p=0.5
    )
    params.join(Join(0, pack_ids([1]), 1, 0, (), everything, 0))
    assert params.groups(np.array([0]), np.array([1])).bias is not None
    params.join(Join(0, pack_ids([1]), 1, 0, (), SamplingParams(max_tokens=5), 0))
    groups = params.groups(np.array([0]), np.array([1]))
    assert [groups.bias, groups.ends, groups.penalties, groups.top_k, groups.top_p] == [None] * 5
    assert groups.plain is not None


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_samples_the_ids_that_a_cpu_does() -> None:
    rows = [row for name in ASKS for row in rows_of(name, 10)]
    assert run(rows, device="cuda") == run(rows)
    assert [run([row], device="cuda")[0] for row in rows[::7]] == run(rows[::7], device="cuda")
