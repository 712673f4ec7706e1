"""What the scheduler says: token outputs, counts, and the phases of a choice."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from overlap_serve.messages import Ended, StreamOpen, TokenOutput, pack_ids
from overlap_serve.sampling import TokenLogprob
from overlap_serve.scheduler.req import Req

CONTEXT_TOKENS = 16  # last prompt ids that the detokenizer gets as left context


@dataclass
class Outputs:
    """What one call made: token outputs with the detokenizer they go to, and requests that ended."""

    tokens: list[tuple[str, TokenOutput]] = field(default_factory=list)
    ended: list[Ended] = field(default_factory=list)


class Counters(msgspec.Struct):
    """Monotone counts since the start."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    discarded_tokens: int = 0
    queried_tokens: int = 0
    hit_tokens: int = 0
    preemptions: int = 0
    repairs: int = 0


class Times(NamedTuple):
    """Phases of a choice that ended, in seconds; None where it never got there."""

    queue_s: float | None
    prefill_s: float | None
    decode_s: float | None


def times_of(req: Req, now: float) -> Times:
    begin, first = req.first_scheduled, req.first_token
    return Times(
        queue_s=None if begin is None else begin - req.group.arrived,
        prefill_s=None if begin is None or first is None else first - begin,
        decode_s=None if first is None else now - first,
    )


def next_output(req: Req, token: int, logprobs: tuple[TokenLogprob, ...]) -> TokenOutput:
    """The newest token of a choice whose stream is open and goes on: once for each row and step."""
    return TokenOutput(
        req.rid,
        req.attempt,
        req.choice,
        len(req.tokens) - req.prompt_len - 1,
        (token,),
        None,
        None,
        None,
        None,
        logprobs,
    )


def token_output(
    req: Req, endpoint: str, token_ids: tuple[int, ...], logprobs: tuple[TokenLogprob, ...]
) -> TokenOutput:
    """The output of the newest tokens of a choice, its end if it has one, and with the first one what opens the stream.

    endpoint: the scheduler's, to which aborts go.
    """
    request = req.group.request
    opening = prompt_logprobs = None
    if not req.opened:
        req.opened = True
        prompt_logprobs = _take_prompt_logprobs(req)
        opening = StreamOpen(
            ingress=request.route.ingress,
            scheduler=endpoint,
            text=request.text,
            context=pack_ids(req.tokens[max(0, req.prompt_len - CONTEXT_TOKENS) : req.prompt_len].tolist()),
            generated=request.generated[req.choice] if request.generated else b"",
            prompt_tokens=req.prompt_len,
            cached_tokens=max(0, req.cached_tokens),
        )
    return TokenOutput(
        rid=request.rid,
        attempt=request.attempt,
        choice=req.choice,
        first_index=req.num_generated - len(token_ids),
        token_ids=token_ids,
        finish=req.finish,
        stop_reason=req.stop_reason,
        failure=req.failure,
        open=opening,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
    )


def _take_prompt_logprobs(req: Req) -> tuple[TokenLogprob, ...] | None:
    """For the first output. None also if the choice ended before its prompt was computed: part of them would mislead."""
    taken, req.prompt_logprobs = (None if req.scores_prompt else req.prompt_logprobs), None
    return None if taken is None else tuple(taken)
