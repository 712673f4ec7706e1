"""`Shown`: what an answer shows beside the generated text: log-probabilities, and the prompt.

Owns the order between a prompt's values and its choices, and text offsets. Knows no format of an answer (`openai.logprobs` does).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from overlap_serve.messages import TextDelta, unpack_ids
from overlap_serve.openai.logprobs import (
    Offsets,
    TokenTexts,
    chat_logprobs,
    prompt_logprobs,
    text_logprobs,
    unknown_logprobs,
)
from overlap_serve.openai.protocol import ChatRequest
from overlap_serve.runtime.prepare import Prepared
from overlap_serve.sampling import TokenLogprob
from overlap_serve.text.tokenizer import Tokenizer


class Shown:
    """Of one request. A prompt's values come with the first delta of its choice 0; the deltas of its other choices wait for it."""

    def __init__(self, prepared: Prepared, tokenizer: Tokenizer) -> None:
        request = prepared.request
        self._prepared = prepared
        self._tokenizer = tokenizer
        self._chat = isinstance(request, ChatRequest)
        self._n = request.n
        self._top = request.num_logprobs
        self._prompt_top = -1 if request.prompt_logprobs is None else request.prompt_logprobs
        self._waits = request.num_prompt_logprobs >= 0
        self._skip_special = request.skip_special_tokens
        self._texts = TokenTexts(tokenizer, tokenizer.special_ids if self._skip_special else frozenset())
        self._of_prompts: dict[int, Sequence[TokenLogprob]] = {}
        self._held: dict[int, list[TextDelta]] = {}
        self._begun: set[int] = set()
        self._offsets: dict[int, Offsets] = {}

    def in_order(self, delta: TextDelta) -> Sequence[TextDelta]:
        """The deltas that can be shown, none before the values of its prompt are known."""
        prompt = delta.choice // self._n
        if not self._waits or prompt in self._of_prompts:
            return (delta,)
        if delta.choice % self._n:
            self._held.setdefault(prompt, []).append(delta)
            return ()
        given = delta.prompt_logprobs
        self._of_prompts[prompt] = unknown_logprobs(self._ids(prompt)) if given is None else given
        return (delta, *self._held.pop(prompt, ()))

    def begins(self, choice: int) -> bool:
        """Whether nothing of this choice has been shown yet; true once."""
        first = choice not in self._begun
        self._begun.add(choice)
        return first

    def echo(self, choice: int) -> str:
        """The text that comes before the generated one."""
        return self._prepared.echoes[choice // self._n].text if self._prepared.echoes else ""

    def of_echo(self, choice: int) -> Mapping[str, object] | None:
        """`logprobs` of the echoed prompt."""
        if self._top < 0 or not self._prepared.echoes:
            return None
        prompt = choice // self._n
        return text_logprobs(self._of_prompts[prompt], self._prepared.echoes[prompt].offsets, self._top, self._texts)

    def of_tokens(self, delta: TextDelta) -> Mapping[str, object] | None:
        """`logprobs` of a delta's tokens; each delta once, in order."""
        if self._top < 0:
            return None
        if self._chat:
            return chat_logprobs(delta.logprobs, self._top, self._texts)
        if delta.choice not in self._offsets:
            self._offsets[delta.choice] = Offsets(
                self._tokenizer,
                self._ids(delta.choice // self._n),
                len(self.echo(delta.choice)),
                skip_special_tokens=self._skip_special,
            )
        offsets = self._offsets[delta.choice].take(delta.logprobs)
        return text_logprobs(delta.logprobs, offsets, self._top, self._texts)

    def of_choice(self, whole: TextDelta) -> Mapping[str, object] | None:
        """`logprobs` of a choice that is not streamed: of its echo and of all of its tokens."""
        generated = self.of_tokens(whole)
        echoed = self.of_echo(whole.choice)
        return generated if generated is None or echoed is None else dict(joined(echoed, generated))

    def of_prompt(self, choice: int) -> Sequence[object] | None:
        """The extension `prompt_logprobs`."""
        if self._prompt_top < 0:
            return None
        return prompt_logprobs(self._of_prompts[choice // self._n], self._prompt_top, self._texts)

    def _ids(self, prompt: int) -> list[int]:
        return unpack_ids(self._prepared.prompts[prompt])


def joined(first: Mapping[str, object], second: Mapping[str, object]) -> Iterator[tuple[str, object]]:
    """The four lists of two pieces of `logprobs`, one after the other."""
    for name, values in first.items():
        more = second[name]
        assert isinstance(values, list) and isinstance(more, list)
        yield name, values + more
