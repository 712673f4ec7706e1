"""Tensor parallel ranks as threads: their collectives and spans give what one rank gives."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from overlap_serve.models.tp import TP, NoTP, Span, even_span, kv_head_span, vocab_rows, vocab_span
from overlap_serve.models.weights import build_decoder
from tests.models.checkpoints import DenseAttend, make_checkpoint


@dataclass
class Group:
    """What the ranks of a thread group share: a place for each rank's tensor, and a barrier around its use."""

    size: int
    barrier: threading.Barrier = field(init=False)
    slots: list[Tensor] = field(init=False)

    def __post_init__(self) -> None:
        self.barrier = threading.Barrier(self.size, timeout=30)
        self.slots = [torch.empty(0)] * self.size

    def exchange(self, rank: int, t: Tensor) -> list[Tensor]:
        self.slots[rank] = t.clone()
        self.barrier.wait()
        everybody = list(self.slots)
        self.barrier.wait()
        return everybody


@dataclass(frozen=True)
class ThreadTP:
    rank: int
    size: int
    group: Group

    def all_reduce(self, t: Tensor) -> Tensor:
        return torch.stack(self.group.exchange(self.rank, t)).sum(0)

    def all_gather(self, t: Tensor) -> Tensor:
        return torch.cat(self.group.exchange(self.rank, t), dim=-1)

    def broadcast(self, t: Tensor) -> Tensor:
        return self.group.exchange(self.rank, t)[0]

    def minimum(self, value: int) -> int:
        return min(int(t) for t in self.group.exchange(self.rank, torch.tensor(value)))


def logits(folder: Path, tp: TP) -> Tensor:
    decoder = build_decoder(folder, load_format="auto", dtype=torch.float32, device=torch.device("cpu"), tp=tp)
    tokens_T = torch.arange(0, 100, 4)
    with torch.inference_mode():
        return decoder.logits(decoder.forward(tokens_T, torch.arange(25), DenseAttend(decoder.config)))


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
        {"architecture": "Qwen3ForCausalLM"},
        {"architecture": "Gemma2ForCausalLM"},
        {"architecture": "Gemma3ForCausalLM"},
        {"architecture": "Phi3ForCausalLM"},
        {"architecture": "Olmo2ForCausalLM"},
        {"architecture": "MixtralForCausalLM"},
        {"architecture": "Qwen3MoeForCausalLM"},
    ],
    ids=str,
)
def test_logits_of_a_group_equal_those_of_one_rank_on_every_rank(
    tmp_path: Path, size: int, changes: dict[str, Any]
) -> None:
    make_checkpoint(tmp_path, **changes)  # 101 ids, 2 kv heads: a padded vocabulary, and copied kv heads with 4 ranks
    wanted_TV = logits(tmp_path, NoTP())
    group = Group(size)
    with ThreadPoolExecutor(size) as pool:
        futures = [pool.submit(logits, tmp_path, ThreadTP(rank, size, group)) for rank in range(size)]
        for future in futures:
            torch.testing.assert_close(future.result(), wanted_TV, rtol=1e-5, atol=1e-5)


@dataclass(frozen=True)
class Place:
    rank: int
    size: int

    def all_reduce(self, t: Tensor) -> Tensor:
        return t

    def all_gather(self, t: Tensor) -> Tensor:
        return t

    def broadcast(self, t: Tensor) -> Tensor:
        return t

    def minimum(self, value: int) -> int:
        return value


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7, 128])
@pytest.mark.parametrize("vocab_size", [1, 101, 128, 49152])
def test_vocabulary_spans_cover_each_row_once(vocab_size: int, size: int) -> None:
    rows = [
        row
        for rank in range(size)
        for start, length in [vocab_span(vocab_size, Place(rank, size))]
        for row in range(start, start + length)
    ]
    assert rows == list(range(vocab_size))
    assert all(
        vocab_span(vocab_size, Place(r, size)).length <= vocab_rows(vocab_size, Place(r, size)) for r in range(size)
    )


def test_even_and_kv_head_spans() -> None:
    assert [even_span(12, Place(rank, 3), "heads") for rank in range(3)] == [Span(0, 4), Span(4, 4), Span(8, 4)]
    assert [kv_head_span(4, Place(rank, 2)) for rank in range(2)] == [Span(0, 2), Span(2, 2)]
    assert [kv_head_span(2, Place(rank, 4)) for rank in range(4)] == [Span(0, 1), Span(0, 1), Span(1, 1), Span(1, 1)]


def test_a_group_of_one_returns_what_it_gets() -> None:
    t = torch.ones(3)
    assert NoTP().all_reduce(t) is t
    assert NoTP().all_gather(t) is t
