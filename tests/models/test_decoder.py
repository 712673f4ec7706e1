"""The decoder against transformers on tiny random checkpoints: whole prefill, chunks, decode."""

from __future__ import annotations

from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from overlap_serve.models.decoder import Decoder
from overlap_serve.models.tp import NoTP
from overlap_serve.models.weights import build_decoder
from tests.models.checkpoints import DenseAttend, edit_json, make_checkpoint

CPU = torch.device("cpu")
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 500.0, "factor": 4.0}
YARN = {"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 16}
DEEPSEEK_YARN = {**YARN, "mscale": 1.0, "mscale_all_dim": 0.5, "beta_fast": 8.0, "beta_slow": 2.0, "truncate": False}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 500.0,
    "short_factor": [1.0, 1.1, 1.3, 1.7],
    "long_factor": [1.0, 1.5, 3.0, 4.0],
}
LONGROPE_PARTIAL = {**LONGROPE, "short_factor": [1.0, 1.1, 1.3], "long_factor": [1.0, 1.5, 3.0]}
QWEN_WINDOWS = {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}
GEMMA3_ROPES = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
}


class Variant(NamedTuple):
    """max_model_len: of our decoder; the sequences have 40 tokens."""

    architecture: str
    changes: dict[str, Any]
    max_model_len: int | None = None


def llama(max_model_len: int | None = None, **changes: Any) -> Variant:
    return Variant("LlamaForCausalLM", changes, max_model_len)


VARIANTS: dict[str, Variant] = {
    "llama_grouped_query_untied": llama(),
    "llama_tied": llama(tie_word_embeddings=True),
    "llama_multi_head": llama(num_key_value_heads=4),
    "llama_multi_query": llama(num_key_value_heads=1),
    "llama_explicit_head_dim": llama(head_dim=12),
    "llama_attention_biases": llama(attention_bias=True),
    "llama_mlp_biases": llama(mlp_bias=True),
    "llama_gelu": llama(hidden_act="gelu"),
    "llama_everything": llama(
        attention_bias=True, mlp_bias=True, head_dim=16, rope_parameters=LLAMA3, rms_norm_eps=1e-3
    ),
    "rope_llama3": llama(rope_parameters=LLAMA3),
    "rope_linear": llama(rope_parameters=LINEAR),
    "rope_yarn": llama(rope_parameters=YARN),
    "rope_yarn_deepseek": llama(rope_parameters=DEEPSEEK_YARN),
    "rope_yarn_attention_factor": llama(rope_parameters={**YARN, "attention_factor": 1.3}),
    "rope_yarn_short": llama(rope_parameters={**YARN, "original_max_position_embeddings": 64}, max_model_len=48),
    "rope_dynamic_within": llama(rope_parameters=DYNAMIC, max_model_len=64),
    "rope_dynamic_beyond": llama(rope_parameters=DYNAMIC, max_position_embeddings=16, max_model_len=40),
    "rope_longrope": llama(rope_parameters={**LONGROPE, "original_max_position_embeddings": 16}),
    "qwen2": Variant("Qwen2ForCausalLM", {}),
    "qwen2_tied": Variant("Qwen2ForCausalLM", {"tie_word_embeddings": True}),
    "qwen2_windows": Variant("Qwen2ForCausalLM", QWEN_WINDOWS),
    "qwen2_yarn": Variant("Qwen2ForCausalLM", {"rope_parameters": YARN}),
    "qwen3": Variant("Qwen3ForCausalLM", {}),
    "qwen3_bias_windows": Variant("Qwen3ForCausalLM", {"attention_bias": True, **QWEN_WINDOWS}),
    "mistral_window": Variant("MistralForCausalLM", {}),
    "mistral_no_window": Variant("MistralForCausalLM", {"sliding_window": None, "head_dim": 12}),
    "gemma2": Variant("Gemma2ForCausalLM", {}),
    "gemma2_no_caps": Variant("Gemma2ForCausalLM", {"attn_logit_softcapping": None, "final_logit_softcapping": None}),
    "gemma2_untied": Variant("Gemma2ForCausalLM", {"tie_word_embeddings": False, "attention_bias": True}),
    "gemma3": Variant("Gemma3ForCausalLM", {}),
    "gemma3_ropes": Variant("Gemma3ForCausalLM", {"rope_parameters": GEMMA3_ROPES}),
    "gemma3_logit_cap": Variant("Gemma3ForCausalLM", {"final_logit_softcapping": 1.5}),
    "gemma3_multimodal": Variant("Gemma3ForConditionalGeneration", {}),
    "phi3": Variant("Phi3ForCausalLM", {}),
    "phi3_no_window_tied": Variant("Phi3ForCausalLM", {"sliding_window": None, "tie_word_embeddings": True}),
    "phi3_partial": Variant("Phi3ForCausalLM", {"partial_rotary_factor": 0.75}),
    "phi3_long": Variant("Phi3ForCausalLM", {"rope_parameters": LONGROPE, "original_max_position_embeddings": 16}),
    "phi3_short": Variant(
        "Phi3ForCausalLM", {"rope_parameters": LONGROPE, "original_max_position_embeddings": 48}, max_model_len=48
    ),
    "phi4_mini": Variant(
        "Phi3ForCausalLM",
        {
            "partial_rotary_factor": 0.75,
            "rope_parameters": LONGROPE_PARTIAL,
            "original_max_position_embeddings": 16,
            "tie_word_embeddings": True,
        },
    ),
    "olmo2": Variant("Olmo2ForCausalLM", {}),
    "olmo2_bias": Variant("Olmo2ForCausalLM", {"attention_bias": True, "num_key_value_heads": 4}),
    "mixtral": Variant("MixtralForCausalLM", {}),
    "mixtral_window": Variant("MixtralForCausalLM", {"sliding_window": 9, "num_experts_per_tok": 1}),
    "qwen3_moe": Variant("Qwen3MoeForCausalLM", {}),
    "qwen3_moe_mixed_layers": Variant(
        "Qwen3MoeForCausalLM",
        {"mlp_only_layers": [0], "norm_topk_prob": False, "use_sliding_window": True, "sliding_window": 9},
    ),
    "qwen3_moe_sparse_step": Variant("Qwen3MoeForCausalLM", {"decoder_sparse_step": 2, "attention_bias": True}),
}


