"""Turns a GGUF file into a folder in the ordinary Hugging Face layout. Run as `python -m overlap_serve.models.gguf FILE OUT`.

Owns what a family's GGUF calls its tensors and metadata. A process of its own, so that those who ask for a model (ingress, command
line) neither load numpy's dequantizers nor hold a tensor, and it may be killed at any time. What the user should read goes to
stdout: warnings, or with exit status 2 one error. Progress: stderr.

Number formats: floats keep their type, quantized tensors become float32. A scale (11 significant bits) times a 4-bit number
already has 15, more than float16 or bfloat16 hold, so rounding would add an error of its own to the quantization's. The price is
disk (540 MB for the embedded model); who runs in bfloat16 casts while loading. Peak memory is one block of rows.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import sys
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, ReaderTensor, dequantize
from tqdm import tqdm

from overlap_serve.errors import ModelLoadError
from overlap_serve.models.gguf_file import GGUFFile
from overlap_serve.models.gguf_tokenizer import write_tokenizer

ORPHANED = 3  # exit status when the process that asked is gone
_BLOCK_BYTES = 64 << 20
_ROPE_FREQS = "rope_freqs.weight"
_FLOATS = {"F32": ("F32", 4), "F16": ("F16", 2), "BF16": ("BF16", 2)}


@dataclass(frozen=True)
class Family:
    """permuted: llama.cpp interleaves the two halves of each head in q and k. head_norms: q and k have a norm each."""

    architecture: str
    permuted: bool = False
    head_norms: bool = False


# By general.architecture.
FAMILIES = {
    "llama": Family("LlamaForCausalLM", permuted=True),
    "qwen2": Family("Qwen2ForCausalLM"),
    "qwen3": Family("Qwen3ForCausalLM", head_norms=True),
}


@dataclass(frozen=True)
class Place:
    """Where a GGUF tensor goes. heads: undo the permutation of this many heads; 0: there is none."""

    name: str
    shape: tuple[int, ...]
    required: bool = True
    heads: int = 0


def convert(path: Path, out: Path) -> list[str]:
    """Write config.json, generation_config.json, tokenizer files and model.safetensors into `out`; returns warnings.

    Raises ModelLoadError that names the file and what in it cannot be converted.
    """
    file = GGUFFile(path)
    config = model_config(file)
    _write_json(out / "config.json", config)
    _write_json(out / "generation_config.json", generation_config(file))
    warnings = write_tokenizer(file, out, vocab_size=config["vocab_size"], max_length=config["max_position_embeddings"])
    _write_weights(file, _placed(file, config), out / "model.safetensors")
    return warnings


# -- configuration


def model_config(file: GGUFFile) -> dict[str, Any]:
    """config.json as transformers 5 writes it."""
    kind = file.need("general.architecture", str)
    family = FAMILIES.get(kind)
    if family is None:
        raise ModelLoadError(
            f"{file.path}: general.architecture is {kind!r}, supported are {', '.join(FAMILIES)}; "
            "use the model's safetensors instead"
        )
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise ModelLoadError(f"{file.path}: token_embd.weight is missing or no matrix; fetch the file again")
    num_heads = file.need(f"{kind}.attention.head_count", int)
    hidden_size = file.need(f"{kind}.embedding_length", int)
    if num_heads < 1:
        raise ModelLoadError(f"{file.path}: {kind}.attention.head_count is {num_heads}; fetch the file again")
    config = {
        "architectures": [family.architecture],
        "model_type": kind,
        "dtype": {"BF16": "bfloat16", "F16": "float16"}.get(embedding.tensor_type.name, "float32"),
        "vocab_size": int(embedding.shape[1]),
        "hidden_size": hidden_size,
        "intermediate_size": file.need(f"{kind}.feed_forward_length", int),
        "num_hidden_layers": file.need(f"{kind}.block_count", int),
        "num_attention_heads": num_heads,
        "num_key_value_heads": file.get(f"{kind}.attention.head_count_kv", int, num_heads),
        "head_dim": file.get(f"{kind}.attention.key_length", int, hidden_size // num_heads),
        "hidden_act": "silu",
        "max_position_embeddings": file.need(f"{kind}.context_length", int),
        "rms_norm_eps": file.number(f"{kind}.attention.layer_norm_rms_epsilon"),
        "rope_parameters": _rope_parameters(file, kind),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        **_biases(file, kind),
        **_token_ids(file),
    }
    _refuse_unsupported(file, kind, config)
    return config


def generation_config(file: GGUFFile) -> dict[str, Any]:
    """Special ids only: a GGUF file holds no sampling defaults."""
    return _token_ids(file)


def _refuse_unsupported(file: GGUFFile, kind: str, config: dict[str, Any]) -> None:
    """Metadata that would change what the model computes, and has no place here."""
    head_dim, context = config["head_dim"], config["max_position_embeddings"]
    for key, found, allowed in (
        ("expert_count", file.get(f"{kind}.expert_count", int, 0), 0),
        ("attention.value_length", file.get(f"{kind}.attention.value_length", int, head_dim), head_dim),
        ("rope.dimension_count", file.get(f"{kind}.rope.dimension_count", int, head_dim), head_dim),
        ("attention.causal", file.get(f"{kind}.attention.causal", bool, True), True),
    ):
        if found != allowed:
            raise ModelLoadError(f"{file.path}: {kind}.{key} is {found}, supported is {allowed}")
    window = file.get(f"{kind}.attention.sliding_window", int, 0)
    if 0 < window < context:
        raise ModelLoadError(
            f"{file.path}: {kind}.attention.sliding_window is {window}, below the context of {context}; "
            "use the model's safetensors instead"
        )


def _biases(file: GGUFFile, kind: str) -> dict[str, bool]:
    """Switches that the family's config.json has; in Qwen2 q, k and v always have biases."""
    attention = {"attention_bias": "blk.0.attn_q.bias" in file.tensors}
    if kind == "llama":
        return {**attention, "mlp_bias": "blk.0.ffn_gate.bias" in file.tensors}
    return attention if kind == "qwen3" else {}


