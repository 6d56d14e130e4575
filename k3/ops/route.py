"""Rows of a routed layer: sort the (token, choice) pairs by expert, spread tokens over them, combine the results."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from k3.paths import announce
from k3.precision import at_least_fp32


class Order(NamedTuple):
    """How N tokens with k choices each lie when sorted by expert."""

    source: Tensor  # [N*k], the token of each row
    position: Tensor  # [N, k], the row of each choice
    counts: Tensor  # [E], rows per expert


def sort_by_expert(idx: Tensor, num_experts: int) -> Order:
    """Stable order of idx [N, k] by expert; nothing here waits for the device."""
    flat = idx.flatten()
    experts, order = flat.sort(stable=True)
    position = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=idx.device))
    bounds = torch.searchsorted(experts, torch.arange(num_experts + 1, device=idx.device, dtype=experts.dtype))
    return Order(order // idx.shape[1], position.view_as(idx), bounds.diff())


def spread(z: Tensor, order: Order, *, backend: str = "auto") -> Tensor:
    """Rows z[source] in expert order: [N*k, L]. backend as in `combine`."""
    if _choose(z, backend) == "torch":
        return z[order.source]
    from k3.ops.triton_route import spread as fused

    return fused(z, order.source, order.position)


def combine(rows: Tensor, order: Order, weight: Tensor, *, backend: str = "auto") -> Tensor:
    """sum_j weight[n, j] * rows[position[n, j]], products and sum at least fp32, cast once (spec c.6).

    rows [N*k, L]; weight [N, k]. backend: "torch" (the definition), "triton" (CUDA) or "auto". Returns [N, L].
    """
    if _choose(rows, backend) == "torch":
        announce("torch.route")
        chosen = at_least_fp32(rows[order.position])  # [N, k, L]
        return (weight.unsqueeze(-1) * chosen).sum(1).to(rows.dtype)
    from k3.ops.triton_route import combine as fused

    announce("triton.route")
    return fused(rows, order.position, weight)


def _choose(x: Tensor, backend: str) -> str:
    if backend == "auto":
        return "triton" if x.is_cuda and x.dtype == torch.bfloat16 else "torch"
    if backend not in ("torch", "triton"):
        raise ValueError(f"route backend={backend!r} is unknown; use one of auto, torch, triton")
    return backend