@pytest.fixture(scope="module", params=VARIANTS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Decoder, Any]:
    folder = tmp_path_factory.mktemp("model")
    variant = VARIANTS[request.param]
    reference = make_checkpoint(folder, variant.architecture, **variant.changes)
    return load(folder, max_model_len=variant.max_model_len), reference


def load(folder: Path, dtype: torch.dtype = torch.float32, max_model_len: int | None = None) -> Decoder:
    return build_decoder(folder, load_format="auto", dtype=dtype, device=CPU, tp=NoTP(), max_model_len=max_model_len)


@torch.inference_mode()
def run(decoder: Decoder, tokens_T: Tensor, chunks: list[int]) -> Tensor:
    """Logits of every token, computed in chunks of these sizes with one growing cache."""
    attend = DenseAttend(decoder.config)
    positions_T = torch.arange(len(tokens_T), dtype=torch.int32)
    steps = [slice(end - length, end) for length, end in zip(chunks, accumulate(chunks), strict=True)]
    hidden = [decoder.forward(tokens_T[step], positions_T[step], attend) for step in steps]
    return torch.cat([decoder.logits(hidden_TD) for hidden_TD in hidden])


@torch.inference_mode()
def expected(reference: Any, tokens_T: Tensor) -> Tensor:
    logits: Tensor = reference(tokens_T[None].long()).logits[0]
    return logits


def some_tokens(num_tokens: int = 40) -> Tensor:
    return torch.randint(0, 101, (num_tokens,), generator=torch.Generator().manual_seed(7), dtype=torch.int32)


