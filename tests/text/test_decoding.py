"""Pains A20: joined incremental text equals the full decode, for every decoder family, with bounded work per id."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders

from overlap_serve.text.decoding import MAX_WINDOW, ByteDecoder, ByteScheme, Decoder, WindowDecoder, byte_scheme
from overlap_serve.text.tokenizer import Tokenizer
from tests.text.built import byte_fallback, byte_level, metaspace, word_piece, wrapped

BYTE_LEVEL = byte_level()
FALLBACK = byte_fallback()
FALLBACK_NO_STRIP = byte_fallback(strip=False)
FAMILIES = {"byte_level": BYTE_LEVEL, "byte_fallback": FALLBACK, "no_strip": FALLBACK_NO_STRIP}
ALPHABETS = [
    "abc ,.\n\t",
    "éüñçßøå",
    "你好世界東京한국어",
    "👩‍🚀👨‍👩‍👧‍👦🏳️‍🌈🇫🇷👍🏽",
    "e\u0301a\u0308o\u0302",
    "שלוםمرحبا\u202e\u200f",
    "\x00\x7f\x80\xa0\xad\u2028\ufeff\ufffd▁Ġ",
]


def random_text(rng: random.Random) -> str:
    chars = []
    for _ in range(rng.randrange(24)):
        code = rng.randrange(0x110000)
        if rng.random() < 0.15 and not 0xD800 <= code < 0xE000:
            chars.append(chr(code))
        else:
            chars.append(rng.choice(rng.choice(ALPHABETS)))
    return "".join(chars)


def sentencepiece_decode(data: bytes) -> str:
    """Oracle for invalid byte tokens: complete characters as they are, every other byte U+FFFD."""
    out, at = [], 0
    while at < len(data):
        for width in (1, 2, 3, 4):
            try:
                out.append(data[at : at + width].decode())
            except UnicodeDecodeError:
                continue
            at += width
            break
        else:
            out.append("\ufffd")
            at += 1
    return "".join(out)


def pushed(decoder: Decoder, ids: Sequence[int]) -> list[str]:
    return [*(decoder.push(token_id) for token_id in ids), decoder.flush()]


@pytest.mark.parametrize("family", FAMILIES)
def test_a20_random_text_comes_back_exactly_and_at_most_three_bytes_late(family: str) -> None:
    tokenizer = wrapped(FAMILIES[family])
    rng = random.Random(20)
    for _ in range(3000):
        text = random_text(rng)
        if family != "byte_level":
            text = text.replace("▁", "")  # stands for a space there
        ids = tokenizer.encode(text, add_special_tokens=False)
        pieces = pushed(tokenizer.decoder(skip_special_tokens=False), ids)
        assert "".join(pieces) == tokenizer.decode(ids, skip_special_tokens=False) == text
        num_bytes, num_sent = 0, 0
        for token_id, piece in zip(ids, pieces, strict=False):
            num_bytes += len(tokenizer.token_bytes(token_id))
            num_sent += len(piece.encode())
            assert num_bytes - num_sent <= 3 + (family == "byte_fallback")  # the stripped space


def test_a20_random_ids_equal_the_full_decode_of_tokenizers_for_byte_level() -> None:
    tokenizer = wrapped(BYTE_LEVEL)
    rng = random.Random(21)
    for _ in range(3000):
        ids = [rng.randrange(len(tokenizer) + 3) for _ in range(rng.randrange(30))]
        for skip in (False, True):
            pieces = pushed(tokenizer.decoder(skip_special_tokens=skip), ids)
            assert "".join(pieces) == BYTE_LEVEL.decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize("family", ["byte_fallback", "no_strip"])
def test_a20_random_ids_equal_the_full_decode_of_sentencepiece_for_byte_fallback(family: str) -> None:
    tokenizer = wrapped(FAMILIES[family])
    rng = random.Random(22)
    num_broken = 0
    for _ in range(3000):
        ids = [rng.choice((rng.randrange(3, 259), rng.randrange(len(tokenizer)))) for _ in range(rng.randrange(12))]
        for skip in (False, True):
            kept = [i for i in ids if not (skip and i in tokenizer.special_ids)]
            expected = sentencepiece_decode(b"".join(map(tokenizer.token_bytes, kept)))
            if family == "byte_fallback":
                expected = expected.removeprefix(" ")
            assert "".join(pushed(tokenizer.decoder(skip_special_tokens=skip), ids)) == expected
            assert tokenizer.decode(ids, skip_special_tokens=skip) == expected
            library = FAMILIES[family].decode(ids, skip_special_tokens=skip)
            assert library == expected or "\ufffd" in library
            num_broken += "\ufffd" in library
    assert num_broken > 100


@pytest.mark.parametrize("family", FAMILIES)
def test_a20_text_never_shrinks_and_unproven_characters_are_never_shown(family: str) -> None:
    tokenizer = wrapped(FAMILIES[family])
    ids = tokenizer.encode("a你👩‍🚀", add_special_tokens=False)
    seen = ""
    decoder = tokenizer.decoder(skip_special_tokens=True)
    for token_id in ids:
        seen += decoder.push(token_id)
        assert "a你👩‍🚀".startswith(seen)
    assert seen == "a你👩‍🚀"


@settings(max_examples=300, deadline=None)
@given(st.lists(st.one_of(st.binary(min_size=1, max_size=5), st.text(min_size=1, max_size=2).map(str.encode))))
def test_a20_any_cut_of_any_bytes_decodes_as_the_whole(chunks: list[bytes]) -> None:
    scheme = ByteScheme(str.encode, "replace")
    decoder = ByteDecoder(scheme, lambda index: chunks[index], frozenset())
    assert "".join(pushed(decoder, range(len(chunks)))) == b"".join(chunks).decode(errors="replace")
    scheme = ByteScheme(str.encode, "surrogateescape")
    decoder = ByteDecoder(scheme, lambda index: chunks[index], frozenset())
    text = "".join(pushed(decoder, range(len(chunks))))
    assert text == sentencepiece_decode(b"".join(chunks))
    text.encode()  # no lone surrogate


def test_a_proven_invalid_byte_is_replaced_at_once() -> None:
    decoder = Tokenizer.bytes().decoder(skip_special_tokens=True)
    assert [decoder.push(byte) for byte in (0xE4, 0xBD, 0x41, 0xFF)] == ["", "", "\ufffdA", "\ufffd"]
    assert decoder.flush() == ""


def test_a_skipped_special_token_does_not_break_a_character() -> None:
    decoder = Tokenizer.bytes().decoder(skip_special_tokens=True)
    assert [decoder.push(i) for i in (0xC3, 257, 0xA9)] == ["", "", "é"]


def test_a20_work_is_linear_for_20000_tokens_that_each_decode_to_a_replacement_character() -> None:
    tokenizer = Tokenizer.bytes()
    calls = []

    def token_bytes(token_id: int) -> bytes:
        calls.append(token_id)
        return tokenizer.token_bytes(token_id)

    decoder = ByteDecoder(ByteScheme(str.encode, "replace"), token_bytes, frozenset())
    assert "".join(pushed(decoder, [0xFF] * 20_000)) == "\ufffd" * 20_000
    assert len(calls) == 20_000

    windows = []

    def decode(ids: list[int]) -> str:
        windows.append(len(ids))
        return "\ufffd" * len(ids)

    assert "".join(pushed(WindowDecoder(decode, frozenset()), [0] * 20_000)) == "\ufffd" * 20_000
    assert max(windows) <= MAX_WINDOW + 4
    assert len(windows) <= 3 * 20_000


@pytest.mark.parametrize("backend", [word_piece(), metaspace()])
def test_other_decoders_equal_their_full_decode(backend: Backend) -> None:
    tokenizer = wrapped(backend)
    rng = random.Random(5)
    assert isinstance(tokenizer.decoder(skip_special_tokens=True), WindowDecoder)
    for _ in range(500):
        ids = [rng.randrange(len(tokenizer)) for _ in range(rng.randrange(60))]
        for skip in (True, False):
            full = backend.decode(ids, skip_special_tokens=skip)
            assert "".join(pushed(tokenizer.decoder(skip_special_tokens=skip), ids)) == full
            assert tokenizer.decode(ids, skip_special_tokens=skip) == full


def test_other_decoders_with_an_unusual_order_of_steps_equal_their_full_decode() -> None:
    backend = byte_fallback()
    steps = [decoders.ByteFallback(), decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(steps)
    tokenizer = wrapped(backend)
    for text in ("hello there", "你好 é👩‍🚀 x", "  two spaces", "世界" * 20):
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert "".join(pushed(tokenizer.decoder(skip_special_tokens=True), ids)) == text


@pytest.mark.parametrize(
    ("decoder", "strip"),
    [
        (decoders.ByteLevel(), 0),
        (decoders.Sequence([decoders.ByteLevel()]), 0),
        (decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]), 0),
        (FALLBACK.decoder, 1),
        (decoders.Metaspace(), None),
        (decoders.WordPiece(), None),
        (decoders.Sequence([decoders.ByteFallback(), decoders.Strip(" ", 1, 0)]), None),
        (decoders.Sequence([decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 1)]), None),
        (decoders.Sequence([decoders.ByteFallback(), decoders.Fuse(), decoders.Metaspace()]), None),
    ],
)
def test_only_the_two_known_families_have_a_byte_scheme(decoder: decoders.Decoder, strip: int | None) -> None:
    scheme = byte_scheme(decoder.__getstate__())
    assert (None if scheme is None else scheme.strip) == strip
