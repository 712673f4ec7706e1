"""From logits to token ids, on the device.

Owns no state: what rows ask for arrives as `SampleInputs`, the history is the token pool. Order (http-api 2.4): logit_bias,
min_tokens mask, repetition, presence and frequency penalties, then greedy | temperature, top_k, top_p, min_p, draw.

The one idea: rows cannot influence one another, not even by rounding. Each feature runs on the rows that ask for it, and what
is summed are *integers*: a token's weight is exp(x - max) in units of 2**-40, so sums and running sums are exact, in any order
and any batch. Equal logits are ordered by token id. No host sync, except on a CPU, where it costs nothing.

R sampled rows, B rows of one feature, V vocab, L places of history, N candidates, S slots, M places of a token pool row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from overlap_serve.engine.params import Groups

ONE = 2.0**40  # weight of the likeliest token; V * 2**40 stays below 2**63 up to V = 8 million
MAX_LOGIT = torch.finfo(torch.float32).max
LOW_32 = 0xFFFFFFFF
NUM_BUCKETS = 1024
DEEPEST = 28.0  # exp(-28) is below 2**-40: what lies deeper under the maximum weighs nothing


class BiasRows(NamedTuple):
    """logit_bias of all rows as flat entries: logits[row, id] += value. Entries are unique."""

    rows: Tensor
    ids: Tensor
    values: Tensor


class EndRows(NamedTuple):
    """Rows short of min_tokens: rows_B; and their end ids as flat entries, entry e belongs to rows_B[owners[e]]."""

    rows_B: Tensor
    owners: Tensor
    ids: Tensor


class PenaltyRows(NamedTuple):
    """lengths_B: known tokens of the row; those from prompt_lengths_B on are generated."""

    rows_B: Tensor
    slots_B: Tensor
    lengths_B: Tensor
    prompt_lengths_B: Tensor
    repetition_B: Tensor
    presence_B: Tensor
    frequency_B: Tensor


class DrawRows(NamedTuple):
    """Rows that are drawn at random; float64 but rows and top_k. uniforms_B: the row's noise, in (0, 1)."""

    rows_B: Tensor
    top_k_B: Tensor
    uniforms_B: Tensor
    temperature_B: Tensor
    top_p_B: Tensor
    min_p_B: Tensor


@dataclass(frozen=True)
class SampleInputs:
    """Rows by what they ask for; None: no row does. Each row is in exactly one of greedy, plain, top_k (with or without top_p)
    and top_p (without top_k), except that greedy None with no other of these stands for "all rows"."""

    bias: BiasRows | None = None
    ends: EndRows | None = None
    penalties: PenaltyRows | None = None
    history_length: int = 0
    greedy: Tensor | None = None
    plain: DrawRows | None = None
    top_k: DrawRows | None = None
    max_top_k: int = 0
    top_p: DrawRows | None = None

    @staticmethod
    def of(groups: Groups[Tensor]) -> SampleInputs:
        """The groups' arrays under their names."""
        return SampleInputs(
            bias=None if groups.bias is None else BiasRows(*groups.bias),
            ends=None if groups.ends is None else EndRows(*groups.ends),
            penalties=None if groups.penalties is None else PenaltyRows(*groups.penalties),
            history_length=groups.history_length,
            greedy=None if groups.greedy is None else groups.greedy[0],
            plain=None if groups.plain is None else DrawRows(*groups.plain),
            top_k=None if groups.top_k is None else DrawRows(*groups.top_k),
            max_top_k=groups.max_top_k,
            top_p=None if groups.top_p is None else DrawRows(*groups.top_p),
        )


def sample(logits_RV: Tensor, inputs: SampleInputs, tokens_SM: Tensor, num_valid_ids: int) -> Tensor:
    """-> ids_R, int32. Overwrites logits_RV (float32).

    Ids from num_valid_ids on (padding of the output head) are never returned. NaN counts as -inf. A row with nothing but -inf
    yields id 0; if only its min_tokens mask did that, the mask is dropped.
    """
    torch.nan_to_num_(logits_RV, nan=float("-inf"), posinf=MAX_LOGIT, neginf=float("-inf"))
    logits_RV[:, num_valid_ids:] = float("-inf")
    if inputs.bias is not None:
        logits_RV.index_put_((inputs.bias.rows, inputs.bias.ids), inputs.bias.values, accumulate=True)
    if inputs.ends is not None:
        mask_ends(logits_RV, inputs.ends)
    if inputs.penalties is not None:
        penalize(logits_RV, inputs.penalties, tokens_SM, inputs.history_length)
    return _choose(logits_RV, inputs).int()