@pytest.mark.parametrize(
    "chunks", [[40], [16, 1, 7, 16], [24, *[1] * 16]], ids=["whole_prefill", "chunked_prefill", "prefill_then_decode"]
)
def test_logits_equal_transformers(pair: tuple[Decoder, Any], chunks: list[int]) -> None:
    decoder, reference = pair
    tokens_T = some_tokens()
    logits_TV = run(decoder, tokens_T, chunks)
    wanted_TV = expected(reference, tokens_T)
    assert wanted_TV.std() > 0.3  # a model of zeros would agree with anything
    torch.testing.assert_close(logits_TV, wanted_TV, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "architecture", ["LlamaForCausalLM", "Gemma2ForCausalLM", "Olmo2ForCausalLM", "Qwen3MoeForCausalLM"]
)
def test_bfloat16_follows_transformers_in_bfloat16(tmp_path: Path, architecture: str) -> None:
    reference = make_checkpoint(tmp_path, architecture).to(torch.bfloat16)
    logits_TV = run(load(tmp_path, torch.bfloat16), some_tokens(), [40])
    assert logits_TV.dtype == torch.float32
    wanted_TV = expected(reference, some_tokens()).float()
    assert (logits_TV - wanted_TV).abs().max() < 0.05 * wanted_TV.abs().max()


def test_rope_settings_of_older_config_files_mean_the_same(tmp_path: Path) -> None:
    reference = make_checkpoint(tmp_path, rope_parameters=LLAMA3)
    old = {("type" if key == "rope_type" else key): value for key, value in LLAMA3.items() if key != "rope_theta"}
    edit_json(tmp_path / "config.json", {"rope_theta": 500.0, "rope_scaling": old}, remove=("rope_parameters",))
    torch.testing.assert_close(
        run(load(tmp_path), some_tokens(), [40]), expected(reference, some_tokens()), rtol=1e-5, atol=1e-5
    )


def test_a_row_depends_on_its_own_token_and_position_only(tmp_path: Path) -> None:
    make_checkpoint(tmp_path)
    decoder, tokens_T = load(tmp_path), some_tokens(8)
    positions_T = torch.tensor([5, 0, 3, 3, 9, 1, 63, 2])  # rows of several requests, in any order

    def forward(rows: slice) -> Tensor:
        return decoder.forward(tokens_T[rows], positions_T[rows], lambda layer, q, k, v: q)

    alone_TD = torch.cat([forward(slice(row, row + 1)) for row in range(8)])
    torch.testing.assert_close(forward(slice(0, 8)), alone_TD, rtol=1e-5, atol=1e-5)


def test_parameters_never_ask_for_gradients_and_forward_works_without_inference_mode(tmp_path: Path) -> None:
    make_checkpoint(tmp_path)
    decoder = load(tmp_path)
    assert not any(parameter.requires_grad for parameter in decoder.parameters())
    hidden_TD = decoder.forward(some_tokens(3), torch.arange(3), DenseAttend(decoder.config))
    assert hidden_TD.shape == (3, 32)
    assert not hidden_TD.requires_grad


def test_attend_is_called_once_a_layer_in_order_with_this_ranks_heads(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, head_dim=10)
    decoder = load(tmp_path)
    calls: list[tuple[int, tuple[int, ...], tuple[int, ...], tuple[int, ...]]] = []

    def attend(layer: int, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor) -> Tensor:
        calls.append((layer, tuple(q_TNH.shape), tuple(k_TKH.shape), tuple(v_TKH.shape)))
        return q_TNH

    decoder.forward(some_tokens(5), torch.arange(5), attend)
    assert calls == [(layer, (5, 4, 10), (5, 2, 10), (5, 2, 10)) for layer in range(3)]
    assert (decoder.num_heads, decoder.num_kv_heads, decoder.config.head_dim) == (4, 2, 10)
