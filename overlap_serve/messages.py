"""Wire types between processes, and their codec. msgpack by msgspec; never pickle.

Everything here is array-like: fields may only be appended, with defaults, so that old and new replicas understand each other
during a rolling update. One request, one direction:

    ingress --GenerateRequest--> scheduler --TokenOutput--> detokenizer --TextDelta--> ingress
    ingress --AbortRequest--> scheduler and detokenizer     the only edge against the stream
    ingress --Expect--> detokenizer                         so that it does not leave while the request waits
    scheduler --Ended--> the scheduler replica's control plane, which completes the open Serve call
    control plane --LoopOrder--> scheduler --LoopAnswer--> control plane      what an administrator wants of the loop
    rank 0 --StepPlan--> the other ranks of its engine     each plan, in order
"""

from __future__ import annotations

from array import array
from typing import Literal

import msgspec

from overlap_serve.sampling import AbortCause, FinishReason, SamplingParams, TextParams, TokenLogprob
from overlap_serve.step import StepPlan

ID_BYTES = 4


def pack_ids(ids: list[int] | tuple[int, ...]) -> bytes:
    """Token ids as int32 bytes, native order (all hosts of a cluster are little-endian)."""
    return array("i", ids).tobytes()


def unpack_ids(data: bytes) -> list[int]:
    """Inverse of `pack_ids`."""
    ids = array("i")
    ids.frombytes(data)
    return ids.tolist()


class Route(msgspec.Struct, frozen=True, array_like=True):
    """zmq endpoints of the two hops behind the scheduler, chosen by the ingress at admission."""

    detokenizer: str
    ingress: str


class GenerateRequest(msgspec.Struct, frozen=True, array_like=True, tag="generate"):
    """One prompt with its n choices. `rid` is ours and unique; a client's request id is only a label.

    prompt: int32 bytes (`pack_ids`). generated: per choice, tokens already made by an earlier attempt (int32 bytes), empty on the first.
    timeout_s: seconds left until the deadline when sent, or None. priority: lower first.
    continued: part of an HTTP request that was accepted before, so a pause does not refuse it. probe: made by the server itself to
    see that the engine works; in no count of tokens or requests.
    """

    rid: str
    attempt: int
    prompt: bytes
    n: int
    sampling: SamplingParams
    text: TextParams
    route: Route
    priority: int = 0
    timeout_s: float | None = None
    cache_salt: str = ""
    generated: tuple[bytes, ...] = ()
    continued: bool = False
    probe: bool = False

    def __post_init__(self) -> None:
        """Shape only; ValueError, so that a decoder refuses a message that no process of ours has sent."""
        if self.n < 1 or len(self.generated) not in (0, self.n):
            raise ValueError(f"n is {self.n} with {len(self.generated)} generated prefixes")
        if any(len(ids) % ID_BYTES for ids in (self.prompt, *self.generated)):
            raise ValueError(f"token ids must be whole int32 values of {ID_BYTES} bytes")


class AbortRequest(msgspec.Struct, frozen=True, array_like=True, tag="abort"):
    """End a request (choice None: all its choices). Sent to the scheduler; and to the detokenizer when the scheduler is gone."""

    rid: str
    cause: AbortCause
    choice: int | None = None


class Expect(msgspec.Struct, frozen=True, array_like=True, tag="expect"):
    """The output of this request will come through the detokenizer that gets this: it must not leave before, even while the request
    still waits in a scheduler. Sent by the ingress when it submits the request."""

    rid: str
    n: int


class Stop(msgspec.Struct, frozen=True, array_like=True, tag="stop"):
    """Ends the receiving loop. drain_s: how long running requests may go on; the rest end with abort/shutdown."""

    drain_s: float = 0.0


class StreamOpen(msgspec.Struct, frozen=True, array_like=True):
    """What a detokenizer must know of a choice, sent with its first output. Only this creates state there.

    context: the last prompt ids, whose text is subtracted (int32 bytes). generated: ids of earlier attempts, already
    delivered as text. scheduler: endpoint to which the ingress sends aborts. cached_tokens: of the prompt, from the prefix cache.
    """

    ingress: str
    scheduler: str
    text: TextParams
    context: bytes
    generated: bytes
    prompt_tokens: int
    cached_tokens: int


class Failure(msgspec.Struct, frozen=True, array_like=True):
    """Why a request ended with `error`: becomes an error of `overlap_serve.errors` at the ingress."""

    code: str
    message: str
    http_status: int = 500


