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
from overlap_serve.sampling import FinishReason, TokenLogprob


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
        "attempt",
        "blocked",
        "bypassed",
        "cached_tokens",
        "choice",
        "counts",
        "detokenizer",
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
        "prompt_logprobs",
        "rid",
        "slot",
        "state",
        "stop_reason",
        "tokens",
    )

    def __init__(self, group: Group, choice: int, prompt: list[int], limit: int) -> None:
        request = group.request
        self.group = group
        self.rid = request.rid
        self.attempt = request.attempt
        self.choice = choice
        self.detokenizer = request.route.detokenizer
        self.counts = not request.probe  # in the numbers of tokens
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
        # Of tokens [0, len) so far, until they are sent with the first output; None: not asked for, or sent. Choice 0 answers for all.
        self.prompt_logprobs: list[TokenLogprob] | None = None
        if choice == 0 and prompt and request.sampling.prompt_logprobs >= 0:
            self.prompt_logprobs = [TokenLogprob(prompt[0], None)]
        self.blocked = False  # did not fit when it was last tried
        self.bypassed = 0
        self.num_preempted = 0
        self.num_skipped = 0  # steps in a row that a decode row sat out
        self.first_scheduled: float | None = None
        self.first_token: float | None = None

    @property
    def salt(self) -> str:
        """Separates prefix caches."""
        return self.group.request.cache_salt

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
    def scores_prompt(self) -> bool:
        """Logprobs of prompt tokens are still to come."""
        return self.prompt_logprobs is not None and len(self.prompt_logprobs) < self.prompt_len

    @property
    def reusable_tokens(self) -> int:
        """Known tokens that need not be computed again if their KV is cached: each but the one that predicts what comes next,
        which is the next prompt token while its logprob is asked for (pains A22), and the next id to sample otherwise."""
        if self.prompt_logprobs is not None and self.scores_prompt:
            return len(self.prompt_logprobs) - 1
        return len(self.tokens) - 1

    @property
    def todo(self) -> int:
        """Planned tokens without KV: 1 for a decode row, more for a row in prefill."""
        return self.num_planned - self.num_computed
