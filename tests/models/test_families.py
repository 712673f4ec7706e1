"""config.json, generation_config.json and tokenizer files to ModelConfig and ModelFacts."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from overlap_serve.config import GenerationDefaults
from overlap_serve.errors import ModelLoadError
from overlap_serve.models.families import WEIGHTS, LinearRope, Llama3Rope, read_config, read_facts

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 1000,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
}


def write(folder: Path, name: str, value: object) -> None:
    (folder / name).write_text(json.dumps(value))


def config_with(folder: Path, **changes: Any) -> Path:
    write(folder, "config.json", {**LLAMA, **changes})
    return folder


def without(key: str) -> dict[str, Any]:
    return {name: value for name, value in LLAMA.items() if name != key}


def test_defaults_are_those_of_the_family(tmp_path: Path) -> None:
    config = read_config(config_with(tmp_path))
    assert config.architecture == "LlamaForCausalLM"
    assert (config.num_layers, config.num_heads, config.num_kv_heads, config.head_dim) == (2, 4, 4, 16)
    assert (config.rms_norm_eps, config.rope_theta, config.rope_scaling) == (1e-6, 10000.0, None)
    assert not config.tie_word_embeddings
    assert not config.attention_bias
    assert config.eos_token_ids == ()
    assert config.kv_elements_per_token == 2 * 2 * 4 * 16


def test_given_values_win(tmp_path: Path) -> None:
    config = read_config(
        config_with(
            tmp_path,
            num_key_value_heads=2,
            head_dim=24,
            rms_norm_eps=1e-5,
            tie_word_embeddings=True,
            attention_bias=True,
            mlp_bias=True,
            eos_token_id=[7, 8],
            bos_token_id=3,
        )
    )
    assert (config.num_kv_heads, config.head_dim, config.rms_norm_eps) == (2, 24, 1e-5)
    assert config.tie_word_embeddings
    assert config.attention_bias
    assert config.attention_out_bias
    assert config.mlp_bias
    assert (config.eos_token_ids, config.bos_token_id) == ((7, 8), 3)
    assert config.kv_elements_per_token == 2 * 2 * 2 * 24


LLAMA3_FIELDS = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


@pytest.mark.parametrize(
    ("given", "theta", "scaling"),
    [
        ({"rope_theta": 5e5}, 5e5, None),
        ({"rope_theta": 500000, "rope_scaling": None}, 5e5, None),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e5}}, 1e5, None),
        ({"rope_scaling": {"type": "linear", "factor": 2}}, 1e4, LinearRope(2.0)),
        ({"rope_parameters": {"rope_type": "linear", "rope_theta": 1e6, "factor": 2.0}}, 1e6, LinearRope(2.0)),
        (
            {
                "rope_theta": 5e5,
                "rope_scaling": {"rope_type": "llama3", **LLAMA3_FIELDS, "original_max_position_embeddings": 32},
            },
            5e5,
            Llama3Rope(8.0, 1.0, 4.0, 32),
        ),
        (
            {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3_FIELDS}},
            5e5,
            Llama3Rope(8.0, 1.0, 4.0, 256),  # as in transformers, the original length defaults to the present one
        ),
    ],
)
def test_rope_of_old_and_new_config_files(tmp_path: Path, given: dict[str, Any], theta: float, scaling: object) -> None:
    config = read_config(config_with(tmp_path, **given))
    assert (config.rope_theta, config.rope_scaling) == (theta, scaling)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ({**LLAMA, "architectures": ["MambaForCausalLM"]}, ["MambaForCausalLM", "LlamaForCausalLM"]),
        (without("architectures"), ["architectures"]),
        (without("hidden_size"), ["hidden_size"]),
        ({**LLAMA, "hidden_size": "64"}, ["hidden_size", "int", "str"]),
        ({**LLAMA, "num_hidden_layers": 0}, ["num_hidden_layers", ">= 1"]),
        ({**LLAMA, "hidden_size": 66}, ["hidden_size 66", "num_attention_heads"]),
        ({**LLAMA, "num_key_value_heads": 3}, ["num_key_value_heads 3"]),
        ({**LLAMA, "head_dim": 15}, ["head_dim is 15"]),
        ({**LLAMA, "hidden_act": "gelu"}, ["hidden_act", "gelu", "silu"]),
        ({**LLAMA, "quantization_config": {"quant_method": "gptq"}}, ["quantization_config"]),
        ({**LLAMA, "rope_scaling": {"rope_type": "yarn", "factor": 2}}, ["rope_scaling.rope_type", "yarn", "llama3"]),
        ({**LLAMA, "rope_parameters": {"rope_type": "linear"}}, ["rope_parameters", "factor"]),
        ({**LLAMA, "rope_parameters": {"rope_theta": "big"}}, ["rope_parameters.rope_theta"]),
        ({**LLAMA, "rope_parameters": {"partial_rotary_factor": 0.5}}, ["partial_rotary_factor"]),
        (["not", "an", "object"], ["object"]),
    ],
)
def test_a_config_that_cannot_be_served_names_file_and_key(tmp_path: Path, value: object, words: list[str]) -> None:
    write(tmp_path, "config.json", value)
    with pytest.raises(ModelLoadError) as caught:
        read_config(tmp_path)
    for word in [str(tmp_path / "config.json"), *words]:
        assert word in caught.value.message


def test_no_config_and_broken_json_name_the_file(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"config\.json: No such file"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text('{"architectures": [')
    with pytest.raises(ModelLoadError, match=r"config\.json"):
        read_config(tmp_path)


def test_facts_have_the_end_tokens_of_all_files_once(tmp_path: Path) -> None:
    config_with(tmp_path, eos_token_id=5)
    write(tmp_path, "generation_config.json", {"eos_token_id": [9, 5], "bos_token_id": 1})
    write(tmp_path, "tokenizer_config.json", {"eos_token": "<end>"})
    write(tmp_path, "tokenizer.json", {"added_tokens": [{"id": 4, "content": "<s>"}, {"id": 6, "content": "<end>"}]})
    assert read_facts(tmp_path).eos_token_ids == (9, 5, 6)


def test_the_tokenizers_end_token_in_its_older_forms(tmp_path: Path) -> None:
    config_with(tmp_path)
    decoder = {"11": {"content": "</s>", "lstrip": False, "special": True}}
    token = {"__type": "AddedToken", "content": "</s>", "special": True}
    write(tmp_path, "tokenizer_config.json", {"eos_token": token, "added_tokens_decoder": decoder})
    assert read_facts(tmp_path).eos_token_ids == (11,)


def test_facts_need_only_the_config(tmp_path: Path) -> None:
    facts = read_facts(config_with(tmp_path))
    assert (facts.max_position_embeddings, facts.vocab_size, facts.kv_elements_per_token) == (256, 1000, 256)
    assert facts.eos_token_ids == ()
    assert facts.generation == GenerationDefaults()


def test_generation_defaults_are_read_and_null_means_unset(tmp_path: Path) -> None:
    config_with(tmp_path)
    given = {"do_sample": True, "temperature": 0.6, "top_p": None, "top_k": 20, "min_p": 0.1, "repetition_penalty": 1}
    write(tmp_path, "generation_config.json", given)
    assert read_facts(tmp_path).generation == GenerationDefaults(temperature=0.6, top_k=20, min_p=0.1)


def test_top_k_of_minus_one_is_off(tmp_path: Path) -> None:
    config_with(tmp_path)
    write(tmp_path, "generation_config.json", {"top_k": -1})
    assert read_facts(tmp_path).generation.top_k == 0


def test_a_wrong_type_in_an_optional_file_is_an_error_that_names_it(tmp_path: Path) -> None:
    config_with(tmp_path)
    write(tmp_path, "generation_config.json", {"temperature": "hot"})
    with pytest.raises(ModelLoadError, match=r"generation_config\.json.*temperature"):
        read_facts(tmp_path)


def test_end_tokens_outside_the_vocabulary_are_left_out_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config_with(tmp_path, eos_token_id=[2, 1000])
    with caplog.at_level(logging.WARNING):
        assert read_facts(tmp_path).eos_token_ids == (2,)
    assert "1000" in caplog.text


def test_every_architecture_that_can_be_read_has_a_weight_table(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError) as caught:
        read_config(config_with(tmp_path, architectures=["Other"]))
    assert caught.value.message.endswith(f"supported are {', '.join(sorted(WEIGHTS))}")


@pytest.mark.parametrize(
    "module", ["overlap_serve.models.families", "overlap_serve.models.source", "overlap_serve.cli"]
)
def test_no_torch_is_loaded_by_what_the_ingress_and_the_command_line_use(module: str) -> None:
    code = f"import sys, {module}; sys.exit(bool({{'torch', 'transformers', 'numpy'}} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0
