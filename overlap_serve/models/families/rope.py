"""Rotary settings of a config.json, in the forms that transformers 4 and 5 write and the aliases of old checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from overlap_serve.errors import ModelLoadError
from overlap_serve.models.families.config import DynamicRope, LinearRope, Llama3Rope, LongRope, RopeScaling, YarnRope
from overlap_serve.models.families.files import convert

SCALINGS: dict[str, type[RopeScaling]] = {
    "linear": LinearRope,
    "dynamic": DynamicRope,
    "llama3": Llama3Rope,
    "yarn": YarnRope,
    "longrope": LongRope,
}


class Rope(msgspec.Struct, frozen=True):
    """partial: the share of a head that is rotated."""

    theta: float
    scaling: RopeScaling | None
    partial: float


def read_rope(
    given: Mapping[str, Any],
    where: str,
    *,
    theta: float,
    partial: float = 1.0,
    max_positions: int,
    aliases: Mapping[str, str] | None = None,
) -> Rope:
    """`given`: rope_parameters (transformers 5) or rope_scaling (before); theta and partial: where it names none.

    aliases: other names of rope types. Raises ModelLoadError that begins with `where`.
    """
    for key, value in given.items():
        if isinstance(value, dict):
            raise ModelLoadError(
                f"{where}.{key} is an object; rotary settings by layer type are not known of this family"
            )
    rope = {key: value for key, value in given.items() if value is not None}
    theta = convert(rope.get("rope_theta", theta), float, f"{where}.rope_theta")
    partial = convert(rope.get("partial_rotary_factor", partial), float, f"{where}.partial_rotary_factor")
    named = str(rope.get("rope_type", rope.get("type", "default")))
    kind = (aliases or {}).get(named, named)
    if kind == "default":
        return Rope(theta, None, partial)
    if kind not in SCALINGS:
        raise ModelLoadError(f"{where}.rope_type is {named!r}, supported are default, {', '.join(SCALINGS)}")
    return Rope(theta, _read_scaling(rope, kind, max_positions, where), partial)


def _read_scaling(rope: Mapping[str, Any], kind: str, max_positions: int, where: str) -> RopeScaling:
    fields: dict[str, Any] = {"original_max_position_embeddings": max_positions, **rope, "rope_type": kind}
    if kind == "dynamic":  # as in transformers: the original length is always max_position_embeddings
        fields["original_max_position_embeddings"] = max_positions
    if kind in ("yarn", "longrope"):
        original = convert(fields["original_max_position_embeddings"], int, f"{where}.original_max_position_embeddings")
        fields.setdefault("factor", max_positions / max(original, 1))
    return convert(fields, SCALINGS[kind], where)


def served_positions(max_positions: int, scaling: RopeScaling | None) -> int:
    """Positions that the model can serve: where config.json states the original length, the scaling stretches it.

    As vLLM derives its longest model length. With linear and llama3 scaling, config.json states the stretched length.
    """
    if isinstance(scaling, DynamicRope | YarnRope):
        return max(max_positions, int(scaling.original_max_position_embeddings * scaling.factor))
    return max_positions
