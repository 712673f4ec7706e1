"""Turns a GGUF file into a folder in the ordinary Hugging Face layout. Run as `python -m overlap_serve.models.gguf FILE OUT`.

A process of its own, because the tokenizer conversion loads transformers and torch, and those who ask for a model (ingress,
command line) must not. What the user should read goes to stdout: warnings, or with exit status 2 one error. Progress: stderr.

Number formats: floats keep their type, quantized tensors become float32. A scale (11 significant bits) times a 4-bit number
already has 15, more than float16 or bfloat16 hold, so rounding would add an error of its own to the quantization's. The price is
disk (540 MB for the embedded model); who runs in bfloat16 casts while loading. Peak memory is one tensor.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFReader, ReaderTensor, dequantize
from tokenizers import Regex, pre_tokenizers
from tqdm import tqdm
from transformers import AutoTokenizer

from overlap_serve.errors import ModelLoadError

ARCHITECTURES = {"llama": "LlamaForCausalLM"}

# GGUF names after llama.cpp, gguf-py/gguf/tensor_mapping.py.
_GLOBAL_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_ROPE_FREQS = "rope_freqs.weight"
_SAFETENSORS_TYPES = {"F32": ("F32", 4), "F16": ("F16", 2), "BF16": ("BF16", 2)}

# How text is cut before merging, by `tokenizer.ggml.pre` (llama.cpp, src/llama-vocab.cpp). transformers' loader does not know the
# first group, and joins blanks before a digit differently than the model was trained with.
_DIGITS_APART = ("smollm", "starcoder", "refact", "codeshell", "command-r", "exaone", "minerva-7b")
_LLAMA3 = ("llama-bpe", "llama3", "llama-v3")
_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def convert(file: Path, out: Path) -> list[str]:
    """Write config.json, generation_config.json, tokenizer files and model.safetensors into `out`; returns warnings.

    Raises ModelLoadError that names the file and what in it cannot be converted.
    """
    try:
        reader = GGUFReader(file)
    except (OSError, ValueError, IndexError, KeyError) as error:
        raise ModelLoadError(f"{file}: damaged or not a GGUF file ({error}); fetch it again") from None
    config = model_config(reader, file)
    _write_json(out / "config.json", config)
    _write_json(out / "generation_config.json", generation_config(reader))
    _write_weights(reader, config, file, out / "model.safetensors")
    return _write_tokenizer(reader, file, out)


# -- configuration


def model_config(reader: GGUFReader, file: Path) -> dict[str, Any]:
    """config.json as transformers 5 writes it."""
    kind = _field(reader, "general.architecture", file)
    if kind not in ARCHITECTURES:
        raise ModelLoadError(f"{file}: general.architecture is {kind!r}, supported are {', '.join(ARCHITECTURES)}")
    if _optional(reader, f"{kind}.expert_count", 0):
        raise ModelLoadError(f"{file}: {kind}.expert_count is set, mixtures of experts are not supported")
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    if "token_embd.weight" not in tensors:
        raise ModelLoadError(f"{file}: token_embd.weight is missing; fetch the file again")
    num_heads = _field(reader, f"{kind}.attention.head_count", file)
    hidden_size = _field(reader, f"{kind}.embedding_length", file)
    return {
        "architectures": [ARCHITECTURES[kind]],
        "model_type": kind,
        "dtype": {"BF16": "bfloat16", "F16": "float16"}.get(tensors["token_embd.weight"].tensor_type.name, "float32"),
        "vocab_size": int(tensors["token_embd.weight"].shape[1]),
        "hidden_size": hidden_size,
        "intermediate_size": _field(reader, f"{kind}.feed_forward_length", file),
        "num_hidden_layers": _field(reader, f"{kind}.block_count", file),
        "num_attention_heads": num_heads,
        "num_key_value_heads": _optional(reader, f"{kind}.attention.head_count_kv", num_heads),
        "head_dim": _optional(reader, f"{kind}.attention.key_length", hidden_size // num_heads),
        "hidden_act": "silu",
        "max_position_embeddings": _field(reader, f"{kind}.context_length", file),
        "rms_norm_eps": _shortest(_field(reader, f"{kind}.attention.layer_norm_rms_epsilon", file)),
        "rope_parameters": _rope_parameters(reader, kind, tensors, file),
        "tie_word_embeddings": "output.weight" not in tensors,
        "attention_bias": "blk.0.attn_q.bias" in tensors,
        "mlp_bias": "blk.0.ffn_gate.bias" in tensors,
        **_token_ids(reader),
    }


def generation_config(reader: GGUFReader) -> dict[str, Any]:
    """Special ids only: a GGUF file holds no sampling defaults."""
    return _token_ids(reader)


def _token_ids(reader: GGUFReader) -> dict[str, Any]:
    """Every end token of the file: end of sequence, of turn and of message."""
    ends = [_optional(reader, f"tokenizer.ggml.{name}_token_id", None) for name in ("eos", "eot", "eom")]
    eos = list(dict.fromkeys(id_ for id_ in ends if id_ is not None))
    return {
        "bos_token_id": _optional(reader, "tokenizer.ggml.bos_token_id", None),
        "eos_token_id": eos[0] if len(eos) == 1 else eos or None,
        "pad_token_id": _optional(reader, "tokenizer.ggml.padding_token_id", None),
    }


def _rope_parameters(
    reader: GGUFReader, kind: str, tensors: dict[str, ReaderTensor], file: Path
) -> dict[str, str | float]:
    theta = _shortest(_optional(reader, f"{kind}.rope.freq_base", 10000.0))
    scaling = _optional(reader, f"{kind}.rope.scaling.type", "none")
    if _ROPE_FREQS in tensors:
        head_dim = 2 * int(tensors[_ROPE_FREQS].shape[0])
        return {"rope_theta": theta, **_llama3_from_divisors(tensors[_ROPE_FREQS].data, theta, head_dim, file)}
    if scaling == "linear":
        factor = _shortest(_field(reader, f"{kind}.rope.scaling.factor", file))
        return {"rope_type": "linear", "rope_theta": theta, "factor": factor}
    if scaling != "none":
        raise ModelLoadError(f"{file}: {kind}.rope.scaling.type is {scaling!r}, supported are none, linear, llama3")
    return {"rope_type": "default", "rope_theta": theta}


def _llama3_from_divisors(divisors: np.ndarray, theta: float, head_dim: int, file: Path) -> dict[str, str | float]:
    """GGUF stores only the divisor of each frequency; the largest is the factor, and Llama 3.1 to 3.3 share the rest.

    The parameters are accepted only if they give back every divisor (llama.cpp, convert_hf_to_gguf.py).
    """
    factor, low, high, context = float(divisors.max()), 1.0, 4.0, 8192
    turns = context * theta ** -(np.arange(0, head_dim, 2) / head_dim) / (2 * math.pi)
    ramp = np.clip((turns - low) / (high - low), 0.0, 1.0)
    if not np.allclose(divisors, 1 / ((1 - ramp) / factor + ramp), rtol=1e-3):
        raise ModelLoadError(f"{file}: {_ROPE_FREQS} is not the Llama 3 scaling; use the model's safetensors instead")
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": context,
    }


def _field(reader: GGUFReader, key: str, file: Path) -> Any:
    if key not in reader.fields:
        raise ModelLoadError(f"{file}: {key} is missing from the metadata; fetch the file again")
    return reader.fields[key].contents()


def _optional(reader: GGUFReader, key: str, default: Any) -> Any:
    return reader.fields[key].contents() if key in reader.fields else default


def _shortest(value: float) -> float:
    """The shortest decimal that is the same float32: 1e-05, not 9.999999747378752e-06."""
    return float(str(np.float32(value)))


# -- weights


def checkpoint_name(name: str, file: Path) -> str:
    """Hugging Face name of a GGUF tensor."""
    stem, _, kind = name.rpartition(".")
    if stem in _GLOBAL_NAMES:
        return f"{_GLOBAL_NAMES[stem]}.{kind}"
    block, _, rest = stem.partition(".")
    layer, _, part = rest.partition(".")
    if block != "blk" or part not in _LAYER_NAMES:
        raise ModelLoadError(f"{file}: tensor {name} has no place in a Llama model")
    return f"model.layers.{layer}.{_LAYER_NAMES[part]}.{kind}"


def undo_permutation(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """Rows of q or k from llama.cpp's order (the two halves of a head interleaved) back to halves one after the other.

    Inverse of `permute` in llama.cpp's convert_hf_to_gguf.py. Works on weights and on biases.
    """
    pairs = rows.reshape(num_heads, rows.shape[0] // num_heads // 2, 2, *rows.shape[1:])
    halves: np.ndarray = pairs.swapaxes(1, 2).reshape(rows.shape)
    return halves


def _write_weights(reader: GGUFReader, config: dict[str, Any], file: Path, out: Path) -> None:
    """One safetensors file, header first, then tensor after tensor (huggingface/safetensors, README "Format")."""
    tensors = [tensor for tensor in reader.tensors if tensor.name != _ROPE_FREQS]
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for tensor in tensors:
        kind, item_bytes = _SAFETENSORS_TYPES.get(tensor.tensor_type.name, ("F32", 4))
        start, end = end, end + item_bytes * int(tensor.n_elements)
        shape = [int(size) for size in reversed(tensor.shape)]
        header[checkpoint_name(tensor.name, file)] = {"dtype": kind, "shape": shape, "data_offsets": [start, end]}
    free = shutil.disk_usage(out.parent).free
    if free < end:
        raise ModelLoadError(f"{out.parent}: {end / 1e6:.0f} MB are needed, {free / 1e6:.0f} MB are free; make room")
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # tensors start aligned
    with out.open("wb") as sink:
        sink.write(len(text).to_bytes(8, "little") + text)
        for tensor in tqdm(tensors, desc="converting weights", unit="tensor"):
            sink.write(np.ascontiguousarray(_values(tensor, config, file)).data)


def _values(tensor: ReaderTensor, config: dict[str, Any], file: Path) -> np.ndarray:
    """Numbers of one tensor in Hugging Face row order; bfloat16 as its bits."""
    values: np.ndarray
    if tensor.tensor_type == GGMLQuantizationType.BF16:
        values = tensor.data.view(np.uint16)
    elif tensor.tensor_type.name in _SAFETENSORS_TYPES:
        values = tensor.data
    else:
        try:
            values = dequantize(tensor.data, tensor.tensor_type)
        except NotImplementedError:
            raise ModelLoadError(
                f"{file}: {tensor.name} has type {tensor.tensor_type.name}, which cannot be converted"
            ) from None
    if ".attn_q." in tensor.name:
        return undo_permutation(values, config["num_attention_heads"])
    if ".attn_k." in tensor.name:
        return undo_permutation(values, config["num_key_value_heads"])
    return values


# -- tokenizer


def _write_tokenizer(reader: GGUFReader, file: Path, out: Path) -> list[str]:
    """tokenizer.json, tokenizer_config.json and, if the file has one, chat_template.jinja."""
    tokenizer = AutoTokenizer.from_pretrained(str(file.parent), gguf_file=file.name)
    warnings = []
    if _optional(reader, "tokenizer.ggml.model", "") == "gpt2":
        kind = _optional(reader, "tokenizer.ggml.pre", "default")
        warnings = _set_pre_tokenizer(tokenizer.backend_tokenizer, kind)
    tokenizer.save_pretrained(out)
    settings = json.loads((out / "tokenizer_config.json").read_text(encoding="utf-8"))
    for name in ("is_local", "local_files_only"):  # how this process loaded it, no property of the tokenizer
        settings.pop(name, None)
    settings["tokenizer_class"] = "PreTrainedTokenizerFast"  # the name that old and new versions know
    settings["model_max_length"] = _optional(reader, "llama.context_length", settings["model_max_length"])
    _write_json(out / "tokenizer_config.json", settings)
    return warnings


def _set_pre_tokenizer(tokenizer: Any, kind: str) -> list[str]:
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if kind in _DIGITS_APART:
        digits = pre_tokenizers.Digits(individual_digits=True)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, byte_level])
    elif kind in _LLAMA3:
        split = pre_tokenizers.Split(Regex(_LLAMA3_SPLIT), behavior="isolated")
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    elif kind != "gpt-2":
        return [
            f"tokenizer.ggml.pre is {kind!r}: text is cut as transformers does it, some of it may encode differently"
        ]
    return []


def _write_json(file: Path, value: dict[str, Any]) -> None:
    file.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def main(argv: Iterable[str] | None = None) -> int:
    """Exit status 0, or 2 after one line on stdout."""
    parser = argparse.ArgumentParser(prog="python -m overlap_serve.models.gguf", description=convert.__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("out", type=Path)
    args = parser.parse_args(None if argv is None else list(argv))
    try:
        for warning in convert(args.file, args.out):
            print(warning)
    except ModelLoadError as error:
        print(error)
        return 2
    except OSError as error:
        print(f"{error.filename or args.out}: {error.strerror or error}")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
