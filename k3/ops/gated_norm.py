"""KDA's output norm: RMS norm per head, then the sigmoid gate, in one expression."""

from __future__ import annotations

import torch
from torch import Tensor

from k3.paths import announce
from k3.precision import at_least_fp32


def gated_norm(o: Tensor, gate: Tensor, weight: Tensor, eps: float, *, backend: str = "auto") -> Tensor:
    """cast(o32 * rsqrt(mean(o32^2) + eps) * weight * sigmoid(gate32)), rounded once (spec c.3.7).

    o, gate [B, T, H, V]; weight [V], shared by all heads. backend: "torch" (the definition), "fla" (CUDA) or "auto".
    Returns [B, T, H, V] in gate's dtype.
    """
    fits = o.is_cuda and o.dtype == torch.bfloat16 and o.shape[-1] % 64 == 0
    backend = ("fla" if fits else "torch") if backend == "auto" else backend
    if backend not in _BACKENDS:
        raise ValueError(f"gated norm backend={backend!r} is unknown; use one of auto, {', '.join(_BACKENDS)}")
    return _BACKENDS[backend](o, gate, weight, eps)


def _torch(o: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    announce("torch.gated_norm")
    wide = at_least_fp32(o)
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (normed * weight * at_least_fp32(gate).sigmoid()).to(gate.dtype)


def _fla(o: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    from fla.modules.norm.fused_norm_gate import rms_norm_gated

    announce("fla.rms_norm_gated")
    return rms_norm_gated(o, gate, weight, None, activation="sigmoid", eps=eps)


_BACKENDS = {"torch": _torch, "fla": _fla}
