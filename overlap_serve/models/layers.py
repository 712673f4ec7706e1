"""Building blocks of the decoder: projections, norm, rotary embedding, vocabulary.

They hold parameters and do arithmetic; what else they need arrives as an argument. Few and large operators, because on a CPU
a small operator costs more in dispatch than in arithmetic. Parameters are allocated and left unset; `weights` fills them.
T tokens, B rows, D hidden, V vocab, N query heads, K kv heads, H head dim, P positions, F features, X any rows.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from overlap_serve.models.families import LinearRope, Llama3Rope, ModelConfig, RopeScaling
from overlap_serve.models.tp import TP, vocab_rows, vocab_span


def new_parameter(*shape: int, dtype: torch.dtype, device: torch.device) -> nn.Parameter:
    """An unset tensor, known to nn.Module by name."""
    return nn.Parameter(torch.empty(*shape, dtype=dtype, device=device), requires_grad=False)


class Linear(nn.Module):
    """x_XF @ weight^T + bias. Unlike nn.Linear it spends no time on initial values."""

    def __init__(self, num_in: int, num_out: int, *, bias: bool, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.weight = new_parameter(num_out, num_in, dtype=dtype, device=device)
        self.bias = new_parameter(num_out, dtype=dtype, device=device) if bias else None

    def forward(self, x_XF: Tensor) -> Tensor:
        return functional.linear(x_XF, self.weight, self.bias)


class RowLinear(Linear):
    """Input features divided over the ranks: partial products are summed, then the bias is added once."""

    def __init__(
        self, num_in: int, num_out: int, tp: TP, *, bias: bool, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__(num_in, num_out, bias=bias, dtype=dtype, device=device)
        self.tp = tp

    def forward(self, x_XF: Tensor) -> Tensor:
        if self.tp.size == 1:
            return super().forward(x_XF)
        y_XF = self.tp.all_reduce(functional.linear(x_XF, self.weight))
        return y_XF if self.bias is None else y_XF.add_(self.bias)


class RMSNorm(nn.Module):
    """arXiv:1910.07467. Normalized in float32, cast, then scaled: the rounding points of transformers' LlamaRMSNorm."""

    def __init__(self, size: int, eps: float, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.weight = new_parameter(size, dtype=dtype, device=device)
        self.eps = eps

    def forward(self, x_XD: Tensor) -> Tensor:
        normed_XD = functional.rms_norm(x_XD.float(), self.weight.shape, eps=self.eps)
        return normed_XD.to(x_XD.dtype).mul_(self.weight)


class VocabEmbedding(nn.Module):
    """Rows of the vocabulary, divided over the ranks. Also the output head, where embedding and head are tied."""

    def __init__(self, vocab_size: int, size: int, tp: TP, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.weight = new_parameter(vocab_rows(vocab_size, tp), size, dtype=dtype, device=device)
        self.weight[vocab_span(vocab_size, tp).length :].zero_()  # the last ranks' padding
        self.vocab_size = vocab_size
        self.tp = tp

    def forward(self, tokens_T: Tensor) -> Tensor:
        """-> x_TD, a tensor of its own."""
        if self.tp.size == 1:
            return functional.embedding(tokens_T, self.weight)
        start, length = vocab_span(self.vocab_size, self.tp)
        local_T = tokens_T - start
        elsewhere_T = (local_T < 0) | (local_T >= length)
        x_TD = functional.embedding(local_T.masked_fill(elsewhere_T, 0), self.weight)
        return self.tp.all_reduce(x_TD.masked_fill_(elsewhere_T[:, None], 0))

    def logits(self, hidden_BD: Tensor) -> Tensor:
        """-> logits_BV in float32, the whole vocabulary on every rank."""
        logits_BV = self.tp.all_gather(functional.linear(hidden_BD, self.weight))
        return logits_BV[:, : self.vocab_size].float()


def rope_frequencies(head_dim: int, theta: float, scaling: RopeScaling | None) -> Tensor:
    """Angle per position of each of the H/2 pairs, float32 (arXiv:2104.09864), scaled as transformers' modeling_rope_utils does."""
    inv_freq_H = 1.0 / (theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim))
    if isinstance(scaling, LinearRope):
        return inv_freq_H / scaling.factor
    if isinstance(scaling, Llama3Rope):
        return _llama3_frequencies(inv_freq_H, scaling)
    return inv_freq_H


def _llama3_frequencies(inv_freq_H: Tensor, scaling: Llama3Rope) -> Tensor:
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    wavelength_H = 2 * math.pi / inv_freq_H
    turns_H = scaling.original_max_position_embeddings / wavelength_H  # over the original context
    ramp_H = (turns_H - low) / (high - low)
    blended_H = (1 - ramp_H) * inv_freq_H / scaling.factor + ramp_H * inv_freq_H
    scaled_H = torch.where(turns_H < low, inv_freq_H / scaling.factor, inv_freq_H)
    return torch.where((turns_H >= low) & (turns_H <= high), blended_H, scaled_H)


class Rope(nn.Module):
    """Rotary embedding from a float32 table of P positions, 4 * P * H bytes. Halves are rotated against each other (Hugging
    Face order), not neighbouring pairs."""

    table_PH: Tensor

    def __init__(self, config: ModelConfig, *, device: torch.device) -> None:
        super().__init__()
        inv_freq_H = rope_frequencies(config.head_dim, config.rope_theta, config.rope_scaling)
        angles_PH = torch.arange(config.max_position_embeddings, dtype=torch.float32)[:, None] * inv_freq_H
        table_PH = torch.cat((angles_PH.cos(), angles_PH.sin()), dim=-1).to(device)
        self.register_buffer("table_PH", table_PH, persistent=False)

    def at(self, positions_T: Tensor) -> tuple[Tensor, Tensor]:
        """(cos_T1H, sin_T1H) of a step, for all its layers; sin carries the sign of the rotation."""
        cos_TH, sin_TH = self.table_PH[positions_T, None].chunk(2, dim=-1)
        return torch.cat((cos_TH, cos_TH), dim=-1), torch.cat((-sin_TH, sin_TH), dim=-1)


def rotate(x_TNH: Tensor, cos_T1H: Tensor, sin_T1H: Tensor) -> Tensor:
    """Rotary embedding of queries or keys, computed in float32. -> a new tensor of the same dtype."""
    x32_TNH = x_TNH.float()
    swapped_TNH = x32_TNH.roll(x_TNH.shape[-1] // 2, dims=-1)
    return torch.addcmul(x32_TNH * cos_T1H, swapped_TNH, sin_T1H).to(x_TNH.dtype)
