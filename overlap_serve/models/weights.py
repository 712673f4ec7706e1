"""Fills a decoder from safetensors files, or with random numbers.

Owns the way from a checkpoint key to the rows and columns of one rank's parameter; which key goes where is the table in
`families`. One idea: the table is expanded to the exact set of expected keys before anything is read, so that a missing, a
foreign or a doubled key is an error with its name, never a silently random tensor.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from tqdm import tqdm

from overlap_serve.errors import ModelLoadError
from overlap_serve.models.decoder import Decoder
from overlap_serve.models.families import FUSED, WEIGHTS, Ignore, ModelConfig, Part, Rule, Shard, read_config
from overlap_serve.models.tp import TP, Span, even_span, kv_head_span, vocab_span

FLOAT_TYPES = ("F64", "F32", "F16", "BF16")
DUMMY_STD = 0.02


def build_decoder(
    folder: Path,
    *,
    load_format: Literal["auto", "dummy"],
    dtype: torch.dtype,
    device: torch.device,
    tp: TP,
    seed: int = 0,
    progress: bool = False,
) -> Decoder:
    """This rank's decoder, ready to run. `seed` is for load_format dummy. Raises ModelLoadError that names file and key."""
    decoder = Decoder(read_config(folder), tp, dtype=dtype, device=device)
    if load_format == "dummy":
        dummy_weights(decoder, seed)
    else:
        load_weights(decoder, folder, tp, progress=progress)
    return decoder.eval()


@torch.inference_mode()
def dummy_weights(decoder: Decoder, seed: int) -> None:
    """Small normal numbers, the same for the same seed, dtype and kind of device; norms are one."""
    generator = torch.Generator(next(decoder.parameters()).device).manual_seed(seed)
    for name, parameter in decoder.named_parameters():
        if name.endswith("norm.weight"):
            parameter.fill_(1.0)
        else:
            parameter.normal_(0.0, DUMMY_STD, generator=generator)


@torch.inference_mode()
def load_weights(decoder: Decoder, folder: Path, tp: TP, progress: bool = False) -> None:
    """Read this rank's part of every tensor of `folder` into the parameters, cast to their dtype.

    Peak memory beyond the parameters: one tensor's part on the host (on a device: that, cast, once more). Files are mapped and
    only the rows and columns that this rank keeps are read. Raises ModelLoadError that names file and key.
    """
    targets = expand(decoder, tp)
    filled: dict[str, Path] = {}
    with tqdm(total=len(targets), desc="loading weights", unit="tensor", disable=not progress) as bar:
        for file in _checkpoint_files(folder):
            for key in _load_file(file, targets, ignored_keys(decoder.config), filled):
                filled[key] = file
                bar.update()
    missing = [key for key in targets if key not in filled]
    if missing:
        raise ModelLoadError(f"{folder}: the checkpoint lacks {_some(missing)}; is the download complete?")


# -- the table, expanded for one decoder and one rank


@dataclass(frozen=True)
class Target:
    """Where one checkpoint tensor goes: [take] along `dim` of the file's tensor becomes `destination`, a view of a parameter.

    shape: of the whole tensor in the file.
    """

    shape: tuple[int, ...]
    dim: int
    take: Span
    destination: Tensor


def expand(decoder: Decoder, tp: TP) -> dict[str, Target]:
    """Every key that the checkpoint must hold, with its place on this rank."""
    parameters = dict(decoder.named_parameters())
    targets = {}
    for rule, key, name in _active_rules(decoder.config, parameters):
        targets[key] = _target(rule, parameters[name], decoder.config, tp)
    return targets


def ignored_keys(config: ModelConfig) -> set[str]:
    """Keys that may be there and are not read."""
    return {
        key
        for entry in WEIGHTS[config.architecture]
        if isinstance(entry, Ignore)
        for key, _ in _layers(entry.checkpoint_name, "", config)
    }


def _active_rules(config: ModelConfig, parameters: Mapping[str, Tensor]) -> Iterator[tuple[Rule, str, str]]:
    """(rule, checkpoint key, parameter name) for every rule whose parameter exists, all layers."""
    for entry in WEIGHTS[config.architecture]:
        if isinstance(entry, Rule):
            for key, name in _layers(entry.checkpoint_name, entry.parameter, config):
                if name in parameters:
                    yield entry, key, name


def _layers(key: str, name: str, config: ModelConfig) -> Iterator[tuple[str, str]]:
    for layer in range(config.num_layers) if "{layer}" in key else (0,):
        yield key.format(layer=layer), name.format(layer=layer)


