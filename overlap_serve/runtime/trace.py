"""`LoopTrace`: the last rounds of a loop and the last spans of its device, kept in rings so that they can be asked for afterwards.

Owns nothing but numbers; who draws them is `bench.timeline`. All times are of `time.monotonic`, in seconds. The one idea: a round is
four marks and a wait, which the meter has anyway, so recording is one append to a bounded deque.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from overlap_serve.device.base import Span

CAPACITY = 4096  # rounds; a minute of 15 ms steps


class Round(NamedTuple):
    """One round of the loop. step: that it launched, -1 for none. num_tokens: of that step.

    begin .. planning    receive (from the end of the round before, or from the end of an idle wait)
    planning .. planned  plan
    planned .. launched  launch
    launched + waited_s  sync point 2 is over; a loop of depth 0 or 1 waits at most once a round
    .. end               process: apply and send
    """

    step: int
    num_tokens: int
    begin: float
    planning: float
    planned: float
    launched: float
    waited_s: float
    end: float

    @property
    def wait_end(self) -> float:
        return self.launched + self.waited_s

    @property
    def host_s(self) -> float:
        """Without the wait for the device."""
        return self.end - self.begin - self.waited_s


class LoopTrace:
    """rounds: written by the loop's thread. spans: by the device's stream (see `Span`); both may be copied by others at any time."""

    def __init__(self, capacity: int = CAPACITY) -> None:
        self._rounds: deque[Round] = deque(maxlen=capacity)
        self._spans: deque[Span] = deque(maxlen=4 * capacity)  # forward, sampler, and scores of prompts
        self.add_round = self._rounds.append
        self.add_span = self._spans.append

    @property
    def rounds(self) -> list[Round]:
        return list(self._rounds)

    @property
    def spans(self) -> list[Span]:
        return list(self._spans)

    def clear(self) -> None:
        self._rounds.clear()
        self._spans.clear()
