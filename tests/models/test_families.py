"""config.json, generation_config.json and tokenizer files to ModelConfig and ModelFacts."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from overlap_serve.config import GenerationDefaults
from overlap_serve.errors import ModelLoadError
from overlap_serve.models.families import (
    READERS,
    DynamicRope,
    Experts,
    LinearRope,
    Llama3Rope,
    LongRope,
    ModelConfig,
    YarnRope,
    read_config,
    read_facts,
)

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
        (
            {
                "rope_scaling": {
                    "type": "yarn",
                    "factor": 4.0,
                    "original_max_position_embeddings": 64,
                    "beta_fast": None,
                }
            },
            1e4,
            YarnRope(4.0, 64),
        ),
        (
            {"rope_scaling": {"type": "yarn", "factor": None, "original_max_position_embeddings": 64}},
            1e4,
            YarnRope(4.0, 64),
        ),
        (
            # as in transformers, dynamic scaling begins at max_position_embeddings
            {"rope_scaling": {"type": "dynamic", "factor": 2.0, "original_max_position_embeddings": 64}},
            1e4,
            DynamicRope(2.0, 256),
        ),
        (
            {
                "rope_scaling": {
                    "type": "longrope",
                    "short_factor": [1] * 8,
                    "long_factor": [2] * 8,
                    "original_max_position_embeddings": 64,
                }
            },
            1e4,
            LongRope((1.0,) * 8, (2.0,) * 8, 4.0, 64),
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
        ({**LLAMA, "hidden_act": "relu"}, ["hidden_act", "relu", "silu", "gelu_pytorch_tanh"]),
        ({**LLAMA, "quantization_config": {"quant_method": "gptq"}}, ["quantization_config"]),
        (
            {**LLAMA, "rope_scaling": {"rope_type": "mrope", "factor": 2}},
            ["rope_scaling.rope_type", "mrope", "default, linear, dynamic, llama3, yarn, longrope"],
        ),
        ({**LLAMA, "rope_scaling": {"rope_type": "linear", "factor": 0}}, ["rope_scaling", "factor", "> 0"]),
        ({**LLAMA, "rope_scaling": {"rope_type": "longrope", "factor": 2}}, ["rope_scaling", "short_factor"]),
        (
            {**LLAMA, "rope_scaling": {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [1.0]}},
            ["short_factor", "1 numbers", "8 are needed"],
        ),
        ({**LLAMA, "rope_parameters": {"full_attention": {}}}, ["rope_parameters.full_attention"]),
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


@pytest.mark.parametrize(
    ("scaling", "positions"),
    [
        (None, 256),
        ({"type": "linear", "factor": 4.0}, 256),  # such files state the stretched length
        ({"type": "dynamic", "factor": 4.0}, 1024),
        ({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}, 1024),
        ({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}, 256),
    ],
)
def test_positions_are_those_that_the_scaling_reaches(tmp_path: Path, scaling: object, positions: int) -> None:
    config_with(tmp_path, rope_scaling=scaling)
    assert read_facts(tmp_path).max_position_embeddings == positions


# What the config.json of a published model says, shortened to what matters, and what follows from it.
SIZES = {key: value for key, value in LLAMA.items() if key != "architectures"}
PUBLISHED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "Qwen2.5-7B": (
        {
            "architectures": ["Qwen2ForCausalLM"],
            **SIZES,
            "max_window_layers": 28,
            "num_key_value_heads": 2,
            "sliding_window": 131072,
            "use_sliding_window": False,
        },
        {"attention_bias": True, "attention_out_bias": False, "windows": (), "qk_norm": "none", "head_dim": 16},
    ),
    "Qwen2-windows": (
        {"architectures": ["Qwen2ForCausalLM"], **SIZES, "num_key_value_heads": 2}
        | {"max_window_layers": 1, "sliding_window": 32, "use_sliding_window": True},
        {"windows": (None, 32)},
    ),
    "Qwen3-0.6B": (
        {"architectures": ["Qwen3ForCausalLM"], **SIZES, "num_key_value_heads": 2, "rope_theta": 1000000},
        {"attention_bias": False, "qk_norm": "head", "head_dim": 128, "rope_theta": 1e6},
    ),
    "Mistral-7B-v0.1": (
        {"architectures": ["MistralForCausalLM"], **SIZES, "num_key_value_heads": 2, "sliding_window": 32},
        {"windows": (32, 32), "head_dim": 16},
    ),
    "Mistral-7B-v0.3": (
        {"architectures": ["MistralForCausalLM"], **SIZES, "num_key_value_heads": 2, "sliding_window": None},
        {"windows": ()},
    ),
    "gemma-2-2b": (
        {
            "architectures": ["Gemma2ForCausalLM"],
            **SIZES,
            "hidden_act": "gelu_pytorch_tanh",
            "head_dim": 256,
            "query_pre_attn_scalar": 64,
            "sliding_window": 32,
        },
        {
            "windows": (32, None),
            "attention_scale": 0.125,
            "attention_soft_cap": 50.0,
            "logit_soft_cap": 30.0,
            "embedding_scale": 8.0,
            "tie_word_embeddings": True,
            "activation": "gelu_pytorch_tanh",
            "norm_offset": 1.0,
        },
    ),
    "gemma-3-1b": (
        {
            "architectures": ["Gemma3ForCausalLM"],
            **SIZES,
            "num_hidden_layers": 7,
            "rope_local_base_freq": 10000,
            "rope_scaling": None,
            "rope_theta": 1000000,
            "sliding_window": 32,
            "sliding_window_pattern": 6,
        },
        {
            "windows": (32, 32, 32, 32, 32, None, 32),
            "rope_theta": 1e6,
            "local_rope_theta": 1e4,
            "qk_norm": "head",
            "attention_soft_cap": None,
            "logit_soft_cap": None,
        },
    ),
    "gemma-3-4b": (  # states only what differs from transformers' defaults
        {
            "architectures": ["Gemma3ForConditionalGeneration"],
            "eos_token_id": [1, 106],
            "text_config": {
                "hidden_size": 2560,
                "intermediate_size": 10240,
                "num_hidden_layers": 34,
                "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
                "sliding_window": 1024,
            },
            "vision_config": {"hidden_size": 1152},
        },
        {
            "vocab_size": 262208,
            "num_heads": 8,
            "num_kv_heads": 4,
            "head_dim": 256,
            "max_position_embeddings": 131072,
            "rope_theta": 1e6,
            "rope_scaling": LinearRope(8.0),
            "local_rope_theta": 1e4,
            "local_rope_scaling": None,
            "eos_token_ids": (1, 106),
        },
    ),
    "Phi-3-mini-4k": (
        {"architectures": ["Phi3ForCausalLM"], **SIZES, "sliding_window": 32, "rope_scaling": None}
        | {"original_max_position_embeddings": 64},
        {"windows": (32, 32), "rope_scaling": None, "rms_norm_eps": 1e-5},
    ),
    "Phi-3-mini-128k": (
        {"architectures": ["Phi3ForCausalLM"], **SIZES, "original_max_position_embeddings": 64}
        | {"rope_scaling": {"type": "su", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}},
        {"rope_scaling": LongRope((1.0,) * 8, (2.0,) * 8, 4.0, 64), "max_position_embeddings": 256},
    ),
    "Phi-4-mini": (
        {
            "architectures": ["Phi3ForCausalLM"],
            **SIZES,
            "partial_rotary_factor": 0.75,
            "original_max_position_embeddings": 64,
            "rope_scaling": {"type": "longrope", "short_factor": [1.0] * 6, "long_factor": [2.0] * 6},
        },
        {"rotary_dim": 12, "head_dim": 16},
    ),
    "OLMo-2-7B": (
        {"architectures": ["Olmo2ForCausalLM"], **SIZES, "rms_norm_eps": 1e-6},
        {"qk_norm": "projection", "pre_norm": False, "post_norm": True, "rms_norm_eps": 1e-6},
    ),
    "Mixtral-8x7B": (
        {"architectures": ["MixtralForCausalLM"], **SIZES, "num_key_value_heads": 2, "sliding_window": None},
        {
            "experts": Experts(num_experts=8, num_per_token=2, intermediate_size=96, normalize=True, layers=(0, 1)),
            "rope_theta": 1e6,
        },
    ),
    "Qwen3-30B-A3B": (
        {
            "architectures": ["Qwen3MoeForCausalLM"],
            **SIZES,
            "head_dim": 32,
            "mlp_only_layers": [],
            "decoder_sparse_step": 1,
            "moe_intermediate_size": 48,
            "num_experts": 16,
            "num_experts_per_tok": 4,
            "norm_topk_prob": True,
        },
        {
            "experts": Experts(num_experts=16, num_per_token=4, intermediate_size=48, normalize=True, layers=(0, 1)),
            "qk_norm": "head",
            "head_dim": 32,
        },
    ),
}


@pytest.mark.parametrize(("given", "wanted"), PUBLISHED.values(), ids=PUBLISHED)
def test_what_published_models_say(tmp_path: Path, given: dict[str, Any], wanted: dict[str, Any]) -> None:
    write(tmp_path, "config.json", given)
    config = read_config(tmp_path)
    assert {key: value for key, value in msgspec.structs.asdict(config).items() if key in wanted} == wanted
    assert isinstance(config, ModelConfig)


QWEN2 = {**LLAMA, "architectures": ["Qwen2ForCausalLM"], "num_key_value_heads": 2}
GEMMA3 = {**LLAMA, "architectures": ["Gemma3ForCausalLM"]}


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ({**QWEN2, "layer_types": ["full_attention"]}, ["layer_types has 1 entries for 2 layers"]),
        ({**QWEN2, "layer_types": ["full_attention", "chunked_attention"]}, ["chunked_attention", "sliding_attention"]),
        ({**QWEN2, "layer_types": ["full_attention", "sliding_attention"]}, ["layer_types", "sliding_window"]),
        ({**QWEN2, "use_sliding_window": True, "sliding_window": 0}, ["sliding_window", ">= 1"]),
        ({**GEMMA3, "use_bidirectional_attention": True}, ["use_bidirectional_attention"]),
        ({**GEMMA3, "attn_logit_softcapping": 50.0}, ["attn_logit_softcapping"]),
        ({**GEMMA3, "rope_parameters": {"rope_type": "default"}}, ["rope_parameters.rope_type"]),
        (
            {**GEMMA3, "rope_parameters": {"sliding_attention": {"rope_type": "axial"}}},
            ["rope_parameters.sliding_attention.rope_type", "axial", "yarn"],
        ),
        (
            {**LLAMA, "architectures": ["MixtralForCausalLM"], "num_key_value_heads": 2, "num_experts_per_tok": 9},
            ["num_experts_per_tok is 9", "8 experts"],
        ),
        (
            {**LLAMA, "architectures": ["Phi3ForCausalLM"], "partial_rotary_factor": 0.45},
            ["head_dim is 16, of which 7 are rotated"],
        ),
        ({"architectures": ["Gemma3ForConditionalGeneration"]}, ["text_config"]),
    ],
)
def test_settings_of_a_family_that_cannot_be_served_name_file_and_key(
    tmp_path: Path, value: object, words: list[str]
) -> None:
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


def test_an_unknown_architecture_is_refused_with_all_known_ones(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError) as caught:
        read_config(config_with(tmp_path, architectures=["Other"]))
    assert caught.value.message.endswith(f"supported are {', '.join(sorted(READERS))}")
    for name in ("Llama", "Qwen2", "Qwen3", "Qwen3Moe", "Mistral", "Mixtral", "Gemma2", "Gemma3", "Phi3", "Olmo2"):
        assert f"{name}ForCausalLM" in caught.value.message


@pytest.mark.parametrize(
    "module", ["overlap_serve.models.families", "overlap_serve.models.source", "overlap_serve.cli"]
)
def test_no_torch_is_loaded_by_what_the_ingress_and_the_command_line_use(module: str) -> None:
    code = f"import sys, {module}; sys.exit(bool({{'torch', 'transformers'}} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0
