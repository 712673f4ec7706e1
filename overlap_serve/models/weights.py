"""Fills a decoder from safetensors files, or with random numbers.

Owns the way from a checkpoint key to the rows and columns of one rank's parameter; which key goes where is the table in
`families`. One idea: the table is expanded to the exact set of expected keys before anything is read, so that a missing, a
foreign or a doubled key is an error with its name, never a silently random tensor.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from tqdm import tqdm

from overlap_serve.errors import ModelLoadError
from overlap_serve.models.decoder import Decoder
from overlap_serve.models.families import FUSED, WEIGHTS, Ignore, ModelConfig, Part, Rule, Shard, Table, read_config
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
    max_model_len: int | None = None,
    seed: int = 0,
    progress: bool = False,
) -> Decoder:
    """This rank's decoder, ready to run. max_model_len: longest request, by default what the model can. `seed` is for load_format
    dummy. Raises ModelLoadError that names file and key."""
    decoder = Decoder(read_config(folder), tp, dtype=dtype, device=device, max_model_len=max_model_len)
    if load_format == "dummy":
        dummy_weights(decoder, seed)
    else:
        load_weights(decoder, folder, tp, progress=progress)
    return decoder.eval()


@torch.inference_mode()
def dummy_weights(decoder: Decoder, seed: int) -> None:
    """Small normal numbers, the same for the same seed, dtype and kind of device; norms multiply by one."""
    generator = torch.Generator(next(decoder.parameters()).device).manual_seed(seed)
    for name, parameter in decoder.named_parameters():
        if name.endswith("norm.weight"):
            parameter.fill_(1.0 - decoder.config.norm_offset)
        else:
            parameter.normal_(0.0, DUMMY_STD, generator=generator)


@torch.inference_mode()
def load_weights(decoder: Decoder, folder: Path, tp: TP, progress: bool = False) -> None:
    """Read this rank's part of every tensor of `folder` into the parameters, cast to their dtype.

    Peak memory beyond the parameters: one tensor's part on the host (on a device: that, cast, once more). Files are mapped and
    only the rows and columns that this rank keeps are read. Raises ModelLoadError that names file and key.
    """
    files = _checkpoint_files(folder)
    table = _table_of(decoder, files)
    targets = expand(decoder, tp, table)
    ignored = Ignored(table, decoder.config)
    filled: dict[str, Path] = {}
    with tqdm(total=len(targets), desc="loading weights", unit="tensor", disable=not progress) as bar:
        for file in files:
            for key in _load_file(file, targets, ignored, filled):
                filled[key] = file
                bar.update()
    missing = [key for key in targets if key not in filled]
    if missing:
        raise ModelLoadError(f"{folder}: the checkpoint lacks {_some(missing)}; is the download complete?")


# -- the table, expanded for one decoder and one rank


@dataclass(frozen=True)
class Piece:
    """[take] along the target's `dim` of the file's tensor becomes `destination`, a view of a parameter."""

    take: Span
    destination: Tensor


@dataclass(frozen=True)
class Target:
    """Where one checkpoint tensor goes. shape: of the whole tensor in the file."""

    shape: tuple[int, ...]
    dim: int
    pieces: tuple[Piece, ...]


def expand(decoder: Decoder, tp: TP, table: Table) -> dict[str, Target]:
    """Every key that the checkpoint must hold, with its place on this rank."""
    parameters = dict(decoder.named_parameters())
    return {
        place.key: _target(place, parameters[place.parameter], decoder.config, tp)
        for place in _active(decoder.config, table, set(parameters))
    }


class Ignored:
    """Keys that may be there and are not read."""

    def __init__(self, table: Table, config: ModelConfig) -> None:
        names = [entry.checkpoint_name for entry in table if isinstance(entry, Ignore)]
        self._prefixes = tuple(name[:-1] for name in names if name.endswith("*"))
        self._keys = {
            name.format(layer=layer) for name in names if not name.endswith("*") for layer in _layers(name, config)
        }

    def __contains__(self, key: str) -> bool:
        return key in self._keys or key.startswith(self._prefixes)


@dataclass(frozen=True)
class _Place:
    """A rule for one layer and expert. expert: index into the parameter, None if the tensor is for all experts or no expert."""

    rule: Rule
    key: str
    parameter: str
    expert: int | None


def _active(config: ModelConfig, table: Table, parameters: set[str]) -> Iterator[_Place]:
    """Every rule whose parameter exists, for all layers and experts."""
    for rule in table:
        if not isinstance(rule, Rule):
            continue
        for layer in _layers(rule.checkpoint_name, config):
            name = rule.parameter.format(layer=layer)
            if name in parameters:
                for expert in _experts(rule.checkpoint_name, config):
                    key = rule.checkpoint_name.format(layer=layer, expert=expert)
                    yield _Place(rule, key, name, expert)


def _layers(name: str, config: ModelConfig) -> Iterable[int]:
    return range(config.num_layers) if "{layer}" in name else (0,)


def _experts(name: str, config: ModelConfig) -> Iterable[int | None]:
    if "{expert}" not in name:
        return (None,)
    return range(config.experts.num_experts) if config.experts is not None else ()


def _target(place: _Place, parameter: Tensor, config: ModelConfig, tp: TP) -> Target:
    rule, is_expert = place.rule, parameter.dim() == 3
    if place.expert is not None:
        parameter = parameter[place.expert]
    dim = (1 if rule.shard is Shard.ROW else 0) + (parameter.dim() == 3)
    if rule.parts:
        total, pieces = _fused_pieces(rule.parts, parameter, dim, is_expert, config, tp)
    else:
        total, take = _split(rule.shard, parameter.shape[dim], config, tp)
        pieces = (Piece(take, parameter.narrow(dim, 0, take.length)),)
    shape = list(parameter.shape)
    shape[dim] = total
    return Target(tuple(shape), dim, pieces)


def _split(shard: Shard, local: int, config: ModelConfig, tp: TP) -> tuple[int, Span]:
    """Size of the whole tensor along its sharded dimension, and this rank's part of it."""
    if shard is Shard.VOCAB:
        return config.vocab_size, vocab_span(config.vocab_size, tp)
    if shard is Shard.REPLICATED:
        return local, Span(0, local)
    return local * tp.size, Span(tp.rank * local, local)


