"""Tiny random checkpoints written by transformers, and an attention that remembers keys and values."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

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


def make_checkpoint(folder: Path, *, seed: int = 0, **changes: Any) -> Any:
    """Save a random Llama of SIZES and `changes` into `folder`; returns the transformers model, in float32."""
    torch.manual_seed(seed)
    model = LlamaForCausalLM(LlamaConfig(**{**SIZES, **changes})).eval()
    with torch.inference_mode():
        for name, parameter in model.named_parameters():
            # Large enough that a wrong row, head or angle shows in the logits.
            parameter.normal_(1.0 if name.endswith("norm.weight") else 0.0, 0.15)
    model.save_pretrained(folder)
    return model


def edit_tensors(folder: Path, change: dict[str, Tensor | None], file: str = "model.safetensors") -> None:
    """Replace, add or (None) remove tensors of a checkpoint file."""
    tensors = {key: value for key, value in {**load_file(folder / file), **change}.items() if value is not None}
    save_file(tensors, folder / file)


def edit_json(file: Path, change: dict[str, Any], remove: tuple[str, ...] = ()) -> None:
    values = {**json.loads(file.read_text()), **change} if file.exists() else change
    file.write_text(json.dumps({key: value for key, value in values.items() if key not in remove}))


class DenseAttend:
    """An `Attend` of one sequence: stores k and v of each layer, then attends to everything at or before each token."""

    def __init__(self) -> None:
        self.cache: dict[int, tuple[Tensor, Tensor]] = {}

    def __call__(self, layer: int, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor) -> Tensor:
        if layer in self.cache:
            k_old, v_old = self.cache[layer]
            k_TKH, v_TKH = torch.cat((k_old, k_TKH)), torch.cat((v_old, v_TKH))
        self.cache[layer] = (k_TKH, v_TKH)
        group = q_TNH.shape[1] // k_TKH.shape[1]
        k_SNH, v_SNH = k_TKH.repeat_interleave(group, dim=1), v_TKH.repeat_interleave(group, dim=1)
        scores_NTS = torch.einsum("tnh,snh->nts", q_TNH, k_SNH) * q_TNH.shape[-1] ** -0.5
        num_new, num_all = scores_NTS.shape[1:]
        later_TS = torch.ones(num_new, num_all, dtype=torch.bool).triu(num_all - num_new + 1)
        return torch.einsum("nts,snh->tnh", scores_NTS.masked_fill(later_TS, float("-inf")).softmax(-1), v_SNH)
