"""`Detokenizer`: token outputs in, text deltas out. A pure state machine; knows no sockets and no clock.

Owns the text state of every open choice, keyed (rid, attempt, choice): created only by `TokenOutput.open`, deleted exactly once
(terminal output, stop string, drop), so a late output can never bring a request back (http-api sections 5 and 6).

The text of a choice, and which part is where:

    |<------- sent ------->|<-- held: may begin a stop string -->|<-- at most 3 bytes of a character -->|
    0                     sent                                 length          (inside the decoder)

An id is released with the first text sent beyond its start; the start is the number of complete characters before it. Its logprob
goes with it.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable
from functools import lru_cache

import msgspec

from overlap_serve.messages import Failure, StreamOpen, TextDelta, TokenOutput, unpack_ids
from overlap_serve.sampling import FinishReason, TokenLogprob
from overlap_serve.text.decoding import Decoder
from overlap_serve.text.stops import StopMatcher, StopString, compile_stops
from overlap_serve.text.tokenizer import Tokenizer

COMPILED_STOPS = 64  # stop lists kept compiled; the n choices of a request share one


class Detokenizer:
    """num_late: outputs dropped because their choice is gone or was never opened."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._choices: dict[str, dict[int, _Choice]] = {}  # rid -> choice index -> state of its latest attempt
        self._compile = lru_cache(COMPILED_STOPS)(compile_stops)
        self.num_late = 0

    def __len__(self) -> int:
        """Open choices."""
        return sum(len(choices) for choices in list(self._choices.values()))

    def handle(self, output: TokenOutput) -> tuple[str, TextDelta] | None:
        """The delta that this output makes, and the ingress endpoint it goes to. None: nothing to say, or the choice is gone.

        The first output of a choice always makes a delta. Raises ValueError if ids are missing or repeated, and whatever a broken
        output can provoke; the caller then ends the choice with `fail`.
        """
        choice = self._find(output) or self._open(output)
        if choice is None:
            self.num_late += 1
            return None
        delta = choice.advance(output)
        if delta is not None and delta.finish is not None:
            self.drop(output.rid, output.choice)
        return None if delta is None else (choice.ingress, delta)

    def fail(self, output: TokenOutput, failure: Failure) -> tuple[str, TextDelta] | None:
        """End a choice whose output could not be handled; held text is dropped with it. None if the choice is gone."""
        choice = self._find(output)
        ingress = choice.ingress if choice else output.open.ingress if output.open else None
        if ingress is None:
            return None
        delta = TextDelta(
            rid=output.rid,
            attempt=output.attempt,
            choice=output.choice,
            first_index=choice.next_index if choice else output.first_index,
            token_ids=(),
            text="",
            num_tokens=choice.num_tokens if choice else output.first_index,
            finish="error",
            failure=failure,
        )
        self.drop(output.rid, output.choice)
        return ingress, delta

    def drop(self, rid: str, choice: int | None) -> None:
        """Forget a choice, or all of a request. Unknown ones are ignored."""
        choices = self._choices.get(rid)
        if choices is None:
            return
        if choice is None:
            choices.clear()
        else:
            choices.pop(choice, None)
        if not choices:
            del self._choices[rid]

    def drop_idle(self) -> int:
        """Forget choices that got no output since the last call: their scheduler and their ingress are both gone. Returns how many."""
        idle = [(rid, i) for rid, choices in self._choices.items() for i, c in choices.items() if not c.touched]
        for rid, index in idle:
            self.drop(rid, index)
        for choices in self._choices.values():
            for choice in choices.values():
                choice.touched = False
        return len(idle)

    def _find(self, output: TokenOutput) -> _Choice | None:
        choice = self._choices.get(output.rid, {}).get(output.choice)
        return choice if choice is not None and choice.attempt == output.attempt else None

    def _open(self, output: TokenOutput) -> _Choice | None:
        opening = output.open
        if opening is None:
            return None
        older = self._choices.get(output.rid, {}).get(output.choice)
        if older is not None and older.attempt > output.attempt:
            return None
        choice = _Choice(self._tokenizer, self._compile(opening.text.stop), output.attempt, opening)
        self._choices.setdefault(output.rid, {})[output.choice] = choice
        return choice


