"""SiTU, the gated activation of every K3 MLP."""

from __future__ import annotations

import torch
from torch import Tensor

from k3.precision import at_least_fp32


def situ(gate: Tensor, up: Tensor, situ_beta: float, situ_linear_beta: float) -> Tensor:
    """[b*tanh(gate/b)*sigmoid(gate)] * [bl*tanh(up/bl)], at least fp32 inside and cast once (spec c.2).

    gate, up [..., F] in the activation dtype; returns the same. |result| <= situ_beta * situ_linear_beta.
    """
    g, u = at_least_fp32(gate), at_least_fp32(up)
    capped_gate = situ_beta * torch.tanh(g / situ_beta) * torch.sigmoid(g)
    return (capped_gate * (situ_linear_beta * torch.tanh(u / situ_linear_beta))).to(gate.dtype)
