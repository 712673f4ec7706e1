"""The decoder-only transformer of all families: tokens in, hidden states and logits out.

Knows no cache, no batch and no scheduler. Everything of a step arrives as an argument; attention is a function that stores
k and v wherever it likes and attends; scale, soft cap and windows are its business. Families differ in `ModelConfig` only.
T tokens of the step, B rows to sample, D hidden, V vocab, N query heads, K kv heads, H head dim, R rotated dims of a head (N and
K of this rank).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from overlap_serve.models.families import ModelConfig, RopeScaling
from overlap_serve.models.layers import (
    ACTIVATIONS,
    HeadNorm,
    Linear,
    ProjectionNorm,
    RMSNorm,
    Rope,
    RowLinear,
    VocabEmbedding,
    rotate,
    soft_cap,
)
from overlap_serve.models.moe import RoutedMLP
from overlap_serve.models.tp import TP, even_span, kv_head_span

# attend(layer, q_TNH, k_TKH, v_TKH) -> out_TNH. The same type as attention.base.Attend: the packages are siblings.
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
Angles = tuple[Tensor, Tensor]  # cos_T1R, sin_T1R


class Attention(nn.Module):
    """Grouped-query attention around an `Attend`. wqkv holds the rows of q, k and v, in that order."""

    def __init__(self, layer: int, config: ModelConfig, tp: TP, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.layer = layer
        self.head_dim = config.head_dim
        self.num_heads = even_span(config.num_heads, tp, "attention heads").length
        self.num_kv_heads = kv_head_span(config.num_kv_heads, tp).length
        num_rows = (self.num_heads + 2 * self.num_kv_heads) * config.head_dim
        self.wqkv = Linear(config.hidden_size, num_rows, bias=config.attention_bias, dtype=dtype, device=device)
        self.qk_norm = self._new_qk_norm(config, tp, dtype, device)
        self.wo = RowLinear(
            self.num_heads * config.head_dim,
            config.hidden_size,
            tp,
            bias=config.attention_out_bias,
            dtype=dtype,
            device=device,
        )

    def _new_qk_norm(
        self, config: ModelConfig, tp: TP, dtype: torch.dtype, device: torch.device
    ) -> HeadNorm | ProjectionNorm | None:
        if config.qk_norm == "head":
            return HeadNorm(
                self.num_heads,
                config.head_dim,
                config.rms_norm_eps,
                offset=config.norm_offset,
                cast_last=config.norm_cast_last,
                dtype=dtype,
                device=device,
            )
        if config.qk_norm == "projection":
            return ProjectionNorm(
                self.num_heads,
                self.num_kv_heads,
                config.head_dim,
                config.rms_norm_eps,
                tp,
                dtype=dtype,
                device=device,
            )
        return None

    def forward(self, x_TD: Tensor, angles: Angles, attend: Attend) -> Tensor:
        num_tokens, n, k = len(x_TD), self.num_heads, self.num_kv_heads
        qkv_TNH = self.wqkv(x_TD).view(num_tokens, n + 2 * k, self.head_dim)
        qk_TNH = qkv_TNH[:, : n + k]  # q and k in one go
        if self.qk_norm is not None:
            qk_TNH = self.qk_norm(qk_TNH)
        qk_TNH = rotate(qk_TNH, *angles)
        out_TNH = attend(self.layer, qk_TNH[:, :n], qk_TNH[:, n:], qkv_TNH[:, n + k :])
        out_TD: Tensor = self.wo(out_TNH.reshape(num_tokens, n * self.head_dim))
        return out_TD


class MLP(nn.Module):
    """Gated linear unit (arXiv:2002.05202). w_gate_up holds the rows of gate, then of up."""

    def __init__(self, config: ModelConfig, tp: TP, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        size = even_span(config.intermediate_size, tp, "intermediate features").length
        self.activation = ACTIVATIONS[config.activation]
        self.w_gate_up = Linear(config.hidden_size, 2 * size, bias=config.mlp_bias, dtype=dtype, device=device)
        self.w_down = RowLinear(size, config.hidden_size, tp, bias=config.mlp_bias, dtype=dtype, device=device)

    def forward(self, x_TD: Tensor) -> Tensor:
        gate_TF, up_TF = self.w_gate_up(x_TD).chunk(2, dim=-1)
        out_TD: Tensor = self.w_down(self.activation(gate_TF).mul_(up_TF))
        return out_TD


class Layer(nn.Module):
    """Attention and MLP with the residual around each, and norms before them, after them, or both."""

    def __init__(self, layer: int, config: ModelConfig, tp: TP, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.attention = Attention(layer, config, tp, dtype=dtype, device=device)
        self.mlp: MLP | RoutedMLP
        if config.experts is not None and config.has_experts(layer):
            self.mlp = RoutedMLP(config, config.experts, tp, dtype=dtype, device=device)
        else:
            self.mlp = MLP(config, tp, dtype=dtype, device=device)
        before, after = config.pre_norm, config.post_norm
        self.attention_norm = new_norm(config, dtype, device) if before else None
        self.attention_post_norm = new_norm(config, dtype, device) if after else None
        self.mlp_norm = new_norm(config, dtype, device) if before else None
        self.mlp_post_norm = new_norm(config, dtype, device) if after else None

    def forward(self, x_TD: Tensor, angles: Angles, attend: Attend) -> Tensor:
        # In place: x is ours from the embedding on, and attention and MLP return tensors of their own.
        y_TD = x_TD if self.attention_norm is None else self.attention_norm(x_TD)
        y_TD = self.attention(y_TD, angles, attend)
        x_TD = x_TD.add_(y_TD if self.attention_post_norm is None else self.attention_post_norm(y_TD))
        y_TD = x_TD if self.mlp_norm is None else self.mlp_norm(x_TD)
        y_TD = self.mlp(y_TD)
        return x_TD.add_(y_TD if self.mlp_post_norm is None else self.mlp_post_norm(y_TD))


def new_norm(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> RMSNorm:
    return RMSNorm(
        config.hidden_size,
        config.rms_norm_eps,
        offset=config.norm_offset,
        cast_last=config.norm_cast_last,
        dtype=dtype,
        device=device,
    )


class Decoder(nn.Module):
    """One rank's part of a model. Made with unset parameters; `weights.build_decoder` makes a filled one.

    num_heads, num_kv_heads: of this rank. `config` describes the whole model. max_model_len: longest request that will be served,
    by default what the model can; it decides rotary scalings that depend on the length (see `rope_frequencies`).
    """

    def __init__(
        self,
        config: ModelConfig,
        tp: TP,
        *,
        dtype: torch.dtype,
        device: torch.device,
        max_model_len: int | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        self.num_heads = even_span(config.num_heads, tp, "attention heads").length
        self.num_kv_heads = kv_head_span(config.num_kv_heads, tp).length
        self.embed = VocabEmbedding(config.vocab_size, config.hidden_size, tp, dtype=dtype, device=device)
        self.embedding_scale = torch.tensor(config.embedding_scale, dtype=dtype).item()  # rounded, as in training

        def new_rope(theta: float, scaling: RopeScaling | None) -> Rope:
            length = max_model_len or config.max_position_embeddings
            return Rope(config.rotary_dim or config.head_dim, theta, scaling, length, device=device)

        self.rope = new_rope(config.rope_theta, config.rope_scaling)
        self.local_rope = (
            None if config.local_rope_theta is None else new_rope(config.local_rope_theta, config.local_rope_scaling)
        )
        self.layers = nn.ModuleList(
            Layer(layer, config, tp, dtype=dtype, device=device) for layer in range(config.num_layers)
        )
        self.norm = new_norm(config, dtype, device)
        if not config.tie_word_embeddings:
            self.head = VocabEmbedding(config.vocab_size, config.hidden_size, tp, dtype=dtype, device=device)

    @torch.inference_mode()
    def pack(self) -> None:
        """Once, after the weights are loaded, where `packed.can_pack`: faster products, in the same memory but for a tied embedding,
        which stays beside its packed copy. Experts stay plain."""
        for module in self.modules():
            if isinstance(module, Linear):
                module.pack()
        if self.config.tie_word_embeddings:
            self.embed.pack(keep_rows=True)
        else:
            self.head.pack(keep_rows=False)

    def forward(self, tokens_T: Tensor, positions_T: Tensor, attend: Attend) -> Tensor:
        """-> hidden_TD, after the last norm. Tokens and positions are int32 or int64; each position is below max_model_len.
        `attend` is called once a layer, in order; k and v may be views of a larger tensor."""
        angles = local_angles = self.rope.at(positions_T)
        if self.local_rope is not None:
            local_angles = self.local_rope.at(positions_T)
        x_TD = self.embed(tokens_T)
        if self.embedding_scale != 1.0:
            x_TD.mul_(self.embedding_scale)
        for index, layer in enumerate(self.layers):
            x_TD = layer(x_TD, local_angles if self.config.has_local_rope(index) else angles, attend)
        hidden_TD: Tensor = self.norm(x_TD)
        return hidden_TD

    def logits(self, hidden_BD: Tensor) -> Tensor:
        """-> logits_BV in float32. Pass only the rows that are sampled: V is large."""
        head = self.embed if self.config.tie_word_embeddings else self.head
        logits_BV = head.logits(hidden_BD)
        cap = self.config.logit_soft_cap
        return logits_BV if cap is None else soft_cap(logits_BV, cap)
