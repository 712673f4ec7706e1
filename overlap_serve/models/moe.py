"""Routed experts in plain torch: tokens sorted by expert, one matrix product for each expert that has tokens.

Every rank holds a share of every expert's features, so the sum over ranks happens once, after the experts. How many tokens each
expert gets must be known on the host: on a CPU that is free, on a GPU it waits for the device in every layer, which kernels for
grouped products will avoid.
T tokens, D hidden, E experts, X chosen experts per token, F features of an expert on this rank, S = T * X.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from overlap_serve.models.families import Experts, ModelConfig
from overlap_serve.models.layers import ACTIVATIONS, Linear, new_parameter
from overlap_serve.models.tp import TP, even_span


class RoutedMLP(nn.Module):
    """Each token goes through the experts that the router rates highest (arXiv:2401.04088). w_gate_up holds, for each expert, the
    rows of gate, then of up."""

    def __init__(
        self, config: ModelConfig, experts: Experts, tp: TP, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        self.experts = experts
        self.tp = tp
        self.activation = ACTIVATIONS[config.activation]
        size = even_span(experts.intermediate_size, tp, "intermediate features of an expert").length
        self.router = Linear(config.hidden_size, experts.num_experts, bias=False, dtype=dtype, device=device)
        self.w_gate_up = new_parameter(experts.num_experts, 2 * size, config.hidden_size, dtype=dtype, device=device)
        self.w_down = new_parameter(experts.num_experts, config.hidden_size, size, dtype=dtype, device=device)

    def forward(self, x_TD: Tensor) -> Tensor:
        weights_TX, chosen_TX = self._route(x_TD)
        order_S = chosen_TX.flatten().argsort(stable=True)
        counts_E = torch.bincount(chosen_TX.flatten(), minlength=self.experts.num_experts).tolist()
        x_SD = x_TD.index_select(0, order_S // self.experts.num_per_token)
        y_SD = torch.empty_like(x_SD)
        begin = 0
        for expert, count in enumerate(counts_E):
            if count:
                rows = slice(begin, begin + count)
                y_SD[rows] = self._expert(expert, x_SD[rows])
                begin += count
        # Back to token order and summed there: the order of a token's sum does not depend on its neighbours.
        y_TXD = torch.empty_like(y_SD).index_copy_(0, order_S, y_SD).view(*chosen_TX.shape, -1)
        out_TD = (y_TXD * weights_TX[:, :, None]).sum(dim=1).to(x_TD.dtype)
        return self.tp.all_reduce(out_TD)

    def _route(self, x_TD: Tensor) -> tuple[Tensor, Tensor]:
        """-> weights_TX in float32, chosen_TX. All ranks choose the same: router and x are whole on each."""
        ratings_TE = self.router(x_TD).float().softmax(dim=-1)
        weights_TX, chosen_TX = ratings_TE.topk(self.experts.num_per_token, dim=-1)
        if self.experts.normalize:
            weights_TX = weights_TX / weights_TX.sum(dim=-1, keepdim=True)
        return weights_TX, chosen_TX

    def _expert(self, expert: int, x_XD: Tensor) -> Tensor:
        gate_XF, up_XF = functional.linear(x_XD, self.w_gate_up[expert]).chunk(2, dim=-1)
        return functional.linear(self.activation(gate_XF).mul_(up_XF), self.w_down[expert])
