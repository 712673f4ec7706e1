"""The decoder-only transformer of all families: tokens in, hidden states and logits out.

Knows no cache, no batch and no scheduler. Everything of a step arrives as an argument; attention is a function that stores
k and v wherever it likes and attends. Families differ in `ModelConfig` only.
T tokens of the step, B rows to sample, D hidden, V vocab, N query heads, K kv heads, H head dim (N and K of this rank).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

from overlap_serve.models.families import ModelConfig
from overlap_serve.models.layers import Linear, RMSNorm, Rope, RowLinear, VocabEmbedding, rotate
from overlap_serve.models.tp import TP, even_span, kv_head_span

# attend(layer, q_TNH, k_TKH, v_TKH) -> out_TNH. The same type as attention.base.Attend: the packages are siblings.
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]


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
        self.wo = RowLinear(
            self.num_heads * config.head_dim,
            config.hidden_size,
            tp,
            bias=config.attention_out_bias,
            dtype=dtype,
            device=device,
        )

    def forward(self, x_TD: Tensor, cos_T1H: Tensor, sin_T1H: Tensor, attend: Attend) -> Tensor:
        num_tokens, n, k = len(x_TD), self.num_heads, self.num_kv_heads
        qkv_TNH = self.wqkv(x_TD).view(num_tokens, n + 2 * k, self.head_dim)
        qk_TNH = rotate(qkv_TNH[:, : n + k], cos_T1H, sin_T1H)  # q and k in one go
        out_TNH = attend(self.layer, qk_TNH[:, :n], qk_TNH[:, n:], qkv_TNH[:, n + k :])
        out_TD: Tensor = self.wo(out_TNH.reshape(num_tokens, n * self.head_dim))
        return out_TD


class MLP(nn.Module):
    """SwiGLU (arXiv:2002.05202). w_gate_up holds the rows of gate, then of up."""

    def __init__(self, config: ModelConfig, tp: TP, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        size = even_span(config.intermediate_size, tp, "intermediate features").length
        self.w_gate_up = Linear(config.hidden_size, 2 * size, bias=config.mlp_bias, dtype=dtype, device=device)
        self.w_down = RowLinear(size, config.hidden_size, tp, bias=config.mlp_bias, dtype=dtype, device=device)

    def forward(self, x_TD: Tensor) -> Tensor:
        gate_TF, up_TF = self.w_gate_up(x_TD).chunk(2, dim=-1)
        out_TD: Tensor = self.w_down(functional.silu(gate_TF).mul_(up_TF))
        return out_TD


class Layer(nn.Module):
    """Attention and MLP, each with its norm before it and the residual around it."""

    def __init__(self, layer: int, config: ModelConfig, tp: TP, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype=dtype, device=device)
        self.attention = Attention(layer, config, tp, dtype=dtype, device=device)
        self.mlp_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype=dtype, device=device)
        self.mlp = MLP(config, tp, dtype=dtype, device=device)

    def forward(self, x_TD: Tensor, cos_T1H: Tensor, sin_T1H: Tensor, attend: Attend) -> Tensor:
        # In place: x is ours from the embedding on, and the norms return tensors of their own.
        x_TD = x_TD.add_(self.attention(self.attention_norm(x_TD), cos_T1H, sin_T1H, attend))
        return x_TD.add_(self.mlp(self.mlp_norm(x_TD)))


class Decoder(nn.Module):
    """One rank's part of a model. Made with unset parameters; `weights.build_decoder` makes a filled one.

    num_heads, num_kv_heads: of this rank. `config` describes the whole model.
    """

    def __init__(self, config: ModelConfig, tp: TP, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.config = config
        self.num_heads = even_span(config.num_heads, tp, "attention heads").length
        self.num_kv_heads = kv_head_span(config.num_kv_heads, tp).length
        self.embed = VocabEmbedding(config.vocab_size, config.hidden_size, tp, dtype=dtype, device=device)
        self.rope = Rope(config, device=device)
        self.layers = nn.ModuleList(
            Layer(layer, config, tp, dtype=dtype, device=device) for layer in range(config.num_layers)
        )
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype=dtype, device=device)
        if not config.tie_word_embeddings:
            self.head = VocabEmbedding(config.vocab_size, config.hidden_size, tp, dtype=dtype, device=device)

    def forward(self, tokens_T: Tensor, positions_T: Tensor, attend: Attend) -> Tensor:
        """-> hidden_TD, after the last norm. Tokens and positions are int32 or int64; each position is below
        max_position_embeddings. `attend` is called once a layer, in order; k and v may be views of a larger tensor."""
        cos_T1H, sin_T1H = self.rope.at(positions_T)
        x_TD = self.embed(tokens_T)
        for layer in self.layers:
            x_TD = layer(x_TD, cos_T1H, sin_T1H, attend)
        hidden_TD: Tensor = self.norm(x_TD)
        return hidden_TD

    def logits(self, hidden_BD: Tensor) -> Tensor:
        """-> logits_BV in float32. Pass only the rows that are sampled: V is large."""
        head = self.embed if self.config.tie_word_embeddings else self.head
        return head.logits(hidden_BD)
