"""Cross entropy of each token over the whole vocabulary, by an explicit backend."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from k3.paths import announce
from k3.precision import at_least_fp32

IGNORE_INDEX = -100
FUSED_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def cross_entropy(logits: Tensor, labels: Tensor, *, backend: str = "auto") -> Tensor:
    """-log softmax(logits)[labels], at least fp32; 0 with zero gradient where the label is -100.

    logits [N, V]; labels [N], integer. backend: "torch" (the definition, which keeps the logits and their softmax in
    fp32), "fla" (CUDA: reads the logits as they are, keeps one number a token) or "auto". Returns [N].
    """
    if backend == "auto":
        backend = "fla" if logits.is_cuda and logits.dtype == torch.bfloat16 else "torch"
    if backend not in _BACKENDS:
        raise ValueError(f"cross entropy backend={backend!r} is unknown; use one of auto, {', '.join(_BACKENDS)}")
    return _BACKENDS[backend](logits, labels)


def _torch(logits: Tensor, labels: Tensor) -> Tensor:
    announce("torch.cross_entropy")
    return F.cross_entropy(at_least_fp32(logits), labels, ignore_index=IGNORE_INDEX, reduction="none")


def _fla(logits: Tensor, labels: Tensor) -> Tensor:
    if not logits.is_cuda:
        raise ValueError(f"backend='fla' runs on CUDA and the logits are on {logits.device}; use backend='torch'")
    if logits.dtype not in FUSED_DTYPES:
        raise ValueError(f"backend='fla' computes in float32 and the logits are {logits.dtype}; use backend='torch'")
    from fla.modules.fused_cross_entropy import cross_entropy_loss

    announce("fla.cross_entropy")
    return cross_entropy_loss(logits, labels, ignore_index=IGNORE_INDEX)[0]


_BACKENDS = {"torch": _torch, "fla": _fla}
