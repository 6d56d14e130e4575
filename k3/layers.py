"""The small layers every block is made of, and `local`, the one accessor of directly used parameters."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from k3.ops.gated_norm import gated_norm
from k3.ops.situ import situ
from k3.precision import PinnedFloat32, at_least_fp32, wide_dtype


def local(module: nn.Module, name: str) -> Tensor:
    """The tensor this rank computes with: `module.<name>`, or what `module.placed[name]()` makes of it."""
    placed = getattr(module, "placed", None)
    return placed[name]() if placed and name in placed else getattr(module, name)


def linear(in_features: int, out_features: int, *, device=None, dtype=None) -> nn.Linear:
    """A linear without bias; the K3 text model has no other kind."""
    return nn.Linear(in_features, out_features, bias=False, device=device, dtype=dtype)


class RMSNorm(nn.Module):
    """w * cast(x32 * rsqrt(mean(x32^2) + eps)): statistics at least fp32, cast before the weight (spec c.1)."""

    def __init__(self, dim: int, eps: float, *, device=None, dtype=None):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim, device=device, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        if x.is_cuda:  # one kernel each way; statistics in fp32 inside, cast before the weight like the definition
            return local(self, "weight") * F.rms_norm(x, x.shape[-1:], None, self.eps)
        return local(self, "weight") * rms_normalize(x, self.eps).to(x.dtype)


class GatedRMSNorm(PinnedFloat32):
    """cast(norm(o32) * w * sigmoid(gate32)): one expression at least fp32, rounded once (spec c.3.7)."""

    pinned = ("weight",)

    def __init__(self, dim: int, eps: float, *, device=None, dtype=None):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim, device=device, dtype=wide_dtype(dtype)))

    def forward(self, o: Tensor, gate: Tensor) -> Tensor:
        return gated_norm(o, gate, local(self, "weight"), self.eps)


def rms_normalize(x: Tensor, eps: float) -> Tensor:
    """x * rsqrt(mean(x^2) + eps) over the last axis, at least fp32 and not cast back."""
    x = at_least_fp32(x)
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


class MLP(nn.Module):
    """down(situ(gate(x), up(x))): the dense layer and the fused shared experts (spec c.2)."""

    def __init__(self, config, intermediate_size: int, *, device=None, dtype=None):
        super().__init__()
        hidden, factory = config.hidden_size, {"device": device, "dtype": dtype}
        self.situ_beta = config.activation_situ_beta
        self.situ_linear_beta = config.activation_situ_linear_beta
        self.gate_proj = linear(hidden, intermediate_size, **factory)
        self.up_proj = linear(hidden, intermediate_size, **factory)
        self.down_proj = linear(intermediate_size, hidden, **factory)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(situ(self.gate_proj(x), self.up_proj(x), self.situ_beta, self.situ_linear_beta))