class TokenOutput(msgspec.Struct, frozen=True, array_like=True, tag="tokens", gc=False):
    """New tokens of one choice, and how it ended if it did. gc=False: it cannot be part of a cycle, and a thousand made in one step
    would start the collector.

    first_index: index of token_ids[0] among the choice's generated tokens. stop_reason: the stop token id, or the abort cause.
    logprobs: one for each of token_ids, or empty when the request asks for none. prompt_logprobs: of every prompt token, on the
    first output of a request that asks for them.
    """

    rid: str
    attempt: int
    choice: int
    first_index: int
    token_ids: tuple[int, ...]
    finish: FinishReason | None = None
    stop_reason: int | str | None = None
    failure: Failure | None = None
    open: StreamOpen | None = None
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob, ...] | None = None


class TextDelta(msgspec.Struct, frozen=True, array_like=True, tag="text"):
    """Text that became certain, with the ids that made it.

    num_tokens: generated tokens of the choice so far, counted at the cut (usage). Terminal when `finish` is set.
    scheduler, prompt_tokens and cached_tokens repeat StreamOpen on the first delta of a choice (empty string and -1 later).
    text_offset: characters of the choice's text before `text`, or -1 if not said. Smaller than what was delivered only after a
    migration: the ids of held-back text are not released, but text before it may have been; the ingress skips the difference.
    logprobs and prompt_logprobs: as in TokenOutput; released together with their ids.
    """

    rid: str
    attempt: int
    choice: int
    first_index: int
    token_ids: tuple[int, ...]
    text: str
    num_tokens: int
    finish: FinishReason | None = None
    stop_reason: int | str | None = None
    failure: Failure | None = None
    scheduler: str = ""
    prompt_tokens: int = -1
    cached_tokens: int = -1
    text_offset: int = -1
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob, ...] | None = None


class Ended(msgspec.Struct, frozen=True, array_like=True, tag="ended"):
    """All choices of a request have ended in the scheduler; completes the open Serve call."""

    rid: str
    attempt: int


class LoopOrder(msgspec.Struct, frozen=True, array_like=True, tag="order"):
    """What an administrator wants of a scheduler's loop; it answers each with a `LoopAnswer` of the same id.

    flush: drop the prefix cache; with `force` all open requests end first, with abort/api. pause: refuse new requests, go on with
    the open ones. resume: take them again.
    """

    id: str
    action: Literal["flush", "pause", "resume"]
    force: bool = False


class LoopAnswer(msgspec.Struct, frozen=True, array_like=True, tag="answer"):
    """The order was obeyed; or, `busy`, it was not, because requests are open. freed_pages: KV pages that the cache held."""

    id: str
    busy: bool = False
    freed_pages: int = 0


class PauseState(msgspec.Struct, frozen=True, array_like=True):
    """Whether the application takes requests, as an administrator said last. at_ns: when, by the clock of the ingress that was
    asked; of two states the newer holds, so that processes which tell each other end up with the same. 0: nobody has said anything.
    """

    at_ns: int = 0
    paused: bool = False


class ReplicaStatus(msgspec.Struct, frozen=True, array_like=True):
    """What a scheduler replica says of itself; travels over Ray, a few times a second at most.

    status: `stalled` when last_step_age_s exceeds `ready_stall_s` with runnable work. last_step_age_s: 0 when idle.
    capacity_tokens: KV capacity C of http-api section 2.3. endpoint: the scheduler's inbox. pause: the newest that it was told.
    """

    replica: str
    status: Literal["loading", "ready", "draining", "paused", "stalled", "dead"]
    last_step_age_s: float = 0.0
    running: int = 0
    waiting: int = 0
    capacity_tokens: int = 0
    kv_usage: float = 0.0
    endpoint: str = ""
    pause: PauseState = PauseState()


Message = (
    GenerateRequest | AbortRequest | Expect | Stop | TokenOutput | TextDelta | Ended | LoopOrder | LoopAnswer | StepPlan
)

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(list[Message])


def encode(messages: list[Message]) -> bytes:
    """One transport payload: a list of messages, in order."""
    return _encoder.encode(messages)


def decode(payload: bytes | memoryview) -> list[Message]:
    """Raises msgspec.DecodeError or msgspec.ValidationError on anything that is not a list of known messages."""
    return _decoder.decode(payload)