def _choose(logits_RV: Tensor, inputs: SampleInputs) -> Tensor:
    groups: tuple[tuple[DrawRows | None, Callable[[Tensor, DrawRows], Tensor]], ...] = (
        (inputs.plain, draw_plain),
        (inputs.top_k, lambda logits_BV, rows: draw_top_k(logits_BV, rows, inputs.max_top_k)),
        (inputs.top_p, draw_top_p_by_buckets if logits_RV.device.type == "cpu" else draw_top_p_by_sort),
    )
    if inputs.greedy is None and all(rows is None for rows, _ in groups):
        return logits_RV.argmax(dim=1)
    ids_R = torch.zeros(len(logits_RV), dtype=torch.int64, device=logits_RV.device)
    if inputs.greedy is not None:
        ids_R.index_copy_(0, inputs.greedy, logits_RV.index_select(0, inputs.greedy).argmax(dim=1))
    for rows, draw in groups:
        if rows is not None:
            for part in _parts(rows):
                ids_R.index_copy_(0, part.rows_B, draw(logits_RV.index_select(0, part.rows_B), part))
    return ids_R


def _parts(rows: DrawRows) -> Iterator[DrawRows]:
    """All rows at once; on a CPU row by row, so that a row's float64 and int64 copies stay in the cache."""
    if rows.rows_B.device.type != "cpu":
        yield rows
    else:
        for part in zip(*(torch.split(field, 1) for field in rows), strict=True):
            yield DrawRows(*part)


# -- what changes logits, in place


def mask_ends(logits_RV: Tensor, ends: EndRows) -> None:
    """-inf for the end ids, unless that leaves a row no token."""
    entry_rows = ends.rows_B[ends.owners]
    before = logits_RV[entry_rows, ends.ids]
    logits_RV.index_put_((entry_rows, ends.ids), torch.full_like(before, float("-inf")))
    dead_B = logits_RV.index_select(0, ends.rows_B).amax(dim=1) == float("-inf")
    after = torch.where(dead_B[ends.owners], before, float("-inf"))
    logits_RV.index_put_((entry_rows, ends.ids), after)


def penalize(logits_RV: Tensor, rows: PenaltyRows, tokens_SM: Tensor, history_length: int) -> None:
    """Repetition penalty over all known tokens (arXiv:1909.05858: divide what is positive, multiply what is not), presence and
    frequency penalties over generated ones. The token pool holds the newest token already: this runs after the step before."""
    ids_BL = tokens_SM[:, :history_length].index_select(0, rows.slots_B).long()
    places_L = torch.arange(history_length, device=ids_BL.device)
    known_BL = places_L < rows.lengths_B[:, None]
    generated_BL = known_BL & (places_L >= rows.prompt_lengths_B[:, None])
    ids_BL = torch.where(known_BL, ids_BL, ids_BL[:, :1])  # places past the end repeat the first token
    counts_BV = torch.zeros((len(ids_BL), logits_RV.shape[1]), dtype=torch.int32, device=ids_BL.device)
    counts_BL = counts_BV.scatter_add_(1, ids_BL, generated_BL.int()).gather(1, ids_BL)
    index = (rows.rows_B[:, None], ids_BL)
    old_BL, repetition_B1 = logits_RV[index], rows.repetition_B[:, None]
    new_BL = torch.where(old_BL > 0, old_BL / repetition_B1, old_BL * repetition_B1)
    new_BL -= torch.where(counts_BL > 0, rows.presence_B[:, None], 0.0)
    new_BL -= counts_BL * rows.frequency_B[:, None]
    logits_RV.index_put_(index, new_BL.clamp_(max=MAX_LOGIT))  # places of one token write one value


# -- drawing: logits_BV -> ids_B


def draw_plain(logits_BV: Tensor, rows: DrawRows) -> Tensor:
    """By inverse CDF in order of id."""
    weights_BV = token_weights(logits_BV, rows.temperature_B)
    return _pick(_drop_unlikely(weights_BV, rows.min_p_B), rows.uniforms_B)


def draw_top_k(logits_BV: Tensor, rows: DrawRows, max_top_k: int) -> Tensor:
    """Exactly top_k tokens, then top_p of them; by inverse CDF in order of rank."""
    ids_BN = top_ids(logits_BV, max_top_k)
    weights_BN = token_weights(logits_BV.gather(1, ids_BN), rows.temperature_B)
    rank_N = torch.arange(ids_BN.shape[1], device=ids_BN.device)
    weights_BN.masked_fill_(rank_N >= rows.top_k_B[:, None], 0)
    _drop_unlikely(_cut_nucleus(weights_BN, rows.top_p_B), rows.min_p_B)
    return ids_BN.gather(1, _pick(weights_BN, rows.uniforms_B)[:, None])[:, 0]


