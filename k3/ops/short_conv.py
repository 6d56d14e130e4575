"""The causal depthwise convolution in front of KDA, with silu; on a GPU also with the l2 norm that follows it."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from k3.paths import announce
from k3.precision import at_least_fp32

FUSED_TAPS = 4  # the only kernel width the Triton kernel is written for


def short_conv(
    x: Tensor,
    weight: Tensor,
    *,
    history: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    """y[t] = silu(sum_j weight[:, 0, j] * x[t - taps + 1 + j]), sum and silu at least fp32 (spec c.3.2).

    x [B, T, D] in the activation dtype; weight [D, 1, taps]; history [B, taps-1, D]: the inputs before x[:, 0]
    (zeros if None); cu_seqlens [N+1]: no document sees the one before it, the first one sees `history`.
    backend: "torch" (the definition), "triton" (CUDA, 4 taps, no history), "fla" (CUDA) or "auto".
    Returns [B, T, D] in x's dtype.
    """
    if backend == "auto":
        backend = "triton" if fits_triton(x, weight, history) else "torch"
    if backend not in _BACKENDS:
        raise ValueError(f"short convolution backend={backend!r} is unknown; use one of auto, {', '.join(_BACKENDS)}")
    return _BACKENDS[backend](x, weight, history, cu_seqlens)


def short_conv_normed(x: Tensor, weight: Tensor, head_dim: int, *, cu_seqlens: Tensor | None = None) -> Tensor:
    """`short_conv` and the per-head l2 norm of spec c.3.3 in one Triton kernel, rounded to x's dtype: [B, T, D].

    Naive twin: `short_conv(..., backend="torch")`, then `k3.ops.kda.l2_normalize` over heads of `head_dim`.
    """
    return _triton(x, weight, None, cu_seqlens, head_dim=head_dim, l2_eps=1e-6)


def fits_triton(x: Tensor, weight: Tensor, history: Tensor | None, head_dim: int = 1) -> bool:
    """Whether the Triton kernel is the choice of "auto" for this input; with a norm, for heads of `head_dim` too."""
    fits = x.is_cuda and x.dtype == torch.bfloat16 and weight.shape[-1] == FUSED_TAPS and history is None
    return fits and head_dim & (head_dim - 1) == 0


def last_inputs(x: Tensor, history: Tensor | None, taps: int) -> Tensor:
    """What the convolution must remember after x: a copy of its last taps-1 inputs, [B, taps-1, D]."""
    if x.shape[1] >= taps - 1:
        return x[:, x.shape[1] - (taps - 1) :].clone()
    return with_history(x, history, taps)[:, x.shape[1] :].clone()


def _torch(x: Tensor, weight: Tensor, history: Tensor | None, cu_seqlens: Tensor | None) -> Tensor:
    announce("torch.short_conv")
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


def _triton(x, weight, history, cu_seqlens, *, head_dim: int | None = None, l2_eps: float | None = None) -> Tensor:
    if history is not None:
        raise ValueError("backend='triton' starts from zero history; continue a sequence with backend='torch' or 'fla'")
    from k3.ops.triton_short_conv import short_conv as fused

    announce("triton.short_conv")
    heads = x.shape[-1] // (head_dim or _largest_tile(x.shape[-1]))
    return fused(x, weight, heads=heads, l2_eps=l2_eps, cu_seqlens=cu_seqlens)


def _largest_tile(channels: int) -> int:
    """The largest power of two up to 128 that divides the channels: without a norm heads mean nothing."""
    return min(128, channels & -channels)


def _fla(x: Tensor, weight: Tensor, history: Tensor | None, cu_seqlens: Tensor | None) -> Tensor:
    if history is not None and cu_seqlens is not None:
        raise ValueError("backend='fla' keeps a history per document, not per row; use backend='torch'")
    from fla.modules.causal_conv1d import causal_conv1d

    announce("fla.causal_conv1d")
    past = None if history is None else F.pad(history.mT, (1, 0)).contiguous()  # fla keeps all taps: [B, D, taps]
    bounds = None if cu_seqlens is None else cu_seqlens.long()
    y, _ = causal_conv1d(x, weight[:, 0].contiguous(), initial_state=past, activation="silu", cu_seqlens=bounds)
    return y


_BACKENDS = {"torch": _torch, "triton": _triton, "fla": _fla}
