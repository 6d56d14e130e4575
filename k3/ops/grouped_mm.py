"""One matrix product per expert over rows sorted by expert."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from k3.paths import announce


def grouped_mm(x: Tensor, weight: Tensor, counts: Tensor, *, backend: str = "auto") -> Tensor:
    """y[rows of e] = x[rows of e] @ weight[e].T for rows sorted by expert; naive twin: `loop_mm`.

    x [M, in]; weight [E, out, in] of the same dtype; counts [E] integer, rows per expert, summing to M.
    backend: "loop", "torch_grouped" (CUDA, bfloat16) or "auto". Returns [M, out].
    """
    if backend == "auto":
        backend = "torch_grouped" if _fits_grouped(x, weight) else "loop"
    if backend not in _BACKENDS:
        raise ValueError(f"grouped_mm backend={backend!r} is unknown; use one of auto, {', '.join(_BACKENDS)}")
    return _BACKENDS[backend](x, weight, counts)


def loop_mm(x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    """The definition: one product per expert that has rows."""
    announce("loop.experts")
    rows = x.split(counts.tolist())
    products = [r @ w.mT for r, w in zip(rows, weight.unbind(), strict=True) if len(r)]
    return torch.cat(products) if products else x @ weight[0].mT


def _torch_grouped(x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    announce("torch.grouped_mm")
    return F.grouped_mm(x, weight.mT, offs=counts.cumsum(0).to(torch.int32))


def _fits_grouped(x: Tensor, weight: Tensor) -> bool:
    aligned = all(size * weight.element_size() % 16 == 0 for size in weight.shape[1:])
    return x.is_cuda and x.dtype == torch.bfloat16 and aligned and hasattr(F, "grouped_mm")


_BACKENDS = {"loop": loop_mm, "torch_grouped": _torch_grouped}
