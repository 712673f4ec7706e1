"""Chooses the attention backend. What a backend cannot do is data (`Limits`), so that a refusal can be explained."""

from __future__ import annotations

from collections.abc import Callable

import torch

from overlap_serve.attention.base import AttentionBackend, AttentionShape, Limits
from overlap_serve.attention.reference import CPU_GROUP_TOKENS, ReferenceAttention
from overlap_serve.errors import ConfigError

GPU_GROUP_TOKENS = 65_536  # a GPU wants few launches; its memory bounds the workspace (K and V of so many tokens)

Build = Callable[[AttentionShape, int, torch.dtype, torch.device], AttentionBackend]


def _reference(shape: AttentionShape, page_size: int, dtype: torch.dtype, device: torch.device) -> AttentionBackend:
    group_tokens = CPU_GROUP_TOKENS if device.type == "cpu" else GPU_GROUP_TOKENS
    return ReferenceAttention(shape, page_size, dtype, group_tokens=group_tokens)


# Best first: "auto" takes the first whose limits allow the model.
BACKENDS: dict[str, tuple[Limits, Build]] = {"reference": (ReferenceAttention.limits, _reference)}


def select(
    name: str, device: torch.device, dtype: torch.dtype, shape: AttentionShape, page_size: int
) -> AttentionBackend:
    """The backend called `name`, or for "auto" the best that fits. Raises ConfigError that says what does not fit and why."""
    if name != "auto" and name not in BACKENDS:
        raise ConfigError(f"attention_backend is {name}, known are auto, {', '.join(BACKENDS)}")
    refusals = []
    for candidate in BACKENDS if name == "auto" else (name,):
        limits, build = BACKENDS[candidate]
        reasons = why_not(limits, device, dtype, shape, page_size)
        if not reasons:
            return build(shape, page_size, dtype, device)
        refusals.append(f"{candidate}: {'; '.join(reasons)}")
    raise ConfigError(f"attention_backend {name} cannot be used: {' | '.join(refusals)}")


def why_not(
    limits: Limits, device: torch.device, dtype: torch.dtype, shape: AttentionShape, page_size: int
) -> list[str]:
    """One reason per limit that is broken, with what is allowed and the field to change; empty if the backend fits."""
    checks: tuple[tuple[str, object, tuple[object, ...]], ...] = (
        ("device", device.type, limits.devices),
        ("dtype", dtype, limits.dtypes),
        ("head_dim of the model", shape.head_dim, limits.head_dims),
        ("page_size", page_size, limits.page_sizes),
    )
    reasons = [
        f"{what} is {given}, it can do {', '.join(str(value) for value in allowed)}"
        for what, given, allowed in checks
        if allowed and given not in allowed
    ]
    if shape.soft_cap is not None and not limits.soft_cap:
        reasons.append("the model caps attention scores, which it cannot do")
    if any(window is not None for window in shape.windows) and not limits.windows:
        reasons.append("the model has sliding windows, which it cannot do")
    return reasons
