"""The causal depthwise convolution in front of KDA, with silu."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from k3.precision import at_least_fp32


def short_conv(x: Tensor, weight: Tensor, *, history: Tensor | None = None, cu_seqlens: Tensor | None = None) -> Tensor:
    """y[t] = silu(sum_j weight[:, 0, j] * x[t - taps + 1 + j]), sum and silu at least fp32 (spec c.3.2).

    x [B, T, D] in the activation dtype; weight [D, 1, taps]; history [B, taps-1, D]: the inputs before x[:, 0]
    (zeros if None); cu_seqlens [N+1]: no document sees the one before it, the first one sees `history`.
    Returns [B, T, D] in x's dtype.
    """
    taps, T = weight.shape[-1], x.shape[1]
    padded = at_least_fp32(with_history(x, history, taps))
    taps_weight = at_least_fp32(weight[:, 0])
    reach = _tokens_before(cu_seqlens, T, taps)
    total = padded[:, taps - 1 :] * taps_weight[:, -1]
    for back in range(1, taps):
        shifted = padded[:, taps - 1 - back : taps - 1 - back + T]
        if reach is not None:
            shifted = shifted * (reach >= back)[:, None]
        total = total + shifted * taps_weight[:, taps - 1 - back]
    return F.silu(total).to(x.dtype)


def with_history(x: Tensor, history: Tensor | None, taps: int) -> Tensor:
    """x with the taps-1 inputs before it: [B, taps-1+T, D]."""
    if history is None:
        history = x.new_zeros(x.shape[0], taps - 1, x.shape[2])
    return torch.cat([history, x], dim=1)


def _tokens_before(cu_seqlens: Tensor | None, T: int, taps: int) -> Tensor | None:
    """For each token, how many tokens it may look back: [T], or None if every token may look back fully."""
    if cu_seqlens is None:
        return None
    positions = torch.arange(T, device=cu_seqlens.device)
    bounds = cu_seqlens.to(positions.dtype)
    document = torch.searchsorted(bounds[1:], positions, right=True)
    return positions - bounds[document] + (taps - 1) * (document == 0)