def _fused_pieces(
    parts: tuple[Part, ...], parameter: Tensor, dim: int, is_expert: bool, config: ModelConfig, tp: TP
) -> tuple[int, tuple[Piece, ...]]:
    """Size of the whole tensor, and where the share of each of its parts lies in the file and in the parameter."""
    group = next(group for group in FUSED if parts[0] in group)
    sizes = {part: _part_size(part, is_expert, config, tp) for part in group}
    pieces, total = [], 0
    for part in parts:
        rows, span = sizes[part]
        offset = sum(sizes[before].span.length for before in group[: group.index(part)])
        pieces.append(Piece(Span(total + span.start, span.length), parameter.narrow(dim, offset, span.length)))
        total += rows
    return total, tuple(pieces)


class _PartSize(NamedTuple):
    """Rows of a part in the whole model, and those of this rank."""

    total: int
    span: Span


def _part_size(part: Part, is_expert: bool, config: ModelConfig, tp: TP) -> _PartSize:
    if part in (Part.GATE, Part.UP):
        size = config.experts.intermediate_size if is_expert and config.experts else config.intermediate_size
        return _PartSize(size, even_span(size, tp, "intermediate features"))
    if part is Part.Q:
        total, heads = config.num_heads, even_span(config.num_heads, tp, "attention heads")
    else:
        total, heads = config.num_kv_heads, kv_head_span(config.num_kv_heads, tp)
    return _PartSize(total * config.head_dim, Span(heads.start * config.head_dim, heads.length * config.head_dim))


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


def _table_of(decoder: Decoder, files: list[Path]) -> Table:
    """Of the forms in which the family's checkpoints are written, the one of these files."""
    first, *others = WEIGHTS[decoder.config.architecture]
    if not others:
        return first
    keys = {key for file in files for key in _keys(file)}
    parameters = {name for name, _ in decoder.named_parameters()}

    def num_found(table: Table) -> int:
        return sum(place.key in keys for place in _active(decoder.config, table, parameters))

    return max((first, *others), key=num_found)


def _keys(file: Path) -> list[str]:
    try:
        with safe_open(file, framework="pt") as tensors:
            return list(tensors.keys())
    except (SafetensorError, OSError) as error:
        raise ModelLoadError(f"{file}: the header cannot be read ({error}); fetch the file again") from None


def _load_file(file: Path, targets: dict[str, Target], ignored: Ignored, filled: dict[str, Path]) -> Iterator[str]:
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
    for piece in target.pieces:
        start, length = piece.take
        index = (slice(None),) * target.dim + (slice(start, start + length),)
        piece.destination.copy_(tensor[index])


def _some(names: list[str]) -> str:
    """The first few, and how many more."""
    shown = ", ".join(names[:5])
    return shown if len(names) <= 5 else f"{shown} and {len(names) - 5} more"
