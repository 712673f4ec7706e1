"""`echo` of text completions: what an answer repeats of its prompt, and where in it each prompt token begins."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from overlap_serve.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class Echo:
    """A prompt as the answer begins with it. offsets: of each prompt token, in characters; empty when nobody asks."""

    text: str
    offsets: tuple[int, ...] = ()


def echo_of(
    tokenizer: Tokenizer, token_ids: Sequence[int], text: str | None, *, skip_special_tokens: bool, with_offsets: bool
) -> Echo:
    """text: the prompt as the client wrote it, repeated to the letter; None: it sent ids (or had the prompt cut), which are decoded."""
    if text is None:
        text = tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)
    return Echo(text, _offsets(tokenizer, token_ids, text) if with_offsets else ())


def _offsets(tokenizer: Tokenizer, token_ids: Sequence[int], text: str) -> tuple[int, ...]:
    """Complete characters before each token. A special token has a place only where the text shows it (a bos of our own has none).

    Never beyond the end of the text: a tokenizer that normalizes may decode to a text of another length.
    """
    skipping = tokenizer.decoder(skip_special_tokens=True)
    length = 0
    offsets = []
    for token_id in token_ids:
        offsets.append(min(length, len(text)))
        if token_id not in tokenizer.special_ids:
            length += len(skipping.push(token_id))
            continue
        shown = tokenizer.token_bytes(token_id).decode("utf-8", "replace")
        if text.startswith(shown, length):
            length += len(shown)
    return tuple(offsets)
