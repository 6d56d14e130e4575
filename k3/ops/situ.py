"""SiTU, the gated activation of every K3 MLP."""

from __future__ import annotations

import torch
from torch import Tensor

from k3.paths import announce
from k3.precision import at_least_fp32


def situ(gate: Tensor, up: Tensor, situ_beta: float, situ_linear_beta: float, *, backend: str = "auto") -> Tensor:
    """[b*tanh(gate/b)*sigmoid(gate)] * [bl*tanh(up/bl)], at least fp32 inside and cast once (spec c.2).

    gate, up [..., F] in the activation dtype; returns the same. |result| <= situ_beta * situ_linear_beta.
    backend: "torch" (the definition), "triton" (CUDA, one kernel each way) or "auto".
    """
    backend = ("triton" if gate.is_cuda and gate.dtype == torch.bfloat16 else "torch") if backend == "auto" else backend
    if backend not in _BACKENDS:
        raise ValueError(f"SiTU backend={backend!r} is unknown; use one of auto, {', '.join(_BACKENDS)}")
    return _BACKENDS[backend](gate, up, situ_beta, situ_linear_beta)


def _torch(gate: Tensor, up: Tensor, situ_beta: float, situ_linear_beta: float) -> Tensor:
    announce("torch.situ")
    g, u = at_least_fp32(gate), at_least_fp32(up)
    capped_gate = situ_beta * torch.tanh(g / situ_beta) * torch.sigmoid(g)
    return (capped_gate * (situ_linear_beta * torch.tanh(u / situ_linear_beta))).to(gate.dtype)


def _triton(gate: Tensor, up: Tensor, situ_beta: float, situ_linear_beta: float) -> Tensor:
    from k3.ops.triton_situ import situ as fused

    announce("triton.situ")
    return fused(gate, up, beta=situ_beta, linear_beta=situ_linear_beta)


_BACKENDS = {"torch": _torch, "triton": _triton}
