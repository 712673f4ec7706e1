"""What is sent and when: prompts of exact length, shared prefixes, conversations, traces, arrival times. No I/O but reading files.

A workload is a list of sessions; a session is a list of turns that follow one another. All is a pure function of a seed, so two runs with
one seed send the same, and every point of a sweep takes another seed: a server's prefix cache knows nothing of the point before.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from overlap_serve.errors import InvalidRequest

# Common words: with a space before it, each is one token of nearly every BPE vocabulary. For servers that take text only.
WORDS = (
    "time year people way day man thing woman life child world school state family student group country problem hand part place "
    "case week company system program question work government number night point home water room mother area money story fact "
    "month lot right study book eye job word business issue side kind head house service friend father power hour game line end"
).split()


@dataclass(frozen=True)
class Turn:
    """New input of a turn: token ids, a text, or messages. output_tokens: the limit asked for. think_s: pause before it."""

    ids: tuple[int, ...] = ()
    text: str | None = None
    messages: tuple[dict[str, object], ...] | None = None
    output_tokens: int = 128
    think_s: float = 0.0


@dataclass(frozen=True)
class Session:
    """arrival_s: after the start of the run; None: the load decides."""

    turns: tuple[Turn, ...]
    arrival_s: float | None = None


@dataclass(frozen=True)
class RandomShape:
    """Random sessions. Lengths in tokens; the first turn is prefix_len + input_len long, later ones add input_len.

    num_prefixes: how many different prefixes the sessions share. spread: lengths are uniform in length * (1 +- spread).
    ids: half-open range of token ids. Special tokens have the lowest or the highest ids of a vocabulary: keep away from both.
    """

    input_len: int = 256
    output_len: int = 128
    spread: float = 0.0
    prefix_len: int = 0
    num_prefixes: int = 1
    num_turns: int = 1
    think_s: float = 0.0
    ids: tuple[int, int] = (1000, 20000)


def tokens(key: str, count: int, ids: tuple[int, int]) -> tuple[int, ...]:
    """The first `count` of an endless row of token ids that the key names. A longer row begins with the shorter."""
    rng = random.Random(key)
    span = ids[1] - ids[0]
    return tuple(ids[0] + int(rng.random() * span) for _ in range(count))


def as_text(ids: Sequence[int]) -> str:
    """As many words as ids; different ids may be the same word."""
    return " ".join(WORDS[token % len(WORDS)] for token in ids)


def random_sessions(shape: RandomShape, count: int, seed: int) -> list[Session]:
    return [_random_session(shape, seed, index) for index in range(count)]


def _random_session(shape: RandomShape, seed: int, index: int) -> Session:
    rng = random.Random(f"{seed}/lengths/{index}")
    turns = []
    for number in range(shape.num_turns):
        prefix = (
            tokens(f"{seed}/prefix/{index % shape.num_prefixes}", shape.prefix_len, shape.ids) if number == 0 else ()
        )
        own = tokens(f"{seed}/{index}/{number}", _varied(shape.input_len, shape.spread, rng), shape.ids)
        output = _varied(shape.output_len, shape.spread, rng)
        turns.append(Turn(ids=prefix + own, output_tokens=output, think_s=shape.think_s if number else 0.0))
    return Session(tuple(turns))


def _varied(length: int, spread: float, rng: random.Random) -> int:
    return max(1, rng.randint(math.floor(length * (1 - spread)), math.ceil(length * (1 + spread))))


def arrivals(rate: float, burstiness: float, count: int, seed: int) -> list[float]:
    """Seconds after the start of each of `count` arrivals at `rate` per second; rate inf: all at once.

    Gaps are gamma distributed with shape `burstiness` and mean 1 / rate: 1 is a Poisson process, less is burstier, inf is even. As
    `vllm bench serve` (get_request): times are scaled so that the last is count / rate, whatever the draw.
    """
    if math.isinf(rate):
        return [0.0] * count
    if math.isinf(burstiness):
        return [(index + 1) / rate for index in range(count)]
    rng = random.Random(f"{seed}/arrivals")
    times = list(itertools.accumulate(rng.gammavariate(burstiness, 1 / (rate * burstiness)) for _ in range(count)))
    scale = count / rate / times[-1] if times and times[-1] > 0 else 1.0
    return [time * scale for time in times]


class _TraceLine(msgspec.Struct):
    """One line of a trace: ours (arrival_s, prefix_hash), or Mooncake's (timestamp in ms, hash_ids of blocks)."""

    input_length: int
    output_length: int
    arrival_s: float | None = None
    timestamp: float | None = None
    prefix_hash: str | int | None = None
    prefix_length: int | None = None
    hash_ids: list[int] | None = None


