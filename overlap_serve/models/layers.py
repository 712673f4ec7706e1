"""Building blocks of the decoder: projections, norm, rotary embedding, vocabulary.

They hold parameters and do arithmetic; what else they need arrives as an argument. Few and large operators, because on a CPU
a small operator costs more in dispatch than in arithmetic. Parameters are allocated and left unset; `weights` fills them.
T tokens, B rows, D hidden, V vocab, N query heads, K kv heads, H head dim, R rotated dims of a head, P positions, F features,
X any rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

from overlap_serve.models.families import DynamicRope, LinearRope, Llama3Rope, LongRope, RopeScaling, YarnRope
from overlap_serve.models.packed import PackedWeight
from overlap_serve.models.tp import TP, vocab_rows, vocab_span


def new_parameter(*shape: int, dtype: torch.dtype, device: torch.device) -> nn.Parameter:
    """An unset tensor, known to nn.Module by name."""
    return nn.Parameter(torch.empty(*shape, dtype=dtype, device=device), requires_grad=False)


class Linear(nn.Module):
    """x_XF @ weight^T + bias. Unlike nn.Linear it spends no time on initial values. After `pack` there is no plain weight."""

    def __init__(self, num_in: int, num_out: int, *, bias: bool, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.weight = new_parameter(num_out, num_in, dtype=dtype, device=device)
        self.bias = new_parameter(num_out, dtype=dtype, device=device) if bias else None
        self.packed: PackedWeight | None = None

    def pack(self) -> None:
        """Replace the weight, which is loaded, by a packed one."""
        self.packed = PackedWeight(self.weight)
        del self.weight

    def forward(self, x_XF: Tensor) -> Tensor:
        return self.product(x_XF, self.bias)

    def product(self, x_XF: Tensor, bias: Tensor | None) -> Tensor:
        return functional.linear(x_XF, self.weight, bias) if self.packed is None else self.packed.linear(x_XF, bias)


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
        y_XF = self.tp.all_reduce(self.product(x_XF, None))
        return y_XF if self.bias is None else y_XF.add_(self.bias)


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_pytorch_tanh": partial(functional.gelu, approximate="tanh"),
}


def soft_cap(x: Tensor, cap: float) -> Tensor:
    """Smoothly into (-cap, cap), in place (arXiv:2408.00118 section 2)."""
    return x.div_(cap).tanh_().mul_(cap)


class RMSNorm(nn.Module):
    """arXiv:1910.07467. Normalized in float32; the rounding points are those of transformers.

    offset: added to the weight (Gemma). cast_last: scaled in float32, then cast (Gemma, OLMo 2); else the reverse (Llama).
    """

    def __init__(
        self,
        size: int,
        eps: float,
        *,
        offset: float = 0.0,
        cast_last: bool = False,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.weight = new_parameter(size, dtype=dtype, device=device)
        self.eps = eps
        self.eps_on_cpu = torch.tensor(eps)
        self.offset = offset
        self.cast_last = cast_last

    def forward(self, x_XD: Tensor) -> Tensor:
        return self.scale(self.normalize(x_XD), x_XD.dtype)

    def normalize(self, x_XD: Tensor) -> Tensor:
        """x over its root mean square in the last dimension. -> a new tensor in float32.

        torch has a kernel for it on GPUs only: on a CPU its function is seven operators with temporaries as large as x, these are four.
        """
        size = x_XD.shape[-1]
        if x_XD.device.type != "cpu":
            return functional.rms_norm(x_XD.float(), (size,), eps=self.eps)
        x32_XD = x_XD.to(torch.float32, copy=True)
        norm_X1 = torch.linalg.vector_norm(x32_XD, dim=-1, keepdim=True)
        return x32_XD.mul_(torch.addcmul(self.eps_on_cpu, norm_X1, norm_X1, value=1 / size).rsqrt_())

    def scale(self, normed_XD: Tensor, dtype: torch.dtype) -> Tensor:
        """normed_XD: float32, may be overwritten."""
        if self.cast_last:
            return normed_XD.mul_(self.weight.float() + self.offset).to(dtype)
        return normed_XD.to(dtype).mul_(self.weight)


class HeadNorm(nn.Module):
    """RMS norm over each head, one weight for all query heads and one for all kv heads."""

    def __init__(
        self,
        num_heads: int,
        head_dim: int,
        eps: float,
        *,
        offset: float,
        cast_last: bool,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.q_norm, self.k_norm = (
            RMSNorm(head_dim, eps, offset=offset, cast_last=cast_last, dtype=dtype, device=device) for _ in range(2)
        )

    def forward(self, qk_TNH: Tensor) -> Tensor:
        """qk_TNH: the query heads, then the kv heads. -> a new tensor."""
        normed_TNH = self.q_norm.normalize(qk_TNH)
        q_TNH = self.q_norm.scale(normed_TNH[:, : self.num_heads], qk_TNH.dtype)
        k_TKH = self.k_norm.scale(normed_TNH[:, self.num_heads :], qk_TNH.dtype)
        return torch.cat((q_TNH, k_TKH), dim=1)


class ProjectionNorm(nn.Module):
    """RMS norm over all query heads of a token, and another over all kv heads (OLMo 2, arXiv:2501.00656). weight: the rows of q,
    then of k. Heads are divided over the ranks, so the mean squares are summed; copies of kv heads do not change the mean."""

    def __init__(
        self,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        eps: float,
        tp: TP,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.weight = new_parameter((num_heads + num_kv_heads) * head_dim, dtype=dtype, device=device)
        self.heads = (num_heads, num_kv_heads)
        self.head_dim = head_dim
        self.eps = eps
        self.tp = tp

    def forward(self, qk_TNH: Tensor) -> Tensor:
        """qk_TNH: the query heads, then the kv heads. -> a new tensor."""
        qk32_TNH = qk_TNH.float()
        squares_TN = qk32_TNH.square().mean(dim=2)
        num_heads = self.heads[0]
        means_T2 = torch.stack((squares_TN[:, :num_heads].mean(dim=1), squares_TN[:, num_heads:].mean(dim=1)), dim=1)
        means_T2 = self.tp.all_reduce(means_T2) / self.tp.size
        factor_T2 = torch.rsqrt(means_T2 + self.eps)
        factor_TN = torch.cat([factor_T2[:, i, None].expand(-1, count) for i, count in enumerate(self.heads)], dim=1)
        weight_NH = self.weight.view(-1, self.head_dim)
        return (qk32_TNH * factor_TN[:, :, None] * weight_NH).to(qk_TNH.dtype)


class VocabEmbedding(nn.Module):
    """Rows of the vocabulary, divided over the ranks. Also the output head, where embedding and head are tied."""

    def __init__(self, vocab_size: int, size: int, tp: TP, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.weight = new_parameter(vocab_rows(vocab_size, tp), size, dtype=dtype, device=device)
        self.weight[vocab_span(vocab_size, tp).length :].zero_()  # the last ranks' padding
        self.vocab_size = vocab_size
        self.tp = tp
        self.packed: PackedWeight | None = None

    def pack(self, *, keep_rows: bool) -> None:
        """Pack the weight for `logits`. keep_rows: `forward` goes on, so the plain weight stays beside the packed one."""
        self.packed = PackedWeight(self.weight)
        if not keep_rows:
            del self.weight

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
        if self.packed is None:
            local_BV = functional.linear(hidden_BD, self.weight)
        else:
            local_BV = self.packed.linear(hidden_BD, None)
        logits_BV = self.tp.all_gather(local_BV)
        return logits_BV[:, : self.vocab_size].float()


def rope_frequencies(
    rotary_dim: int, theta: float, scaling: RopeScaling | None, max_model_len: int
) -> tuple[Tensor, float]:
    """Angle per position of each of the R/2 pairs, float32 (arXiv:2104.09864), and a factor for cosine and sine.

    Scaled as transformers' modeling_rope_utils does for a sequence of max_model_len tokens. Where that depends on the length
    (dynamic, longrope) transformers changes its mind while a sequence grows, and its cached keys then carry old angles. A cache
    shared by requests of all lengths allows one choice only, so it is made once, for the longest request that is served.
    """
    inv_freq_R = 1.0 / (theta ** (torch.arange(0, rotary_dim, 2, dtype=torch.float32) / rotary_dim))
    if isinstance(scaling, LinearRope):
        return inv_freq_R / scaling.factor, 1.0
    if isinstance(scaling, Llama3Rope):
        return _llama3_frequencies(inv_freq_R, scaling), 1.0
    if isinstance(scaling, DynamicRope):
        longer = _dynamic_theta(rotary_dim, theta, scaling, max_model_len)
        return rope_frequencies(rotary_dim, longer, None, max_model_len)
    if isinstance(scaling, YarnRope):
        return _yarn_frequencies(inv_freq_R, rotary_dim, theta, scaling), _yarn_attention_factor(scaling)
    if isinstance(scaling, LongRope):
        long = max_model_len > scaling.original_max_position_embeddings
        factors_R = torch.tensor(scaling.long_factor if long else scaling.short_factor, dtype=torch.float32)
        return inv_freq_R / factors_R, _longrope_attention_factor(scaling)
    return inv_freq_R, 1.0


def _llama3_frequencies(inv_freq_R: Tensor, scaling: Llama3Rope) -> Tensor:
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    wavelength_R = 2 * math.pi / inv_freq_R
    turns_R = scaling.original_max_position_embeddings / wavelength_R  # over the original context
    ramp_R = (turns_R - low) / (high - low)
    blended_R = (1 - ramp_R) * inv_freq_R / scaling.factor + ramp_R * inv_freq_R
    scaled_R = torch.where(turns_R < low, inv_freq_R / scaling.factor, inv_freq_R)
    return torch.where((turns_R >= low) & (turns_R <= high), blended_R, scaled_R)


def _dynamic_theta(rotary_dim: int, theta: float, scaling: DynamicRope, length: int) -> float:
    original = scaling.original_max_position_embeddings
    stretch = scaling.factor * max(length, original) / original - (scaling.factor - 1)
    return theta * math.pow(stretch, rotary_dim / (rotary_dim - 2))


def _yarn_frequencies(inv_freq_R: Tensor, rotary_dim: int, theta: float, scaling: YarnRope) -> Tensor:
    """Pairs that turn more than beta_fast times over the original context are kept, less than beta_slow interpolated."""

    def pair(turns: float) -> float:
        """The pair, as a fraction, that turns so often."""
        wavelengths = scaling.original_max_position_embeddings / (turns * 2 * math.pi)
        return rotary_dim * math.log(wavelengths) / (2 * math.log(theta))

    low, high = pair(scaling.beta_fast), pair(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotary_dim - 1)
    width = high - low if high != low else 0.001
    interpolated_R = ((torch.arange(rotary_dim // 2, dtype=torch.float32) - low) / width).clamp(0, 1)
    return inv_freq_R / scaling.factor * interpolated_R + inv_freq_R * (1 - interpolated_R)


def _yarn_attention_factor(scaling: YarnRope) -> float:
    def mscale(weight: float) -> float:
        return 1.0 if scaling.factor <= 1 else 0.1 * weight * math.log(scaling.factor) + 1.0

    if scaling.attention_factor is not None:
        return scaling.attention_factor
    if scaling.mscale and scaling.mscale_all_dim:
        return mscale(scaling.mscale) / mscale(scaling.mscale_all_dim)
    return mscale(1.0)


def _longrope_attention_factor(scaling: LongRope) -> float:
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    if scaling.factor <= 1:
        return 1.0
    return math.sqrt(1 + math.log(scaling.factor) / math.log(scaling.original_max_position_embeddings))


class Rope(nn.Module):
    """Rotary embedding from a float32 table of P = max_model_len positions, 4 * P * R bytes. Halves are rotated against each other
    (Hugging Face order), not neighbouring pairs."""

    table_PR: Tensor

    def __init__(
        self, rotary_dim: int, theta: float, scaling: RopeScaling | None, max_model_len: int, *, device: torch.device
    ) -> None:
        super().__init__()
        inv_freq_R, factor = rope_frequencies(rotary_dim, theta, scaling, max_model_len)
        angles_PR = torch.arange(max_model_len, dtype=torch.float32)[:, None] * inv_freq_R
        table_PR = torch.cat((angles_PR.cos(), angles_PR.sin()), dim=-1).mul_(factor).to(device)
        self.register_buffer("table_PR", table_PR, persistent=False)

    def at(self, positions_T: Tensor) -> tuple[Tensor, Tensor]:
        """(cos_T1R, sin_T1R) of a step, for all its layers; sin carries the sign of the rotation."""
        cos_TR, sin_TR = self.table_PR[positions_T, None].chunk(2, dim=-1)
        return torch.cat((cos_TR, cos_TR), dim=-1), torch.cat((-sin_TR, sin_TR), dim=-1)


def rotate(x_TNH: Tensor, cos_T1R: Tensor, sin_T1R: Tensor) -> Tensor:
    """Rotary embedding of the first R dims of queries or keys, computed in float32. -> a new tensor of the same dtype."""
    rotary_dim = cos_T1R.shape[-1]
    if rotary_dim < x_TNH.shape[-1]:
        return torch.cat((rotate(x_TNH[..., :rotary_dim], cos_T1R, sin_T1R), x_TNH[..., rotary_dim:]), dim=-1)
    x32_TNH = x_TNH.float()
    swapped_TNH = x32_TNH.roll(rotary_dim // 2, dims=-1)
    return (x32_TNH * cos_T1R).addcmul_(swapped_TNH, sin_T1R).to(x_TNH.dtype)
