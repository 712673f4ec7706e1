"""`Req`: one choice of one request, and its lengths.

tokens      [0 ........ prompt_len ........ len(tokens))            known to the host
planned     len(tokens) + num_pending                               one id for each sample still in flight
computed    [0 .................... num_computed)                   KV written, counting steps in flight
pages       [0 .. num_shared)           the prefix cache's, under `lock`
            [num_shared .. len(pages))  ours, returned once and late (when no step in flight holds us)
"""

from __future__ import annotations

from array import array
from enum import Enum

from overlap_serve.cache.prefix import NO_MATCH
from overlap_serve.messages import Failure, GenerateRequest, unpack_ids
from overlap_serve.sampling import FinishReason


class ReqState(Enum):
    WAITING = 1  # holds nothing
    RUNNING = 2  # holds slot and pages
    LEAVING = 3  # ended or preempted, still held by a step in flight
    GONE = 4


class Group:
    """A request: its choices, and how many of them have not ended. `seq` is its place in the order of arrival."""

    __slots__ = ("arrived", "deadline", "num_open", "reqs", "request", "seq")

    def __init__(self, request: GenerateRequest, seq: int, now: float) -> None:
        self.request = request
        self.seq = seq
        self.arrived = now
        self.deadline = float("inf") if request.timeout_s is None else now + request.timeout_s
        self.num_open = request.n
        self.reqs: list[Req] = []


class Req:
    """State of one choice. Compared by identity; ordered by `key`: lower priority value, then earlier arrival, then choice."""

    __slots__ = (
        "bypassed",
        "cached_tokens",
        "choice",
        "end_ids",
        "failure",
        "finish",
        "first_scheduled",
        "first_token",
        "group",
        "inflight",
        "key",
        "limit",
        "lock",
        "num_computed",
        "num_pending",
        "num_preempted",
        "num_shared",
        "num_skipped",
        "opened",
        "pages",
        "prompt_len",
        "slot",
        "state",
        "stop_reason",
        "tokens",
    )

    def __init__(self, group: Group, choice: int, prompt: list[int], limit: int) -> None:
        request = group.request
        self.group = group
        self.choice = choice
        self.key = (request.priority, group.seq, choice)
        self.prompt_len = len(prompt)
        self.tokens = array("i", prompt)
        if request.generated:
            self.tokens.extend(unpack_ids(request.generated[choice]))
        self.limit = limit  # of len(tokens)
        self.end_ids = frozenset(request.sampling.end_token_ids())
        self.state = ReqState.WAITING
        self.slot = -1
        self.pages: list[int] = []
        self.num_shared = 0
        self.lock = NO_MATCH
        self.num_computed = 0
        self.num_pending = 0
        self.inflight = 0
        self.finish: FinishReason | None = None
        self.stop_reason: int | str | None = None
        self.failure: Failure | None = None
        self.opened = False
        self.cached_tokens = -1
        self.bypassed = 0
        self.num_preempted = 0
        self.num_skipped = 0  # steps in a row that a decode row sat out
        self.first_scheduled: float | None = None
        self.first_token: float | None = None

    @property
    def num_planned(self) -> int:
        return len(self.tokens) + self.num_pending

    @property
    def num_generated(self) -> int:
        return len(self.tokens) - self.prompt_len

    @property
    def exhausted(self) -> bool:
        """The step that makes its last token is planned already."""
        return self.num_planned >= self.limit

    @property
    def todo(self) -> int:
        """Planned tokens without KV: 1 for a decode row, more for a row in prefill."""
        return self.num_planned - self.num_computed
