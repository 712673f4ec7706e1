"""GGUF files as llama.cpp's converter makes them: tiny checkpoints, and two tiny vocabularies."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf as gguf_file
import numpy as np
from gguf import GGMLQuantizationType as Kind
from tokenizers.pre_tokenizers import ByteLevel

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TOKENS = [*SPECIAL, *sorted(ByteLevel.alphabet()), "ĠĠ", "he", "ll", "hell", "hello", "<tool>"]
MERGES = ["Ġ Ġ", "h e", "l l", "he ll", "hell o"]
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.content }}{% endfor %}"
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(key: str) -> str:
    stem, kind = key.rsplit(".", 1)
    if stem in NAMES:
        return f"{NAMES[stem]}.{kind}"
    _, _, layer, part = stem.split(".", 3)
    return f"blk.{layer}.{NAMES[part]}.{kind}"


def permute(weights: np.ndarray, num_heads: int) -> np.ndarray:
    """What llama.cpp's converter does to q and k of the Llama family."""
    halves = weights.reshape(num_heads, 2, weights.shape[0] // num_heads // 2, *weights.shape[1:])
    interleaved: np.ndarray = halves.swapaxes(1, 2).reshape(weights.shape)
    return interleaved


def write_gguf(
    file: Path,
    tensors: Mapping[str, np.ndarray],
    *,
    architecture: str = "llama",
    kinds: Mapping[str, Kind] | None = None,
    extra: Mapping[str, np.ndarray] | None = None,
    raw: Mapping[str, tuple[np.ndarray, Kind]] | None = None,
    values: Mapping[str, Any] | None = None,
    vocabulary: Mapping[str, Any] | None = None,
    others: Mapping[str, Any] | None = None,
) -> None:
    """A file like llama.cpp's converter makes from these checkpoint tensors.

    kinds: checkpoint name -> type, else float32. extra: more tensors. raw: tensors by GGUF name whose
    bytes are given. values: metadata below the architecture's name that replaces
    or (None) removes what is written here. vocabulary: the same below `tokenizer.ggml`. others: the same, whole names.
    """
    writer = gguf_file.GGUFWriter(file, architecture)
    metadata: dict[str, Any] = {
        "context_length": 64,
        "embedding_length": 32,
        "feed_forward_length": 64,
        "block_count": 3,
        "attention.head_count": 4,
        "attention.head_count_kv": 2,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.freq_base": 500.0,
        **(values or {}),
    }
    words = {**byte_level_vocabulary(), **(vocabulary or {})}
    for prefix, items in ((architecture, metadata), ("tokenizer.ggml", words)):
        for key, value in items.items():
            _add(writer, f"{prefix}.{key}", value)
    for key, value in (others or {}).items():
        _add(writer, key, value)
    writer.add_chat_template(TEMPLATE)
    for key, array in tensors.items():
        if gguf_name(key) in (raw or {}):
            continue
        if architecture == "llama" and ("q_proj" in key or "k_proj" in key):
            array = permute(array, 4 if "q_proj" in key else 2)
        kind = (kinds or {}).get(key, Kind.F32)
        writer.add_tensor(gguf_name(key), gguf_file.quantize(array, kind), raw_dtype=kind)
    for name, array in (extra or {}).items():
        writer.add_tensor(name, array)
    for name, (array, kind) in (raw or {}).items():
        writer.add_tensor(name, array, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add(writer: gguf_file.GGUFWriter, key: str, value: Any) -> None:
    if value is None:
        return
    add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
    add.get(type(value), writer.add_array)(key, value)


def byte_level_vocabulary() -> dict[str, Any]:
    return {
        "model": "gpt2",
        "pre": "smollm",
        "tokens": TOKENS,
        "token_type": [CONTROL] * len(SPECIAL) + [NORMAL] * (len(TOKENS) - len(SPECIAL) - 1) + [USER_DEFINED],
        "merges": MERGES,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "eot_token_id": 0,
        "padding_token_id": 2,
        "add_bos_token": False,
    }


def sentencepiece_vocabulary() -> dict[str, Any]:
    """As Llama 2 has it: byte tokens, and merges that follow from the scores."""
    words = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces = ["▁", "h", "e", "l", "o", "▁h", "ll", "el", "▁he", "llo", "▁hello", "▁▁", "<tool>"]
    scores = [0.0] * len(words) + [float(s) for s in (-100, -101, -102, -103, -104, -9, -3, -2, -4, -5, -1, -20, 0)]
    types = [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256, *[NORMAL] * 12, USER_DEFINED]
    return {
        "model": "llama",
        "pre": "default",
        "tokens": [*words, *pieces],
        "scores": scores,
        "token_type": types,
        "merges": None,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "eot_token_id": None,
        "unknown_token_id": 0,
        "padding_token_id": None,
        "add_bos_token": None,
    }


def random_tensors(
    vocab_size: int = len(TOKENS),
    *,
    hidden: int = 32,
    inner: int = 64,
    num_layers: int = 3,
    head_norms: bool = False,
    biases: bool = False,
) -> dict[str, np.ndarray]:
    """A Llama-like checkpoint with four heads and two kv heads, without transformers; sizes as in `write_gguf`."""
    random = np.random.default_rng(0)
    head_dim = hidden // 4
    shapes: dict[str, tuple[int, ...]] = {
        "input_layernorm": (hidden,),
        "self_attn.q_proj": (4 * head_dim, hidden),
        "self_attn.k_proj": (2 * head_dim, hidden),
        "self_attn.v_proj": (2 * head_dim, hidden),
        "self_attn.o_proj": (hidden, 4 * head_dim),
        "post_attention_layernorm": (hidden,),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
        **(dict.fromkeys(("self_attn.q_norm", "self_attn.k_norm"), (head_dim,)) if head_norms else {}),
    }
    every = {"model.embed_tokens.weight": (vocab_size, hidden), "model.norm.weight": (hidden,)}
    for layer in range(num_layers):
        for name, shape in shapes.items():
            every[f"model.layers.{layer}.{name}.weight"] = shape
            if biases and name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"):
                every[f"model.layers.{layer}.{name}.bias"] = shape[:1]
    return {name: random.standard_normal(shape, dtype=np.float32) for name, shape in every.items()}


def write_tiny_gguf(file: Path) -> None:
    write_gguf(file, random_tensors())
