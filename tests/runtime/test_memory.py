"""Too little memory: an error that names the field to change, before the kernel ends the process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models

from overlap_serve.config import EngineSpec, HostFacts, ServeConfig, resolve
from overlap_serve.device.cpu import CpuDevice
from overlap_serve.errors import ConfigError, ModelLoadError
from overlap_serve.models.families import read_config, read_facts
from overlap_serve.models.packed import can_pack
from overlap_serve.models.tp import NoTP
from overlap_serve.models.weights import build_decoder
from overlap_serve.runtime import torch_engine
from overlap_serve.runtime.torch_engine import (
    HEADROOM_BYTES,
    build_torch_engine,
    check_pages,
    check_weights,
    weight_bytes,
)
from tests.models.checkpoints import make_checkpoint

MIB = 2**20
HOST = HostFacts(num_cpus=1, bf16=False, cuda=False)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    make_checkpoint(path)
    Tokenizer(models.BPE(vocab={"a": 0, "b": 1}, merges=[])).save(str(path / "tokenizer.json"))
    return path


def make_spec(folder: Path, **fields: Any) -> EngineSpec:
    config = ServeConfig.model_validate({"model": str(folder), "device": "cpu", "served_model_name": "tiny", **fields})
    return resolve(config, read_facts(folder), HOST, str(folder))


def page_tokens_bytes(folder: Path, tokens: int) -> int:
    return read_config(folder).kv_elements_per_token * 4 * tokens


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weight_bytes_are_what_the_decoder_takes(folder: Path, dtype: str) -> None:
    spec = make_spec(folder, dtype=dtype)
    decoder = build_decoder(
        folder, load_format="auto", dtype=getattr(torch, dtype), device=torch.device("cpu"), tp=NoTP()
    )
    assert weight_bytes(spec, NoTP()) == sum(tensor.nbytes for tensor in (*decoder.parameters(), *decoder.buffers()))


def test_weight_bytes_count_the_packed_copy_of_a_tied_embedding(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, tie_word_embeddings=True)
    Tokenizer(models.BPE(vocab={"a": 0, "b": 1}, merges=[])).save(str(tmp_path / "tokenizer.json"))
    spec = make_spec(tmp_path, dtype="float32")
    decoder = build_decoder(tmp_path, load_format="auto", dtype=torch.float32, device=torch.device("cpu"), tp=NoTP())
    loaded = sum(tensor.nbytes for tensor in (*decoder.parameters(), *decoder.buffers()))
    copy = decoder.embed.weight.nbytes if can_pack(torch.float32, torch.device("cpu")) else 0
    assert weight_bytes(spec, NoTP()) == loaded + copy


def test_sizes_that_no_tensor_can_have_are_an_error_of_the_model(folder: Path, tmp_path: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "intermediate_size": 2**60}))
    with pytest.raises(ModelLoadError, match=r"config\.json: no tensor can have these sizes"):
        weight_bytes(make_spec(tmp_path), NoTP())


def test_weights_that_do_not_fit_name_dtype_and_model(folder: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"weights of tiny take 600 MiB as float32, and 700 MiB .*dtype: bfloat16.*`model`"
    ):
        check_weights(make_spec(folder, dtype="float32"), 600 * MIB, 700 * MIB)
    with pytest.raises(ConfigError, match=r"as bfloat16") as caught:
        check_weights(make_spec(folder, dtype="bfloat16"), 600 * MIB, 700 * MIB)
    assert "set dtype" not in caught.value.message
    check_weights(make_spec(folder), 600 * MIB, 600 * MIB + HEADROOM_BYTES)


def test_kv_pages_that_do_not_fit_name_the_field_and_what_would_fit(folder: Path) -> None:
    room = page_tokens_bytes(folder, 1600)
    fits, too_many = (make_spec(folder, kv_cache_tokens=tokens) for tokens in (1600, 1616))
    check_weights(fits, 10 * MIB, 10 * MIB + HEADROOM_BYTES + room)
    with pytest.raises(ConfigError, match=r"kv_cache_tokens is 1616,.*at most 1600"):
        check_weights(too_many, 10 * MIB, 10 * MIB + HEADROOM_BYTES + room)


def test_pages_by_fraction_need_no_check_here(folder: Path) -> None:
    check_weights(make_spec(folder), 0, HEADROOM_BYTES)
    check_pages(make_spec(folder), -1)


def test_with_no_room_at_all_no_number_of_pages_is_proposed(folder: Path) -> None:
    with pytest.raises(ConfigError, match="0 MiB are left on cpu beside the weights; free memory"):
        check_pages(make_spec(folder, kv_cache_tokens=1600), -5 * MIB)


def test_nothing_is_loaded_when_the_weights_cannot_fit(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CpuDevice, "free_memory", lambda self: HEADROOM_BYTES)
    monkeypatch.setattr(torch_engine, "build_decoder", lambda *args, **options: pytest.fail("loaded"))
    with pytest.raises(ConfigError, match="weights of tiny"):
        build_torch_engine(make_spec(folder))


def test_nothing_is_loaded_when_a_huge_kv_cache_is_asked_for(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Zeroed memory is not taken before it is written: without the check the process would die later, under load."""
    monkeypatch.setattr(torch_engine, "build_decoder", lambda *args, **options: pytest.fail("loaded"))
    with pytest.raises(ConfigError, match="kv_cache_tokens is"):
        build_torch_engine(make_spec(folder, kv_cache_tokens=2**40))


def test_memory_that_others_took_while_loading_is_noticed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    free = [10**9, 10**6]
    monkeypatch.setattr(CpuDevice, "free_memory", lambda self: free.pop(0))
    with pytest.raises(ConfigError, match="kv_cache_tokens is 1600"):
        build_torch_engine(make_spec(folder, kv_cache_tokens=1600))


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB\nlong story"),
        RuntimeError("[enforce fail at alloc_cpu.cpp:127] . DefaultCPUAllocator: can't allocate memory"),
    ],
)
def test_an_allocation_that_fails_names_the_fields(
    folder: Path, monkeypatch: pytest.MonkeyPatch, error: RuntimeError
) -> None:
    def fail(*args: object, **options: object) -> None:
        raise error

    monkeypatch.setattr(torch_engine, "size_pool", fail)
    with pytest.raises(ConfigError, match=r"memory ran out.*kv_memory_fraction.*max_step_tokens") as caught:
        build_torch_engine(make_spec(folder))
    assert "\n" not in caught.value.message


def test_other_errors_stay_what_they_are(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object, **options: object) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(torch_engine, "size_pool", fail)
    with pytest.raises(RuntimeError, match="a bug"):
        build_torch_engine(make_spec(folder))


def test_a_broken_tokenizer_is_found_before_the_weights_are_read(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    (tmp_path / "tokenizer.json").write_text('{"model": ')
    monkeypatch.setattr(torch_engine, "build_decoder", lambda *args, **options: pytest.fail("loaded"))
    with pytest.raises(ModelLoadError, match=r"tokenizer\.json is not a valid tokenizer"):
        build_torch_engine(make_spec(tmp_path))


def test_the_engine_starts_where_it_fits(folder: Path) -> None:
    engine, num_pages, version = build_torch_engine(make_spec(folder, kv_cache_tokens=1600))
    engine.close()
    assert (num_pages, version) == (100, torch.__version__)