def _token_ids(file: GGUFFile) -> dict[str, Any]:
    """Every end token of the file: end of sequence, of turn and of message."""
    ends = [file.get(f"tokenizer.ggml.{name}_token_id", int, None) for name in ("eos", "eot", "eom")]
    eos = list(dict.fromkeys(id_ for id_ in ends if id_ is not None))
    return {
        "bos_token_id": file.get("tokenizer.ggml.bos_token_id", int, None),
        "eos_token_id": eos[0] if len(eos) == 1 else eos or None,
        "pad_token_id": file.get("tokenizer.ggml.padding_token_id", int, None),
    }


def _rope_parameters(file: GGUFFile, kind: str) -> dict[str, str | float]:
    theta = file.number(f"{kind}.rope.freq_base", 10000.0)
    scaling = file.get(f"{kind}.rope.scaling.type", str, "none")
    if _ROPE_FREQS in file.tensors:
        return {"rope_theta": theta, **_llama3_from_divisors(file, theta)}
    if scaling == "none":
        return {"rope_type": "default", "rope_theta": theta}
    if scaling not in ("linear", "yarn"):
        raise ModelLoadError(
            f"{file.path}: {kind}.rope.scaling.type is {scaling!r}, supported are none, linear, yarn, llama3"
        )
    factor = file.number(f"{kind}.rope.scaling.factor")
    if scaling == "linear":
        return {"rope_type": "linear", "rope_theta": theta, "factor": factor}
    return {"rope_type": "yarn", "rope_theta": theta, "factor": factor, **_yarn(file, f"{kind}.rope.scaling")}


def _yarn(file: GGUFFile, prefix: str) -> dict[str, float]:
    """The rest of arXiv:2309.00071; what the file leaves out has the same default in llama.cpp and in transformers."""
    names = {"yarn_beta_fast": "beta_fast", "yarn_beta_slow": "beta_slow"}
    given = {ours: file.number(f"{prefix}.{key}", 0.0) for key, ours in names.items()}
    for key in ("attn_factor", "yarn_attn_factor", "yarn_ext_factor", "yarn_log_multiplier"):
        if file.get(f"{prefix}.{key}", float, None) is not None:
            raise ModelLoadError(f"{file.path}: {prefix}.{key} is set, which is not supported")
    return {
        "original_max_position_embeddings": file.need(f"{prefix}.original_context_length", int),
        **{name: value for name, value in given.items() if value},
    }


