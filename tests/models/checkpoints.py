"""Tiny random checkpoints of every family, written by transformers, and an attention that remembers keys and values."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from overlap_serve.models.families import ModelConfig

SIZES: dict[str, Any] = {
    "vocab_size": 101,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
VISION: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
# What the families need besides SIZES: heads of an explicit size, a pad token within the vocabulary, small windows.
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "LlamaForCausalLM": ("LlamaConfig", {}),
    "Qwen2ForCausalLM": ("Qwen2Config", {}),
    "Qwen3ForCausalLM": ("Qwen3Config", {"head_dim": 12}),
    "MistralForCausalLM": ("MistralConfig", {"sliding_window": 9}),
    "Gemma2ForCausalLM": (
        "Gemma2Config",
        {
            "head_dim": 12,
            "pad_token_id": 0,
            "sliding_window": 9,
            "query_pre_attn_scalar": 9,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 1.5,
        },
    ),
    "Gemma3ForCausalLM": (
        "Gemma3TextConfig",
        {
            "head_dim": 12,
            "pad_token_id": 0,
            "sliding_window": 9,
            "query_pre_attn_scalar": 9,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
        },
    ),
    "Phi3ForCausalLM": ("Phi3Config", {"pad_token_id": 0, "sliding_window": 9}),
    "Olmo2ForCausalLM": ("Olmo2Config", {"pad_token_id": 0}),
    "MixtralForCausalLM": ("MixtralConfig", {"num_local_experts": 5, "num_experts_per_tok": 2}),
    "Qwen3MoeForCausalLM": (
        "Qwen3MoeConfig",
        {
            "head_dim": 12,
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 24,
            "norm_topk_prob": True,
        },
    ),
}


def make_checkpoint(
    folder: Path,
    architecture: str = "LlamaForCausalLM",
    *,
    seed: int = 0,
    save_original_format: bool = True,
    **changes: Any,
) -> Any:
    """Save a random model of SIZES, what its family needs, and `changes` into `folder`; returns the transformers model, in
    float32. save_original_format False: with transformers' names in memory."""
    torch.manual_seed(seed)
    model = _new_model(architecture, changes).eval()
    norm = 0.0 if architecture.startswith("Gemma") else 1.0
    with torch.inference_mode():
        for name, parameter in model.named_parameters():
            # Large enough that a wrong row, head or angle shows in the logits.
            parameter.normal_(norm if name.endswith("norm.weight") else 0.0, 0.15)
    model.save_pretrained(folder, save_original_format=save_original_format)
    return model


def _new_model(architecture: str, changes: dict[str, Any]) -> Any:
    if architecture == "Gemma3ForConditionalGeneration":
        text = {**SIZES, **CONFIGS["Gemma3ForCausalLM"][1], **changes}
        config = transformers.Gemma3Config(text_config=text, vision_config=VISION, mm_tokens_per_image=4)
        return transformers.Gemma3ForConditionalGeneration(config)
    name, needs = CONFIGS[architecture]
    return getattr(transformers, architecture)(getattr(transformers, name)(**{**SIZES, **needs, **changes}))


def edit_tensors(folder: Path, change: dict[str, Tensor | None], file: str = "model.safetensors") -> None:
    """Replace, add or (None) remove tensors of a checkpoint file."""
    tensors = {key: value for key, value in {**load_file(folder / file), **change}.items() if value is not None}
    save_file(tensors, folder / file)


def edit_json(file: Path, change: dict[str, Any], remove: tuple[str, ...] = ()) -> None:
    values = {**json.loads(file.read_text()), **change} if file.exists() else change
    file.write_text(json.dumps({key: value for key, value in values.items() if key not in remove}))


class DenseAttend:
    """An `Attend` of one sequence: stores k and v of each layer, then attends to everything at or before each token that the
    layer's window reaches, in float32."""

    def __init__(self, config: ModelConfig) -> None:
        self.config = config
        self.cache: dict[int, tuple[Tensor, Tensor]] = {}

    def __call__(self, layer: int, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor) -> Tensor:
        if layer in self.cache:
            k_old, v_old = self.cache[layer]
            k_TKH, v_TKH = torch.cat((k_old, k_TKH)), torch.cat((v_old, v_TKH))
        self.cache[layer] = (k_TKH, v_TKH)
        group = q_TNH.shape[1] // k_TKH.shape[1]
        k_SNH, v_SNH = k_TKH.repeat_interleave(group, dim=1), v_TKH.repeat_interleave(group, dim=1)
        scale = q_TNH.shape[-1] ** -0.5 if self.config.attention_scale is None else self.config.attention_scale
        scores_NTS = torch.einsum("tnh,snh->nts", q_TNH.float(), k_SNH.float()) * scale
        if self.config.attention_soft_cap is not None:
            scores_NTS = self.config.attention_soft_cap * torch.tanh(scores_NTS / self.config.attention_soft_cap)
        num_new, num_all = scores_NTS.shape[1:]
        at_S = torch.arange(num_all, device=q_TNH.device)
        past_TS = at_S[num_all - num_new :, None] - at_S  # how long ago
        window = self.config.windows[layer] if self.config.windows else None
        hidden_TS = (past_TS < 0) | (past_TS >= (num_all if window is None else window))
        weights_NTS = scores_NTS.masked_fill(hidden_TS, float("-inf")).softmax(-1).to(v_SNH.dtype)
        return torch.einsum("nts,snh->tnh", weights_NTS, v_SNH)
