"""All that scheduler and engine share: the plan of a step and its result.

A plan is a *delta* on a persistent batch. A request occupies one `slot` from join to leave; the slot indexes the token pool
and the page table on the device, so nothing moves while a request runs. Rows of a step are ordered by join time.

    leaves -> joins -> new_pages -> rows: first `chunks`, in order; then every other joined slot that has caught up with its
    known tokens, one decode token each, except `skips`.

A row whose computed tokens reach its known tokens with this step is *sampled*: the new id is written to the token pool at
that position, becomes known there, and the slot decodes from the next step on. In steady-state decode the plan is empty.
"""

from __future__ import annotations

import msgspec

from overlap_serve.sampling import SamplingParams, TokenLogprob


class Join(msgspec.Struct, frozen=True, array_like=True):
    """A request enters the batch (admission, or resumption after preemption).

    token_ids: every known token, prompt and generated (int32 bytes), uploaded to the token pool. start: tokens whose KV is
    already in `pages` (prefix hit), < number of known tokens. pages: of positions [0, len(pages) * page_size). sampling: what this
    row asks for; prompt_logprobs is -1 for choices that do not report them, and once they are reported.
    """

    slot: int
    token_ids: bytes
    prompt_len: int
    start: int
    pages: tuple[int, ...]
    sampling: SamplingParams
    choice: int


class StepPlan(msgspec.Struct, frozen=True, array_like=True, tag="plan"):
    """One forward pass. chunks: (slot, length) of rows still short of their known tokens that advance in this step;
    new_pages: (slot, page), appended to the slot's page table row in order; skips: decode slots that sit this step out.
    pad_to: rows after padding for graph capture (0: none)."""

    step: int
    leaves: tuple[int, ...] = ()
    joins: tuple[Join, ...] = ()
    new_pages: tuple[tuple[int, int], ...] = ()
    chunks: tuple[tuple[int, int], ...] = ()
    skips: tuple[int, ...] = ()
    pad_to: int = 0


class StepResult(msgspec.Struct, frozen=True, array_like=True):
    """Sampled ids, one for each sampled row in row order.

    logprobs: one for each sampled row (None where the row asks for none), or empty when no row asks. prompt_logprobs: (slot, those of
    the known tokens that this step's chunk predicts, in order) of rows that ask.
    """

    step: int
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob | None, ...] = ()
    prompt_logprobs: tuple[tuple[int, tuple[TokenLogprob, ...]], ...] = ()
