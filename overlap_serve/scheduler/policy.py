"""Shares and margins: who gets the token budget of a step, and how much room an admission must leave. Pure functions."""

from __future__ import annotations

from typing import NamedTuple

# A resumed request must have room for this many new tokens, doubled at each preemption: it cannot be preempted for ever.
RESUME_TOKENS = 64
# Of the prefill budget, what the oldest prefill may take while others wait (pains A12: a hog must not stop newcomers).
OLDEST_SHARE = 0.75
# Of the step's budget, what prefill gets once it has waited `max_prefill_wait_steps`.
STARVED_PREFILL_SHARE = 0.25


class Split(NamedTuple):
    """How many decode rows run, and how many tokens prefill may take."""

    decode_rows: int
    prefill_tokens: int


def split_budget(
    budget: int, num_decode: int, wants_prefill: bool, prefill_starved: bool, decode_starved: int
) -> Split:
    """Decode rows first, the rest to prefill. A starved prefill gets its share before decode rows that are not starved.

    decode_starved: decode rows that have sat out as long as they may; they always run.
    """
    decode = min(num_decode, budget)
    if wants_prefill and prefill_starved:
        share = max(1, int(budget * STARVED_PREFILL_SHARE))
        decode = max(min(decode, budget - share), min(decode_starved, budget))
    return Split(decode, budget - decode)


def oldest_chunk(todo: int, budget: int, others_wait: bool) -> int:
    """Chunk of the oldest prefill; at least one token as long as there is budget."""
    share = max(1, int(budget * OLDEST_SHARE)) if others_wait else budget
    return min(todo, share)


def growth_pages(num_rows: int, growth_tokens: int, page_size: int) -> int:
    """Pages that running rows take within growth_tokens steps: the room they are promised when somebody new is admitted."""
    return -(-num_rows * growth_tokens // page_size)


def own_margin_pages(remaining: int, num_preempted: int, growth_tokens: int, page_size: int) -> int:
    """Pages beyond its known tokens that a newcomer (num_preempted 0) or a resumed request must find."""
    wanted = growth_tokens if num_preempted == 0 else RESUME_TOKENS << min(num_preempted - 1, 16)
    return -(-min(wanted, remaining) // page_size)
