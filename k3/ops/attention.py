"""Causal attention with unequal key and value widths, over whole sequences or packed documents."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from k3.paths import announce
from k3.precision import at_least_fp32


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    cu_seqlens: Tensor | None = None,
    q_positions: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    """softmax(q k^T / sqrt(K) + causal) v; the naive twin is the backend "torch_eager" (spec c.4).

    q [B, T, H, K]; k [B, S, H, K]; v [B, S, H, V], key s standing at position s. Without `q_positions` the queries
    are the last T positions. q_positions [T]: the position of each query, for shards of a sequence.
    cu_seqlens [N+1]: documents packed in one row (B == 1); attention stays inside a document.
    backend: "torch_eager", "torch_sdpa", "cudnn" (CUDA, half precision; whole sequences, one query, or documents one
    after another) or "auto" (eager on CPU, where it is the definition). Returns [B, T, H, V].
    """
    backend = choose_backend(q, k, v, q_positions) if backend == "auto" else backend
    if backend not in _BACKENDS:
        raise ValueError(f"attention backend={backend!r} is unknown; use one of auto, {', '.join(_BACKENDS)}")
    run = _BACKENDS[backend]
    if backend == "cudnn":
        _check_cudnn(q, k, q_positions)
    if q_positions is not None or (cu_seqlens is None and q.shape[1] != k.shape[1]):
        return run(q, k, v, visible(q, k, q_positions, cu_seqlens))
    if cu_seqlens is None:
        return run(q, k, v, None)
    bounds = cu_seqlens.tolist()
    spans = [slice(a, b) for a, b in zip(bounds, bounds[1:], strict=False) if b > a]
    return torch.cat([run(q[:, s], k[:, s], v[:, s], None) for s in spans], dim=1)


def choose_backend(q: Tensor, k: Tensor, v: Tensor, q_positions: Tensor | None) -> str:
    """What "auto" means for queries and keys of this device, dtype and shape."""
    if q.device.type == "cpu":
        return "torch_eager"
    whole = q_positions is None and q.shape[1] == k.shape[1] > 1
    wide = q.shape[-1] % 64 == 0 and v.shape[-1] % 64 == 0
    return "cudnn" if whole and wide and q.dtype == torch.bfloat16 else "torch_sdpa"


def visible(q: Tensor, k: Tensor, q_positions: Tensor | None = None, cu_seqlens: Tensor | None = None) -> Tensor:
    """[T, S] bool, true where a query may look: not ahead, not into another document."""
    T, S = q.shape[1], k.shape[1]
    keys = torch.arange(S, device=q.device)
    queries = torch.arange(S - T, S, device=q.device) if q_positions is None else q_positions
    allowed = queries[:, None] >= keys
    if cu_seqlens is None:
        return allowed
    ends = cu_seqlens[1:].to(keys.dtype)
    document = torch.searchsorted(ends, queries, right=True)[:, None] == torch.searchsorted(ends, keys, right=True)
    return allowed & document


def _eager(q: Tensor, k: Tensor, v: Tensor, allowed: Tensor | None) -> Tensor:
    """The vendor's order: product and scale in the activation dtype, softmax in fp32, probabilities cast back."""
    announce("torch.attention_eager")
    allowed = visible(q, k) if allowed is None else allowed
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))  # [B, H, T, K]
    scores = (q @ k.mT) * q.shape[-1] ** -0.5
    scores = at_least_fp32(scores).masked_fill(~allowed, float("-inf"))
    return (scores.softmax(-1).to(q.dtype) @ v).transpose(1, 2)


def _sdpa(q: Tensor, k: Tensor, v: Tensor, allowed: Tensor | None) -> Tensor:
    announce("torch.sdpa")
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=allowed, is_causal=allowed is None).transpose(1, 2)


def _cudnn(q: Tensor, k: Tensor, v: Tensor, allowed: Tensor | None) -> Tensor:
    """cuDNN's fused attention with its own causal mask: no [T, S] tensor exists; a lone last query sees every key."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    if k.shape[1] == 1:  # a lone key takes all the weight; cuDNN has no kernel for it
        return v
    announce("cudnn.sdpa")
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):  # an unserved shape raises here; nothing else is allowed to serve it
        return F.scaled_dot_product_attention(q, k, v, is_causal=q.shape[2] > 1).transpose(1, 2)


def _check_cudnn(q: Tensor, k: Tensor, q_positions: Tensor | None) -> None:
    T, S = q.shape[1], k.shape[1]
    if not q.is_cuda or q_positions is not None or T not in (1, S):
        raise ValueError(
            f"backend='cudnn' serves T = 1 or S on CUDA, no positions; got T={T}, S={S} on {q.device}; use torch_sdpa"
        )


_BACKENDS = {"torch_eager": _eager, "torch_sdpa": _sdpa, "cudnn": _cudnn}