class _Choice:
    """Text state of one choice in one attempt."""

    def __init__(self, tokenizer: Tokenizer, stops: tuple[StopString, ...], attempt: int, opening: StreamOpen) -> None:
        self.attempt = attempt
        self.ingress = opening.ingress
        self.touched = True
        self.num_tokens = 0
        self._opening: StreamOpen | None = opening  # until the first delta
        self._params = opening.text
        self._end_ids = frozenset((*opening.text.stop_token_ids, *opening.text.eos_token_ids))
        self._decoder: Decoder = tokenizer.decoder(skip_special_tokens=opening.text.skip_special_tokens)
        self._matcher = StopMatcher(stops)
        self._length = 0  # characters of complete text
        self._sent = 0  # of them, sent or about to be
        self._held = ""  # text[sent:length]
        self._pieces: list[str] = []  # of the next delta
        self._pieces_start = 0  # offset of the first of them
        self._ids: deque[tuple[int, int]] = deque()  # (id, start of its text), not released yet
        self._logprobs: deque[TokenLogprob] = deque()  # of the same ids in the same order; empty if not asked for
        self._stop: str | None = None  # the stop string that ended the text
        for token_id in unpack_ids(opening.context):
            self._decoder.push(token_id)
        self._replay(unpack_ids(opening.generated))

    @property
    def next_index(self) -> int:
        """Index of the first id that is not released."""
        return self.num_tokens - len(self._ids)

    def advance(self, output: TokenOutput) -> TextDelta | None:
        """Take the output's ids; None if there is nothing to say."""
        self.touched = True
        if output.token_ids and output.first_index != self.num_tokens:
            raise ValueError(f"expected token {self.num_tokens} of the choice, got token {output.first_index}")
        if output.logprobs:
            self._add_logprobs(output)
        ids, end_id = self._split(output)
        self._push_all(ids)
        if output.finish is not None and self._stop is None:
            self._finish(end_id)
        if self._stop is not None:
            return self._delta(output, "stop", self._stop)
        if output.finish is None and self._opening is None and not any(self._pieces):
            return None
        return self._delta(output, output.finish, output.stop_reason, output.failure)

    def _add_logprobs(self, output: TokenOutput) -> None:
        """Those of ids after a stop string are never released."""
        if len(output.logprobs) != len(output.token_ids):
            raise ValueError(f"{len(output.token_ids)} tokens came with {len(output.logprobs)} logprobs")
        self._logprobs.extend(output.logprobs)

    def _release_logprobs(self, count: int) -> tuple[TokenLogprob, ...]:
        return tuple(self._logprobs.popleft() for _ in range(count))

    def _split(self, output: TokenOutput) -> tuple[tuple[int, ...], int | None]:
        """The ids that make text, and the stop token at their end if its text is cut."""
        ids = output.token_ids
        is_end = output.finish == "stop" and len(ids) > 0 and ids[-1] in self._end_ids
        if is_end and not self._params.include_stop_str_in_output:
            return ids[:-1], ids[-1]
        return ids, None

    def _push_all(self, ids: Iterable[int]) -> None:
        """Up to the one that completes a stop string."""
        for token_id in ids:
            if self._stop is not None:
                return
            self._push(token_id)

    def _push(self, token_id: int) -> None:
        text = self._decoder.push(token_id)
        self._ids.append((token_id, self._length))
        self.num_tokens += 1
        # The text of the first min_tokens tokens is not shown to the matcher: so no match and no hold-back starts in it.
        self._take(text, may_stop=self.num_tokens > self._params.min_tokens)

    def _finish(self, end_id: int | None) -> None:
        """Nothing follows: send the incomplete character, as a full decode shows it, and what is held."""
        self._take(self._decoder.flush(), may_stop=self.num_tokens >= self._params.min_tokens)
        if self._stop is not None:
            return
        self._send(self._held)
        self._held = ""
        if end_id is not None:
            self._ids.append((end_id, self._length))
            self.num_tokens += 1

    def _take(self, text: str, *, may_stop: bool) -> None:
        """Complete text from the decoder: send what is certain, hold what may begin a stop string."""
        if not text:
            return
        self._length += len(text)
        match = self._matcher.feed(text) if may_stop else None
        buffer = self._held + text
        if match is None:
            keep = len(buffer) - self._matcher.held
            self._send(buffer[:keep])
            self._held = buffer[keep:]
            return
        end = len(self._held) + match.end
        self._send(buffer[: end if self._params.include_stop_str_in_output else end - len(match.text)])
        self._stop = match.text

    def _send(self, text: str) -> None:
        self._pieces.append(text)
        self._sent += len(text)

    def _replay(self, ids: list[int]) -> None:
        """Ids that an earlier attempt delivered: same state as if they had come here, but nothing is said again.

        The client may even have a little more text than they release here: an id whose text was held stays unreleased, while a
        later one can have shown that the held text before it was certain. `text_offset` of the next delta tells the ingress.
        """
        self._push_all(ids)
        self._ids.clear()
        self._drain_pieces()

    def _drain_pieces(self) -> tuple[int, str]:
        start, text = self._pieces_start, "".join(self._pieces)
        self._pieces.clear()
        self._pieces_start = self._sent
        return start, text

    def _release(self, everything: bool) -> tuple[int, ...]:
        """Take the ids whose text starts before what is sent (everything: also those without text of their own)."""
        if everything:
            ids = tuple(token_id for token_id, _ in self._ids)
            self._ids.clear()
            return ids
        known = itertools.takewhile(lambda item: item[1] < self._sent, self._ids)
        ids = tuple(token_id for token_id, _ in known)
        for _ in ids:
            self._ids.popleft()
        return ids

    def _delta(
        self,
        output: TokenOutput,
        finish: FinishReason | None,
        stop_reason: int | str | None,
        failure: Failure | None = None,
    ) -> TextDelta:
        first_index = self.next_index
        token_ids = self._release(everything=finish is not None and self._stop is None)
        text_offset, text = self._drain_pieces()
        opening, self._opening = self._opening, None
        delta = TextDelta(
            rid=output.rid,
            attempt=output.attempt,
            choice=output.choice,
            first_index=first_index,
            token_ids=token_ids,
            text=text,
            num_tokens=self.num_tokens,
            finish=finish,
            stop_reason=stop_reason,
            failure=failure,
            scheduler="" if opening is None else opening.scheduler,
            prompt_tokens=-1 if opening is None else opening.prompt_tokens,
            cached_tokens=-1 if opening is None else opening.cached_tokens,
            text_offset=text_offset,
            logprobs=self._release_logprobs(len(token_ids)) if self._logprobs else (),
        )
        if output.prompt_logprobs is None:
            return delta
        # Only on the first output, which always makes a delta.
        return msgspec.structs.replace(delta, prompt_logprobs=output.prompt_logprobs)
