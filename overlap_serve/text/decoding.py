"""Ids to text, one at a time: a decoder takes ids and returns the text that became certain.

Owns the rules by which a tokenizer's decoder turns tokens into UTF-8. Knows no requests and no stop strings. The one idea: almost
every model has one of two decoders, byte-level and byte-fallback, whose tokens are plain bytes; those are followed byte by byte
(`ByteDecoder`: exact, no left context needed, at most 3 bytes held). Any other decoder is asked about a short window
of ids (`WindowDecoder`). Both do bounded work per id, whatever the ids (SGLang #34740 was quadratic).
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol

import msgspec

REPLACEMENT = "\ufffd"
MAX_TAIL = 3  # bytes of an incomplete character, so also ids that can be waiting for its end
CONTEXT = 8  # ids of left context that a window decoder keeps at least
MAX_WINDOW = 4 * CONTEXT

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_ESCAPED_BYTES = dict.fromkeys(range(0xDC80, 0xDD00), REPLACEMENT)


class Decoder(Protocol):
    """Incremental decoding of one sequence of ids."""

    def push(self, token_id: int) -> str:
        """Text that this id made certain; often one token's text, "" while a character is incomplete."""

    def flush(self) -> str:
        """The sequence has ended: what a full decode makes of the rest."""


@dataclass(frozen=True)
class ByteScheme:
    """A tokenizer's decoder as bytes.

    token_bytes: token string to bytes. errors: how invalid UTF-8 becomes U+FFFD: "replace", one for each maximal broken piece (what
    byte-level decoders give), or "surrogateescape", one for each byte (byte-fallback; what SentencePiece gives). strip: up to so
    many leading `strip_char` are removed from the whole text.
    """

    token_bytes: Callable[[str], bytes]
    errors: Literal["replace", "surrogateescape"]
    strip: int = 0
    strip_char: str = " "


class ByteDecoder:
    """Exact for tokenizers with a `ByteScheme`. `token_bytes` maps an id, `skip` ids give no text (and break no character)."""

    def __init__(self, scheme: ByteScheme, token_bytes: Callable[[int], bytes], skip: frozenset[int]) -> None:
        self._token_bytes = token_bytes
        self._skip = skip
        self._utf8 = codecs.getincrementaldecoder("utf-8")(scheme.errors)
        self._escapes = scheme.errors == "surrogateescape"
        self._strip = scheme.strip
        self._strip_char = scheme.strip_char

    def push(self, token_id: int) -> str:
        return "" if token_id in self._skip else self._text(self._utf8.decode(self._token_bytes(token_id)))

    def flush(self) -> str:
        return self._text(self._utf8.decode(b"", True))

    def _text(self, text: str) -> str:
        if self._escapes and not text.isascii():
            text = text.translate(_ESCAPED_BYTES)
        while self._strip and text:
            if text[0] != self._strip_char:
                self._strip = 0
                break
            text = text[1:]
            self._strip -= 1
        return text


class WindowDecoder:
    """For any other decoder: the text by which `decode(window)` grows.

    The window holds at least `CONTEXT` ids before the new one, so rules about the first token or the one before (Metaspace,
    WordPiece, CTC) see a left neighbour, as in a full decode. A trailing U+FFFD may be the start of a character: it waits for
    `MAX_TAIL` further ids. `decode` must not look further back than the window.
    """

    def __init__(self, decode: Callable[[list[int]], str], skip: frozenset[int]) -> None:
        self._decode = decode
        self._skip = skip
        self._window: list[int] = []
        self._length = 0  # of decode(window), what was returned
        self._num_waiting = 0

    def push(self, token_id: int) -> str:
        if token_id in self._skip:
            return ""
        self._window.append(token_id)
        self._num_waiting += 1
        text = self._decode(self._window)
        if text.endswith(REPLACEMENT) and self._num_waiting <= MAX_TAIL:
            return ""
        return self._commit(text)

    def flush(self) -> str:
        return self._commit(self._decode(self._window)) if self._window else ""

    def _commit(self, text: str) -> str:
        new = text[self._length :]
        if len(self._window) >= 2 * CONTEXT:
            text = self._shorten(text)
        self._length = len(text)
        self._num_waiting = 0
        return new

    def _shorten(self, text: str) -> str:
        """Drop the oldest ids. A cut inside a character or a word changes the text behind it: then try one id earlier, or wait."""
        for keep in range(CONTEXT, CONTEXT + MAX_TAIL + 1):
            shorter = self._decode(self._window[-keep:])
            if text.endswith(shorter):
                del self._window[:-keep]
                return shorter
        if len(self._window) >= MAX_WINDOW:
            del self._window[:-CONTEXT]
            return self._decode(self._window)
        return text


class _Step(msgspec.Struct):
    """One decoder of tokenizer.json; `Sequence` nests them."""

    type: str
    decoders: list[_Step] = []
    pattern: dict[str, str] = {}
    content: str = ""
    start: int = 0
    stop: int = 0


def byte_scheme(decoder_json: bytes) -> ByteScheme | None:
    """The scheme of a `decoder` object of tokenizer.json, or None if it is not one of the two families.

    Byte-level: `ByteLevel`. Byte-fallback: `Replace`* `ByteFallback` [`Fuse` [`Strip`]], as Llama and Gemma tokenizers have it.
    """
    decoder = msgspec.json.decode(decoder_json, type=_Step)
    steps = decoder.decoders if decoder.type == "Sequence" else [decoder]
    if [step.type for step in steps] == ["ByteLevel"]:
        return ByteScheme(_byte_level(), "replace")
    num_replaces = next((i for i, step in enumerate(steps) if step.type != "Replace"), len(steps))
    replaces, rest = steps[:num_replaces], steps[num_replaces:]
    kinds = [step.type for step in rest]
    if kinds[:1] != ["ByteFallback"] or kinds != ["ByteFallback", "Fuse", "Strip"][: len(kinds)]:
        return None
    if any("String" not in step.pattern for step in replaces):
        return None
    strip = rest[2] if len(rest) == 3 else _Step("Strip", content=" ")
    if strip.stop or len(strip.content) != 1:
        return None
    pairs = [(step.pattern["String"], step.content) for step in replaces]
    return ByteScheme(_byte_fallback(pairs), "surrogateescape", strip.start, strip.content)


def byte_characters() -> dict[str, int]:
    """The printable character that stands for each byte in byte-level vocabularies (GPT-2's `bytes_to_unicode`)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    table = {chr(byte): byte for byte in printable}
    table.update({chr(256 + index): byte for index, byte in enumerate(others)})
    return table


def _byte_level() -> Callable[[str], bytes]:
    table = byte_characters()

    def token_bytes(token: str) -> bytes:
        try:
            return bytes([table[char] for char in token])
        except KeyError:  # an added token with other characters stands for itself
            return token.encode()

    return token_bytes


def _byte_fallback(replaces: list[tuple[str, str]]) -> Callable[[str], bytes]:
    def token_bytes(token: str) -> bytes:
        for old, new in replaces:
            token = token.replace(old, new)
        match = _BYTE_TOKEN.fullmatch(token)
        return bytes([int(match[1], 16)]) if match else token.encode()

    return token_bytes