def read_trace(file: Path, seed: int, ids: tuple[int, int], speed: float = 1.0, block: int = 512) -> list[Session]:
    """Sessions of one turn in order of arrival; speed 2 sends twice as fast. block: tokens of one of Mooncake's hash_ids.

    Requests with one prefix_hash begin with the same prefix_length tokens (default: with all of the shorter one). Raises InvalidRequest
    naming the line.
    """
    sessions = []
    for index, (where, text) in enumerate(_lines(file)):
        try:
            line = msgspec.json.decode(text, type=_TraceLine)
        except msgspec.MsgspecError as error:
            raise InvalidRequest(f"{where}: {error}") from None
        if line.arrival_s is None and line.timestamp is None:
            raise InvalidRequest(f"{where}: needs `arrival_s` (seconds) or `timestamp` (milliseconds)")
        if line.input_length < 1 or line.output_length < 1:
            raise InvalidRequest(f"{where}: input_length and output_length must be at least 1")
        arrival_s = line.arrival_s if line.arrival_s is not None else (line.timestamp or 0.0) / 1e3
        turn = Turn(ids=_trace_ids(line, f"{seed}/{index}", seed, ids, block), output_tokens=line.output_length)
        sessions.append(Session((turn,), arrival_s / speed))
    first = min(session.arrival_s or 0.0 for session in sessions)
    shifted = [replace(session, arrival_s=(session.arrival_s or 0.0) - first) for session in sessions]
    return sorted(shifted, key=lambda session: session.arrival_s or 0.0)


def _trace_ids(line: _TraceLine, own: str, seed: int, ids: tuple[int, int], block: int) -> tuple[int, ...]:
    shared: tuple[int, ...] = ()
    if line.hash_ids is not None:
        shared = tuple(
            itertools.chain.from_iterable(tokens(f"{seed}/block/{name}", block, ids) for name in line.hash_ids)
        )
    elif line.prefix_hash is not None:
        length = line.input_length if line.prefix_length is None else line.prefix_length
        shared = tokens(f"{seed}/hash/{line.prefix_hash}", length, ids)
    shared = shared[: line.input_length]
    return shared + tokens(own, line.input_length - len(shared), ids)


class _PromptLine(msgspec.Struct):
    prompt: str | list[int] | None = None
    messages: list[dict[str, object]] | None = None
    max_tokens: int | None = None


def read_prompts(file: Path, count: int, output_len: int, chat: bool) -> list[Session]:
    """`count` sessions of one turn, the file's prompts over and over. chat: plain lines and texts are a user's messages.

    *.jsonl: one object per line with `prompt` (text or token ids) or `messages`, perhaps `max_tokens`; else a line is a prompt.
    Raises InvalidRequest naming the line.
    """
    turns = []
    for where, text in _lines(file):
        turn = _prompt(text, where, output_len, file.suffix == ".jsonl")
        if (chat and turn.ids) or (not chat and turn.messages is not None):
            fits = "a text or messages" if chat else "a text or token ids"
            raise InvalidRequest(f"{where}: this endpoint takes {fits}")
        turns.append(turn)
    return [Session((turn,)) for turn in itertools.islice(itertools.cycle(turns), count)]


def _prompt(text: str, where: str, output_len: int, as_json: bool) -> Turn:
    if not as_json:
        return Turn(text=text, output_tokens=output_len)
    try:
        line = msgspec.json.decode(text, type=_PromptLine)
    except msgspec.MsgspecError as error:
        raise InvalidRequest(f"{where}: {error}") from None
    limit = output_len if line.max_tokens is None else line.max_tokens
    if line.messages is not None and line.prompt is None:
        return Turn(messages=tuple(line.messages), output_tokens=limit)
    if line.messages is None and line.prompt:
        if isinstance(line.prompt, str):
            return Turn(text=line.prompt, output_tokens=limit)
        return Turn(ids=tuple(line.prompt), output_tokens=limit)
    raise InvalidRequest(f"{where}: needs either `prompt` (text or token ids) or `messages`")


def _lines(file: Path) -> Iterator[tuple[str, str]]:
    """(file and line, text) of each line that is not blank. Raises InvalidRequest, also for a file without any."""
    try:
        content = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"{file}: cannot be read: {error}") from None
    if not content.strip():
        raise InvalidRequest(f"{file}: holds no lines")
    for number, line in enumerate(content.split("\n"), 1):
        if line.strip():
            yield f"{file}, line {number}", line.rstrip("\r")