def _target(rule: Rule, parameter: Tensor, config: ModelConfig, tp: TP) -> Target:
    dim = 1 if rule.shard is Shard.ROW else 0
    total, take = _split(rule, parameter, config, tp)
    offset = sum(_part_rows(part, config, tp).length for part in _parts_before(rule.part))
    shape = list(parameter.shape)
    shape[dim] = total
    return Target(tuple(shape), dim, take, parameter.narrow(dim, offset, take.length))


def _split(rule: Rule, parameter: Tensor, config: ModelConfig, tp: TP) -> tuple[int, Span]:
    """Size of the whole tensor along its sharded dimension, and this rank's part of it."""
    if rule.shard is Shard.VOCAB:
        return config.vocab_size, vocab_span(config.vocab_size, tp)
    if rule.shard is Shard.REPLICATED:
        return parameter.shape[0], Span(0, parameter.shape[0])
    if rule.part is not None:
        return _part_total(rule.part, config), _part_rows(rule.part, config, tp)
    local = parameter.shape[1 if rule.shard is Shard.ROW else 0]
    return local * tp.size, Span(tp.rank * local, local)


def _parts_before(part: Part | None) -> tuple[Part, ...]:
    for group in FUSED:
        if part in group:
            return group[: group.index(part)]
    return ()


def _part_total(part: Part, config: ModelConfig) -> int:
    """Rows of a fused part in the whole model."""
    if part is Part.Q:
        return config.num_heads * config.head_dim
    if part in (Part.K, Part.V):
        return config.num_kv_heads * config.head_dim
    return config.intermediate_size


def _part_rows(part: Part, config: ModelConfig, tp: TP) -> Span:
    """Rows of a fused part on this rank."""
    if part is Part.Q:
        heads = even_span(config.num_heads, tp, "attention heads")
    elif part in (Part.K, Part.V):
        heads = kv_head_span(config.num_kv_heads, tp)
    else:
        return even_span(config.intermediate_size, tp, "intermediate features")
    return Span(heads.start * config.head_dim, heads.length * config.head_dim)


# -- files


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


def _checkpoint_files(folder: Path) -> list[Path]:
    """model.safetensors, or the files that the index names, all of which must exist."""
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if not index.exists():
        if not single.exists():
            raise ModelLoadError(
                f"{folder}: neither {single.name} nor {index.name} is there; only safetensors checkpoints can be loaded"
            )
        return [single]
    try:
        names = sorted(set(msgspec.json.decode(index.read_bytes(), type=_Index).weight_map.values()))
    except msgspec.MsgspecError as error:
        raise ModelLoadError(f"{index}: {error}") from None
    absent = [name for name in names if not (folder / name).exists()]
    if absent:
        raise ModelLoadError(f"{index}: names {_some(absent)}, which the folder lacks; is the download complete?")
    return [folder / name for name in names]


def _load_file(file: Path, targets: dict[str, Target], ignored: set[str], filled: dict[str, Path]) -> Iterator[str]:
    """Fill what this file holds; yields each key when it is done. `filled`: keys of this and earlier files, kept by the caller."""
    key = "the header"
    try:
        with safe_open(file, framework="pt") as tensors:
            keys = [key for key in tensors.keys() if key not in ignored or key in targets]  # noqa: SIM118 (no mapping)
            foreign = [key for key in keys if key not in targets]
            if foreign:
                raise ModelLoadError(f"{file}: {_some(foreign)} has no place in the model that config.json describes")
            for key in keys:
                if key in filled:
                    raise ModelLoadError(f"{file}: {key} is also in {filled[key].name}; remove one of them")
                _fill(targets[key], tensors.get_slice(key), file, key)
                yield key
    except (SafetensorError, OSError) as error:
        raise ModelLoadError(f"{file}: {key} cannot be read ({error}); fetch the file again") from None


def _fill(target: Target, tensor: Any, file: Path, key: str) -> None:
    """`tensor`: a safetensors slice, which reads when it is indexed."""
    shape, kind = tuple(tensor.get_shape()), tensor.get_dtype()
    if shape != target.shape:
        raise ModelLoadError(f"{file}: {key} has shape {shape}, config.json asks for {target.shape}")
    if kind not in FLOAT_TYPES:
        raise ModelLoadError(f"{file}: {key} has type {kind}, supported are {', '.join(FLOAT_TYPES)}")
    start, stop = target.take.start, target.take.start + target.take.length
    target.destination.copy_(tensor[start:stop] if target.dim == 0 else tensor[:, start:stop])


def _some(names: list[str]) -> str:
    """The first few, and how many more."""
    shown = ", ".join(names[:5])
    return shown if len(names) <= 5 else f"{shown} and {len(names) - 5} more"
