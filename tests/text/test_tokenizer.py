from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import models

from overlap_serve.config import FAKE_BOS_ID, FAKE_EOS_ID
from overlap_serve.errors import ModelLoadError
from overlap_serve.text.tokenizer import Tokenizer
from tests.text.built import byte_fallback, byte_level, metaspace, saved, word_piece, wrapped


def test_byte_tokenizer_maps_every_byte_to_itself() -> None:
    tokenizer = Tokenizer.bytes()
    text = "".join(map(chr, range(0x20))) + "aé你👩‍🚀 \u202e"
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert ids == list(text.encode())
    assert tokenizer.decode(ids, skip_special_tokens=True) == text
    assert all(tokenizer.token_bytes(byte) == bytes([byte]) for byte in range(256))


def test_byte_tokenizer_has_the_special_ids_of_the_fake_engine() -> None:
    tokenizer = Tokenizer.bytes()
    assert len(tokenizer) == 258
    assert tokenizer.special_ids == {FAKE_BOS_ID, FAKE_EOS_ID}
    assert tokenizer.eos_token_id == tokenizer.token_id("<|eos|>") == FAKE_EOS_ID
    assert tokenizer.bos_token == "<|bos|>"
    assert tokenizer.encode("a<|eos|>", add_special_tokens=True) == [FAKE_BOS_ID, 97, FAKE_EOS_ID]
    assert tokenizer.decode([FAKE_BOS_ID, 97, FAKE_EOS_ID], skip_special_tokens=True) == "a"
    assert tokenizer.decode([FAKE_BOS_ID, 97], skip_special_tokens=False) == "<|bos|>a"


@pytest.mark.parametrize("value", ["<s>", {"content": "<s>", "lstrip": False}])
def test_folder_names_the_special_tokens(tmp_path: Path, value: object) -> None:
    saved(
        byte_level(),
        tmp_path,
        {"bos_token": value, "eos_token": "<|im_end|>", "add_bos_token": False, "pad_token": None},
    )
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert tokenizer.special_tokens == {"bos_token": "<s>", "eos_token": "<|im_end|>"}
    assert tokenizer.eos_token_id == 1
    assert (
        tokenizer.decode(tokenizer.encode("hello there", add_special_tokens=False), skip_special_tokens=True)
        == "hello there"
    )


def test_special_tokens_map_is_read_and_the_configuration_wins(tmp_path: Path) -> None:
    saved(byte_level(), tmp_path, {"eos_token": "<|im_end|>"})
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "<s>"}))
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<s>", "<|im_end|>")


def test_a_token_that_the_configuration_calls_special_is_special(tmp_path: Path) -> None:
    backend = byte_level()
    backend.add_tokens(["<end>"])
    plain = backend.token_to_id("the")
    assert plain is not None
    saved(backend, tmp_path, {"eos_token": "the", "additional_special_tokens": ["<s>", "<not there>"]})
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert tokenizer.special_ids == {0, 1, plain}
    assert tokenizer.decode([plain, 65], skip_special_tokens=True) == tokenizer.decode([65], skip_special_tokens=False)


def test_truncation_and_padding_of_a_training_run_are_off(tmp_path: Path) -> None:
    backend = byte_level()
    backend.enable_truncation(4)
    backend.enable_padding(length=64)
    tokenizer = Tokenizer.from_folder(saved(backend, tmp_path))
    text = "The quick brown fox"
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=True), skip_special_tokens=False) == text


def test_missing_and_broken_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"tokenizer\.json is missing"):
        Tokenizer.from_folder(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ModelLoadError, match=r"tokenizer\.json is not a valid tokenizer"):
        Tokenizer.from_folder(tmp_path)
    saved(byte_level(), tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("[1]")
    with pytest.raises(ModelLoadError, match=r"tokenizer_config\.json is not a JSON object"):
        Tokenizer.from_folder(tmp_path)


@pytest.mark.parametrize("backend", [byte_level(), byte_fallback(), byte_fallback(strip=False)])
def test_token_bytes_are_true_also_for_parts_of_characters(backend: Backend) -> None:
    tokenizer = wrapped(backend)
    text = "hello there é世👩‍🚀"
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert b"".join(map(tokenizer.token_bytes, ids)).lstrip() == text.encode()
    assert max(len(tokenizer.token_bytes(i)) for i in ids) > 1
    assert tokenizer.token_bytes(0) in (b"<s>", b"<unk>")
    assert tokenizer.token_bytes(len(tokenizer)) == b""


def test_token_bytes_of_other_decoders_are_those_of_the_token_alone() -> None:
    assert wrapped(word_piece()).token_bytes(6) == b"##ance"
    assert wrapped(metaspace()).token_bytes(6) == b"Paris"


def test_length_covers_holes_in_the_vocabulary() -> None:
    tokenizer = wrapped(Backend(models.WordLevel({"a": 0, "b": 9}, unk_token="a")))
    assert len(tokenizer) == 10
    assert tokenizer.token_id("b") == 9
    assert tokenizer.token_id("not there") is None
