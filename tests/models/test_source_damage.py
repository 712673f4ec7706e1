"""Damaged model folders, at random: whatever is wrong, the error is ours, names a file and is one line."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from overlap_serve.errors import ModelLoadError
from overlap_serve.models.families import read_facts
from overlap_serve.models.tp import NoTP
from overlap_serve.models.weights import build_decoder
from tests.models.checkpoints import make_checkpoint

SWITCHES: list[Any] = [None, -1, 0, 3, "x", [], {}, [1], True, {"rope_type": "yarn"}]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_checkpoint(tmp_path)
    return tmp_path


def refused(folder: Path) -> bool:
    """Whether loading is refused; any error but a ModelLoadError that names a file of the folder fails the test."""
    try:
        read_facts(folder)
        build_decoder(folder, load_format="auto", dtype=torch.float32, device=torch.device("cpu"), tp=NoTP())
    except ModelLoadError as error:
        assert str(folder) in error.message
        assert "\n" not in error.message
        return True
    return False


def test_every_damage_of_a_safetensors_header_is_refused(folder: Path) -> None:
    file = folder / "model.safetensors"
    whole = file.read_bytes()
    header_bytes = 8 + int.from_bytes(whole[:8], "little")
    rng = random.Random(1)
    for _ in range(60):
        data = bytearray(whole)
        place = rng.randrange(header_bytes - 8)  # the end may be padding
        data[place] ^= rng.randrange(1, 256)
        file.write_bytes(data)
        if not refused(folder):
            # What is left: a harmless change inside __metadata__ or of a blank.
            assert json.loads(data[8:header_bytes]).keys() == json.loads(whole[8:header_bytes]).keys()


def test_a_config_with_any_field_missing_or_wrong_is_loaded_or_refused(folder: Path) -> None:
    file = folder / "config.json"
    whole = json.loads(file.read_text())
    rng = random.Random(2)
    results = []
    for key in whole:
        for value in rng.sample(SWITCHES, 4):
            file.write_text(json.dumps({**whole, key: value}))
            results.append(refused(folder))
        file.write_text(json.dumps({name: value for name, value in whole.items() if name != key}))
        results.append(refused(folder))
    assert any(results)
    assert not all(results)


TEXTS = ["", "[]", "{", "null", "\x00\xff", "version https://git-lfs.github.com/spec/v1"]


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize(
    "name", ["config.json", "generation_config.json", "tokenizer_config.json", "model.safetensors.index.json"]
)
def test_a_file_of_something_else_is_refused(folder: Path, name: str, text: str) -> None:
    (folder / name).write_bytes(text.encode("latin1"))
    assert refused(folder)


def keep(count: int) -> Callable[[bytes], bytes]:
    return lambda data: data[:count]


@pytest.mark.parametrize(
    "damage",
    [keep(0), keep(7), keep(60), keep(-1), lambda data: data + b"x", lambda data: b"\xff" * 8 + data[8:]],
    ids=["empty", "cut_length", "cut_header", "cut_data", "longer", "huge_header"],
)
def test_a_checkpoint_of_another_length_is_refused(folder: Path, damage: Callable[[bytes], bytes]) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(damage(file.read_bytes()))
    assert refused(folder)
