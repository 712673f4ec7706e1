"""`PackedWeight`: a matrix in oneDNN's own order of blocks, so that a product need not sort it anew each time.

Owns which weights can be packed and what a product with a packed one is; knows no layer. For x86 CPUs, where it was measured: a
plain bfloat16 product spends about half of a decode step's time on putting the weight in order. The operators are those that
torch.compile's CPU backend packs with; they have no documented home of their own.
"""

from __future__ import annotations

import platform
from collections.abc import Callable

import torch
from torch import Tensor

# oneDNN's bfloat16 kernels read a weight faster for four rows than for one: 16.8 against 21.0 ms for the embedded model's matrices.
LEAST_ROWS = 4


def can_pack(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether this build and this machine have packed products of this type, in hardware."""
    if device.type != "cpu" or platform.machine() not in ("x86_64", "AMD64"):
        return False
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return dtype == torch.float32


class PackedWeight:
    """A copy of weight_FX; the plain one may be dropped. Products are rounded as those with the plain weight, but may sum in another
    order."""

    def __init__(self, weight_FX: Tensor) -> None:
        assert can_pack(weight_FX.dtype, weight_FX.device), f"no packed products of {weight_FX.dtype}"
        self._weight: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight_FX)
        self._least_rows = LEAST_ROWS if weight_FX.dtype == torch.bfloat16 else 1
        self._product: Callable[..., Tensor] = torch.ops.mkldnn._linear_pointwise.default

    def linear(self, x_BX: Tensor, bias_F: Tensor | None) -> Tensor:
        """x_BX @ weight^T + bias -> y_BF"""
        num_rows = len(x_BX)
        copies = self._least_rows // max(1, num_rows)
        if copies > 1:
            x_BX = x_BX.expand(copies, *x_BX.shape).flatten(0, 1)
        y_BF = self._product(x_BX, self._weight, bias_F, "none", [], "")
        return y_BF[:num_rows] if copies > 1 else y_BF
