"""Log-probabilities as the API shows them (http-api section 7): `TokenLogprob` -> JSON objects. Knows no stream and no engine.

Three shapes of one thing: `content` entries of a chat, the four lists of a text completion, and vLLM's `prompt_logprobs`. The one
idea: a token's *bytes* are true even when they are half of a character, its *text* is what a reader can print.

    characters of a choice's text     |<------ echoed prompt ------>|<------- generated ------->|
    text_offset of a token            where its text begins: complete characters before it
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from overlap_serve.sampling import TokenLogprob
from overlap_serve.text.tokenizer import Tokenizer

FLOOR = -9999.0  # JSON has no -Infinity and no NaN
CONTEXT_TOKENS = 16  # ids before a text that a decoder sees, as many as the detokenizer gets


class TokenTexts:
    """Texts and bytes of tokens for one request. hidden: ids whose text is not in the answer (special tokens that are skipped)."""

    def __init__(self, tokenizer: Tokenizer, hidden: Collection[int]) -> None:
        self._tokenizer = tokenizer
        self._hidden = hidden
        self._texts: dict[int, str] = {}

    def text(self, token_id: int) -> str:
        """What can be shown of a token: bytes that are no character by themselves are U+FFFD."""
        text = self._texts.get(token_id)
        if text is None:
            text = self._texts[token_id] = self._tokenizer.token_bytes(token_id).decode("utf-8", "replace")
        return text

    def bytes_of(self, token_id: int) -> list[int] | None:
        """True bytes; None for a token without text, so that all bytes that there are join to the answer's text."""
        return None if token_id in self._hidden else list(self._tokenizer.token_bytes(token_id))


def finite(logprob: float) -> float:
    """-inf, NaN and everything below the floor are the floor."""
    return logprob if logprob > FLOOR else FLOOR


def chat_logprobs(entries: Iterable[TokenLogprob], top: int, texts: TokenTexts) -> dict[str, object]:
    """`choices[i].logprobs` of a chat. top: alternatives of each token, `top_logprobs` of the request."""
    content = [
        {
            **_chat_entry(entry.token_id, entry.logprob, texts),
            "top_logprobs": [_chat_entry(token_id, logprob, texts) for token_id, logprob in entry.top[:top]],
        }
        for entry in entries
    ]
    return {"content": content, "refusal": None}


def _chat_entry(token_id: int, logprob: float | None, texts: TokenTexts) -> dict[str, object]:
    value = FLOOR if logprob is None else finite(logprob)
    return {"token": texts.text(token_id), "logprob": value, "bytes": texts.bytes_of(token_id)}


def text_logprobs(
    entries: Sequence[TokenLogprob], offsets: Sequence[int], top: int, texts: TokenTexts
) -> dict[str, object]:
    """`choices[i].logprobs` of a text completion: four lists of one length. offsets: see `Offsets`."""
    assert len(entries) == len(offsets), f"{len(entries)} log-probabilities for {len(offsets)} tokens"
    return {
        "tokens": [texts.text(entry.token_id) for entry in entries],
        "token_logprobs": [None if entry.logprob is None else finite(entry.logprob) for entry in entries],
        "top_logprobs": [_by_text(entry, top, texts) for entry in entries],
        "text_offset": list(offsets),
    }


def _by_text(entry: TokenLogprob, top: int, texts: TokenTexts) -> dict[str, float] | None:
    """The likeliest tokens and the token itself. Of two tokens with one text the likelier stays: the shape has room for one."""
    if entry.logprob is None:
        return None
    best: dict[str, float] = {}
    for token_id, logprob in (*entry.top[:top], (entry.token_id, entry.logprob)):
        text = texts.text(token_id)
        best[text] = max(best.get(text, FLOOR), finite(logprob))
    return best


def prompt_logprobs(entries: Iterable[TokenLogprob], top: int, texts: TokenTexts) -> list[object]:
    """The extension `prompt_logprobs`, as vLLM returns it: for each prompt token null (the first) or its candidates by id.

    The rank of a prompt token that is not among the likeliest is not known here, and null.
    """
    return [None if entry.logprob is None else _by_id(entry, entry.logprob, top, texts) for entry in entries]


def _by_id(entry: TokenLogprob, logprob: float, top: int, texts: TokenTexts) -> Mapping[str, object]:
    ranks = {token_id: rank for rank, (token_id, _) in enumerate(entry.top, 1)}
    candidates = {**dict(entry.top[:top]), entry.token_id: logprob}
    return {
        str(token_id): {"logprob": finite(value), "rank": ranks.get(token_id), "decoded_token": texts.text(token_id)}
        for token_id, value in candidates.items()
    }


def unknown_logprobs(token_ids: Iterable[int]) -> list[TokenLogprob]:
    """Entries for a prompt that ended before its values were there."""
    return [TokenLogprob(token_id, None) for token_id in token_ids]


class Offsets:
    """`text_offset` of generated tokens, in order. start: characters of the choice's text before the first (the echo)."""

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], start: int, *, skip_special_tokens: bool) -> None:
        self._decoder = tokenizer.decoder(skip_special_tokens=skip_special_tokens)
        for token_id in prompt[-CONTEXT_TOKENS:]:
            self._decoder.push(token_id)
        self._length = start

    def take(self, entries: Iterable[TokenLogprob]) -> list[int]:
        """Where each of these tokens begins."""
        offsets = []
        for entry in entries:
            offsets.append(self._length)
            self._length += len(self._decoder.push(entry.token_id))
        return offsets
