"""How one rank of a tensor-parallel group sees the others, and which part of a tensor is its own.

Knows neither NCCL nor gloo: layers get a `TP` as an argument, and with one rank it costs nothing. The split of a dimension is
decided here only, so that the layers and the weight loader cannot disagree.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

from torch import Tensor

from overlap_serve.errors import ModelLoadError


class TP(Protocol):
    """One rank's view of its group. Every rank calls the same collectives in the same order."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def all_reduce(self, t: Tensor) -> Tensor:
        """Sum over all ranks; may reuse the memory of `t`."""

    def all_gather(self, t: Tensor) -> Tensor:
        """Concatenation over all ranks along the last dimension, in rank order. Shapes are equal on all ranks."""

    def broadcast(self, t: Tensor) -> Tensor:
        """What rank 0 has in `t`; may reuse its memory."""

    def minimum(self, value: int) -> int:
        """The smallest value of all ranks, waiting for the slowest; at start-up only."""


class NoTP:
    """A group of one."""

    rank = 0
    size = 1

    def all_reduce(self, t: Tensor) -> Tensor:
        return t

    def all_gather(self, t: Tensor) -> Tensor:
        return t

    def broadcast(self, t: Tensor) -> Tensor:
        return t

    def minimum(self, value: int) -> int:
        return value


class Span(NamedTuple):
    """A rank's part [start, start + length) of a dimension."""

    start: int
    length: int


def even_span(total: int, tp: TP, what: str) -> Span:
    """Equal parts. Raises ModelLoadError when the group does not divide `total`; `what` names it."""
    if total % tp.size:
        raise ModelLoadError(
            f"{total} {what} cannot be split over {tp.size} ranks; choose a tensor_parallel_size that divides it"
        )
    return Span(tp.rank * (total // tp.size), total // tp.size)


def kv_head_span(num_kv_heads: int, tp: TP) -> Span:
    """Kv heads of this rank; with more ranks than kv heads, neighbouring ranks hold copies of one head."""
    if tp.size <= num_kv_heads:
        return even_span(num_kv_heads, tp, "kv heads")
    if tp.size % num_kv_heads:
        raise ModelLoadError(
            f"{num_kv_heads} kv heads cannot be copied evenly to {tp.size} ranks; "
            "choose a tensor_parallel_size that is a multiple of it"
        )
    return Span(tp.rank * num_kv_heads // tp.size, 1)


def vocab_span(vocab_size: int, tp: TP) -> Span:
    """Vocabulary rows of this rank. All ranks but the last few hold `vocab_rows` rows; those hold what is left."""
    rows = vocab_rows(vocab_size, tp)
    start = min(tp.rank * rows, vocab_size)
    return Span(start, min(rows, vocab_size - start))


def vocab_rows(vocab_size: int, tp: TP) -> int:
    """Rows that every rank allocates: equal on all ranks, so that logits can be gathered."""
    return -(-vocab_size // tp.size)
