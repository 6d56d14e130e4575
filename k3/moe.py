"""LatentMoE: the fp32 router, stacked experts on a latent, shared experts. A dispatcher moves the tokens."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from k3.layers import MLP, RMSNorm, linear, local
from k3.ops import route
from k3.ops.grouped_mm import grouped_mm
from k3.ops.situ import situ
from k3.precision import PinnedFloat32, at_least_fp32, wide_dtype, without_autocast


class Router(PinnedFloat32):
    """Sigmoid scores, biased selection, renormalised weights, at least fp32 throughout (spec c.5)."""

    pinned = ("e_score_correction_bias",)

    def __init__(self, config, *, device=None, dtype=None):
        super().__init__()
        E = config.num_experts
        self.top_k, self.scaling = config.num_experts_per_token, config.routed_scaling_factor
        self.num_groups, self.top_groups = config.num_expert_group, config.topk_group
        self.weight = nn.Parameter(torch.empty(E, config.hidden_size, device=device, dtype=dtype))
        bias = torch.zeros(E, device=device, dtype=wide_dtype(dtype))
        self.register_buffer("e_score_correction_bias", bias)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x [N, D] -> expert indices [N, k] in no particular order, and their weights [N, k], at least fp32."""
        scores = router_scores(x, local(self, "weight"))  # [N, E]
        idx = self.select(scores)
        weight = scores.gather(-1, idx)
        return idx, weight / (weight.sum(-1, keepdim=True) + 1e-20) * self.scaling

    def select(self, scores: Tensor) -> Tensor:
        """Indices [N, k] of the best biased scores; the bias and the choice carry no gradient."""
        biased = scores.detach() + self.e_score_correction_bias
        if self.num_groups > self.top_groups:
            biased = self._best_groups(biased)
        return biased.topk(self.top_k, dim=-1, sorted=False).indices

    def _best_groups(self, biased: Tensor) -> Tensor:
        groups = biased.unflatten(-1, (self.num_groups, -1))  # [N, G, E/G]
        best = groups.topk(2, dim=-1).values.sum(-1).topk(self.top_groups, dim=-1).indices
        keep = torch.zeros_like(groups[..., 0], dtype=torch.bool).scatter(-1, best, True)
        return groups.masked_fill(~keep.unsqueeze(-1), float("-inf")).flatten(-2)


@without_autocast
def router_scores(x: Tensor, weight: Tensor) -> Tensor:
    """sigmoid(x32 weight32^T): both factors are cast up before the product; x [N, D], weight [E, D] -> [N, E]."""
    return F.linear(at_least_fp32(x), at_least_fp32(weight)).sigmoid()


class StackedExperts(nn.Module):
    """w2(situ(w1 x, w3 x)) for rows sorted by expert; w1, w3 [E, F, L], w2 [E, L, F]."""

    def __init__(self, config, *, device=None, dtype=None):
        super().__init__()
        E, F_, L = config.num_experts, config.moe_intermediate_size, config.routed_expert_hidden_size
        self.situ_beta, self.situ_linear_beta = config.activation_situ_beta, config.activation_situ_linear_beta
        self.w1, self.w3 = (nn.Parameter(torch.empty(E, F_, L, device=device, dtype=dtype)) for _ in range(2))
        self.w2 = nn.Parameter(torch.empty(E, L, F_, device=device, dtype=dtype))

    def forward(self, x: Tensor, counts: Tensor) -> Tensor:
        """x [M, L], counts [E] rows per expert -> [M, L] in x's dtype."""
        gate = grouped_mm(x, local(self, "w1"), counts)
        up = grouped_mm(x, local(self, "w3"), counts)
        return grouped_mm(situ(gate, up, self.situ_beta, self.situ_linear_beta), local(self, "w2"), counts)


class LocalDispatcher:
    """Every expert is here: sort the rows by expert, run, and combine them at least in fp32."""

    def __call__(self, z: Tensor, idx: Tensor, weight: Tensor, experts: StackedExperts) -> Tensor:
        """z [N, L], idx [N, k], weight [N, k] fp32 -> sum_j weight_j * expert_j(z), [N, L] cast to z's dtype once."""
        order = route.sort_by_expert(idx, local(experts, "w1").shape[0])
        rows = experts(route.spread(z, order), order.counts)  # [N*k, L], by expert
        return route.combine(rows, order, weight)


def combine(rows: Tensor, weight: Tensor) -> Tensor:
    """sum_j weight[n, j] * rows[n, j]: products and sum at least fp32, not cast back; rows [N, k, L]."""
    return (weight.unsqueeze(-1) * at_least_fp32(rows)).sum(1)


class LatentMoE(nn.Module):
    """Routed experts in a latent, one norm on their sum, plus shared experts (spec c.6)."""

    def __init__(self, config, *, device=None, dtype=None):
        super().__init__()
        D, L, factory = config.hidden_size, config.routed_expert_hidden_size, {"device": device, "dtype": dtype}
        self.gate = Router(config, **factory)
        self.experts = StackedExperts(config, **factory)
        self.routed_expert_down_proj = linear(D, L, **factory)
        self.routed_expert_norm = RMSNorm(L, config.rms_norm_eps, **factory)
        self.routed_expert_up_proj = linear(L, D, **factory)
        self.shared_experts = MLP(config, config.num_shared_experts * config.moe_intermediate_size, **factory)
        self.dispatcher = LocalDispatcher()

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, -2)  # [N, D]
        idx, weight = self.gate(tokens)
        z = self.routed_expert_down_proj(tokens)  # [N, L]
        u = self.dispatcher(z, idx, weight, self.experts)  # [N, L]
        y = self.routed_expert_up_proj(self.routed_expert_norm(u))
        return y.view_as(x) + self.shared_experts(x)