def draw_top_p_by_sort(logits_BV: Tensor, rows: DrawRows) -> Tensor:
    """By inverse CDF in order of id within the nucleus, found by a full sort: no host sync, for accelerators."""
    sorted_BV, ids_BV = logits_BV.sort(dim=1, descending=True, stable=True)
    weights_BV = _cut_nucleus(token_weights(sorted_BV, rows.temperature_B), rows.top_p_B)
    weights_BV = torch.zeros_like(weights_BV).scatter_(1, ids_BV, weights_BV)
    return _pick(_drop_unlikely(weights_BV, rows.min_p_B), rows.uniforms_B)


def draw_top_p_by_buckets(logits_1V: Tensor, rows: DrawRows) -> Tensor:
    """The same id for one row, sorting only the bucket of logits in which the nucleus ends (a full sort of 49,152 takes 4 ms)."""
    weights_V = token_weights(logits_1V, rows.temperature_B)[0]
    depth_V = logits_1V.amax().clamp_(min=-MAX_LOGIT) - logits_1V[0]
    buckets_V = depth_V.mul_(NUM_BUCKETS / (DEEPEST * rows.temperature_B.float())).clamp_(max=NUM_BUCKETS - 1).long()
    sums_N = torch.zeros(NUM_BUCKETS, dtype=torch.int64).scatter_add_(0, buckets_V, weights_V)
    before_N = sums_N.cumsum(0) - sums_N
    target_1 = rows.top_p_B * sums_N.sum().double()
    edge = (
        int((before_N.double() < target_1).sum()) - 1
    )  # the last bucket that begins inside; -1 if all weights are zero
    at_edge = (buckets_V == edge).nonzero()[:, 0]
    at_edge = at_edge[logits_1V[0, at_edge].argsort(descending=True, stable=True)]
    before_edge = before_N[edge] + weights_V[at_edge].cumsum(0) - weights_V[at_edge]
    weights_V.masked_fill_(buckets_V > edge, 0)
    weights_V[at_edge[before_edge.double() >= target_1]] = 0
    return _pick(_drop_unlikely(weights_V[None], rows.min_p_B), rows.uniforms_B)


def token_weights(logits_BN: Tensor, temperature_B: Tensor) -> Tensor:
    """exp((x - max) / temperature) in units of 1 / ONE, int64. In float64, where a last bit that depends on an element's place
    in a vector register is lost when the fraction is cut off. All zero for a row with nothing but -inf."""
    x_BN = logits_BN.double()
    x_BN -= x_BN.amax(dim=1, keepdim=True).clamp_(min=-MAX_LOGIT)
    return x_BN.div_(temperature_B[:, None]).exp_().mul_(ONE).long()


def top_ids(logits_BV: Tensor, num: int) -> Tensor:
    """The `num` greatest of each row, descending; equal ones by id, which `topk` on floats does not promise. -> ids_BN"""
    bits_BV = (logits_BV + 0.0).view(torch.int32)  # + 0.0: one zero instead of two
    ordered_BV = bits_BV ^ ((bits_BV >> 31) & 0x7FFFFFFF)  # as integers in the order of the floats
    last = logits_BV.shape[1] - 1
    reversed_ids_V = torch.arange(last, -1, -1, device=logits_BV.device)
    keys_BV = ordered_BV.long().bitwise_left_shift_(32).bitwise_or_(reversed_ids_V)
    return last - (keys_BV.topk(min(num, last + 1), dim=1).values & LOW_32)


def _cut_nucleus(weights_BN: Tensor, top_p_B: Tensor) -> Tensor:
    """Weights in descending order: zero after the shortest prefix that reaches top_p of the total. In place."""
    before_BN = weights_BN.cumsum(dim=1) - weights_BN
    target_B = top_p_B * weights_BN.sum(dim=1).double()
    return weights_BN.masked_fill_(before_BN.double() >= target_B[:, None], 0)


def _drop_unlikely(weights_BN: Tensor, min_p_B: Tensor) -> Tensor:
    """Zero for tokens below min_p times the likeliest one. In place."""
    least_B = min_p_B.mul(ONE).long()
    return weights_BN.masked_fill_(weights_BN < least_B[:, None], 0)


def _pick(weights_BN: Tensor, uniforms_B: Tensor) -> Tensor:
    """Index of the first token whose running sum exceeds uniform * total; 0 if all weights are zero."""
    sums_BN = weights_BN.cumsum(dim=1)
    total_B = sums_BN[:, -1]
    target_B = torch.minimum((uniforms_B * total_B.double()).long(), total_B - 1)
    return torch.searchsorted(sums_BN, target_B[:, None], right=True)[:, 0]