def _llama3_from_divisors(file: GGUFFile, theta: float) -> dict[str, str | float]:
    """GGUF stores only the divisor of each frequency; the largest is the factor, and Llama 3.1 to 3.3 share the rest.

    The parameters are accepted only if they give back every divisor (llama.cpp, conversion/llama.py).
    """
    divisors = file.tensors[_ROPE_FREQS].data
    head_dim = 2 * divisors.size
    factor, low, high, context = float(divisors.max()), 1.0, 4.0, 8192
    turns = context * theta ** -(np.arange(0, head_dim, 2) / head_dim) / (2 * math.pi)
    ramp = np.clip((turns - low) / (high - low), 0.0, 1.0)
    if not np.allclose(divisors, 1 / ((1 - ramp) / factor + ramp), rtol=1e-3):
        raise ModelLoadError(
            f"{file.path}: {_ROPE_FREQS} is not the Llama 3 scaling; use the model's safetensors instead"
        )
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": context,
    }


# -- weights


def places(config: dict[str, Any], family: Family) -> dict[str, Place]:
    """Every tensor that the file must or may hold, by its GGUF name (llama.cpp, gguf-py/gguf/tensor_mapping.py)."""
    hidden, inner, size = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    num_heads, num_kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    q, kv = num_heads * size, num_kv_heads * size
    table = {
        "token_embd": Place("model.embed_tokens", (config["vocab_size"], hidden)),
        "output_norm": Place("model.norm", (hidden,)),
        "output": Place("lm_head", (config["vocab_size"], hidden), required=False),
    }
    for layer in range(config["num_hidden_layers"]):
        ours, theirs = f"model.layers.{layer}", f"blk.{layer}"
        table |= {
            f"{theirs}.attn_norm": Place(f"{ours}.input_layernorm", (hidden,)),
            f"{theirs}.attn_q": Place(f"{ours}.self_attn.q_proj", (q, hidden), heads=num_heads * family.permuted),
            f"{theirs}.attn_k": Place(f"{ours}.self_attn.k_proj", (kv, hidden), heads=num_kv_heads * family.permuted),
            f"{theirs}.attn_v": Place(f"{ours}.self_attn.v_proj", (kv, hidden)),
            f"{theirs}.attn_output": Place(f"{ours}.self_attn.o_proj", (hidden, q)),
            f"{theirs}.ffn_norm": Place(f"{ours}.post_attention_layernorm", (hidden,)),
            f"{theirs}.ffn_gate": Place(f"{ours}.mlp.gate_proj", (inner, hidden)),
            f"{theirs}.ffn_up": Place(f"{ours}.mlp.up_proj", (inner, hidden)),
            f"{theirs}.ffn_down": Place(f"{ours}.mlp.down_proj", (hidden, inner)),
        }
        if family.head_norms:
            table[f"{theirs}.attn_q_norm"] = Place(f"{ours}.self_attn.q_norm", (size,))
            table[f"{theirs}.attn_k_norm"] = Place(f"{ours}.self_attn.k_norm", (size,))
    weights = {f"{name}.weight": Place(f"{p.name}.weight", p.shape, p.required, p.heads) for name, p in table.items()}
    biases = {
        f"{name}.bias": Place(f"{p.name}.bias", p.shape[:1], False, p.heads)
        for name, p in table.items()
        if name.startswith("blk.") and len(p.shape) == 2
    }
    return weights | biases


def _placed(file: GGUFFile, config: dict[str, Any]) -> list[tuple[ReaderTensor, Place]]:
    """Each tensor with its place. Raises ModelLoadError for one that is missing, foreign, misshapen or of a type without numbers."""
    kind = config["model_type"]
    table = places(config, FAMILIES[kind])
    missing = [name for name, place in table.items() if place.required and name not in file.tensors]
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise ModelLoadError(f"{file.path}: {missing[0]}{more} is missing; fetch the file again")
    placed = []
    for name, tensor in file.tensors.items():
        if name == _ROPE_FREQS:
            continue
        if name not in table:
            raise ModelLoadError(f"{file.path}: tensor {name} has no place in a {kind} model")
        shape, place = tuple(int(size) for size in reversed(tensor.shape)), table[name]
        if shape != place.shape:
            raise ModelLoadError(f"{file.path}: {name} has shape {shape}, the metadata asks for {place.shape}")
        _values(tensor, tensor.data[:1] if len(shape) > 1 else tensor.data, file.path)  # its type can be converted
        placed.append((tensor, place))
    return placed


