"""`Limits`: sizes and bounds of one engine's scheduling. Plain numbers; `ServeConfig` says what each means."""

from __future__ import annotations

from dataclasses import dataclass

INFINITY = float("inf")


@dataclass(frozen=True)
class Limits:
    """growth_tokens: room that every running row is promised when somebody new is admitted."""

    num_pages: int
    page_size: int
    num_slots: int
    max_model_len: int
    vocab_size: int
    max_step_tokens: int
    max_waiting: int
    max_decode_gap_steps: int
    max_prefill_wait_steps: int
    max_bypass: int
    growth_tokens: int = 32

    @property
    def capacity_tokens(self) -> int:
        return self.num_pages * self.page_size