def undo_permutation(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """Rows of q or k from llama.cpp's order (the two halves of a head interleaved) back to halves one after the other.

    Inverse of `permute` in llama.cpp's conversion/llama.py. Works on weights and on biases.
    """
    pairs = rows.reshape(num_heads, rows.shape[0] // num_heads // 2, 2, *rows.shape[1:])
    halves: np.ndarray = pairs.swapaxes(1, 2).reshape(rows.shape)
    return halves


def _write_weights(file: GGUFFile, placed: list[tuple[ReaderTensor, Place]], out: Path) -> None:
    """One safetensors file, header first, then tensor after tensor (huggingface/safetensors, README "Format")."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for tensor, place in placed:
        kind, item_bytes = _FLOATS.get(tensor.tensor_type.name, ("F32", 4))
        start, end = end, end + item_bytes * int(tensor.n_elements)
        header[place.name] = {"dtype": kind, "shape": list(place.shape), "data_offsets": [start, end]}
    free = shutil.disk_usage(out.parent).free
    if free < end:
        raise ModelLoadError(f"{out.parent}: {end / 1e6:.0f} MB are needed, {free / 1e6:.0f} MB are free; make room")
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # tensors start aligned
    with out.open("wb") as sink, tqdm(total=end, desc="converting weights", unit="B", unit_scale=True) as bar:
        sink.write(len(text).to_bytes(8, "little") + text)
        for tensor, place in placed:
            for block in _blocks(tensor, place, file.path):
                bar.update(sink.write(np.ascontiguousarray(block).data.cast("B")))


def _blocks(tensor: ReaderTensor, place: Place, path: Path) -> Iterator[np.ndarray]:
    """The numbers of a tensor in Hugging Face row order, some rows at a time; bfloat16 as its bits."""
    if place.heads:
        yield undo_permutation(_values(tensor, tensor.data, path), place.heads)
        return
    # A vector is one row: where it is quantized, its bytes cannot be cut anywhere.
    step = max(1, _BLOCK_BYTES // (4 * place.shape[1])) if len(place.shape) > 1 else len(tensor.data)
    for start in range(0, len(tensor.data), step):
        yield _values(tensor, tensor.data[start : start + step], path)


def _values(tensor: ReaderTensor, rows: np.ndarray, path: Path) -> np.ndarray:
    kind = tensor.tensor_type
    if kind == GGMLQuantizationType.BF16:
        return rows.view(np.uint16)
    if kind.name in _FLOATS:
        return rows
    try:
        values: np.ndarray = dequantize(rows, kind)
    except NotImplementedError:
        raise ModelLoadError(f"{path}: {tensor.name} has type {kind.name}, which cannot be converted") from None
    return values


def _write_json(file: Path, value: dict[str, Any]) -> None:
    file.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


# -- the process


def main(argv: Iterable[str] | None = None) -> int:
    """Exit status 0, or 2 after one line on stdout."""
    parser = argparse.ArgumentParser(prog="python -m overlap_serve.models.gguf", description=convert.__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--watch-stdin", action="store_true", help="end when stdin closes: whoever holds it is gone")
    args = parser.parse_args(None if argv is None else list(argv))
    if args.watch_stdin:
        threading.Thread(target=_end_with_stdin, daemon=True).start()
    try:
        for warning in convert(args.file, args.out):
            print(warning)
    except ModelLoadError as error:
        print(error)
        return 2
    except MemoryError:
        print(f"{args.file}: not enough memory to convert it; free some, or convert it on another machine")
        return 2
    except OSError as error:
        print(f"{error.filename or args.out}: {error.strerror or error}; make room or give write access")
        return 2
    return 0


def _end_with_stdin() -> None:
    # Not sys.stdin: its lock, held by a blocked read, would break the interpreter's shutdown.
    while os.read(0, 1024):
        pass
    os._exit(ORPHANED)


if __name__ == "__main__":
    sys.exit(main())
