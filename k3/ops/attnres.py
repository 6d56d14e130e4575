"""The Attention-Residual mix: a softmax over depth, per token."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from k3.paths import announce
from k3.precision import at_least_fp32


def attnres_mix(
    sources: Sequence[Tensor], norm_weight: Tensor, proj_weight: Tensor, eps: float, *, backend: str = "auto"
) -> Tensor:
    """Blend the raw sources by softmax of the score of their normalised selves (spec c.7).

    sources: K+1 tensors [B, T, D], snapshots first and the prefix last; norm_weight [D]; proj_weight [1, D].
    The product of the two weights is taken at least in fp32. Returns [B, T, D] in the sources' dtype.
    backend: "torch" (the definition), "triton" or "fla" (CUDA; both read every source in place), or "auto".
    """
    backend = choose_backend(sources) if backend == "auto" else backend
    if backend not in _BACKENDS:
        raise ValueError(f"AttnRes backend={backend!r} is unknown; use one of auto, {', '.join(_BACKENDS)}")
    return _BACKENDS[backend](sources, norm_weight, proj_weight, eps)


def choose_backend(sources: Sequence[Tensor]) -> str:
    """What "auto" means for sources of this device, dtype, width and layout."""
    last = sources[-1]
    fits = last.is_cuda and last.dtype == torch.bfloat16 and last.shape[-1] % 64 == 0
    return "triton" if fits and all(source.is_contiguous() for source in sources) else "torch"


def _torch(sources: Sequence[Tensor], norm_weight: Tensor, proj_weight: Tensor, eps: float) -> Tensor:
    announce("torch.attnres")
    values = at_least_fp32(torch.stack(tuple(sources)))  # [K+1, B, T, D]
    query = at_least_fp32(norm_weight) * at_least_fp32(proj_weight).squeeze(0)  # [D]
    inverse_rms = torch.rsqrt(values.square().mean(-1) + eps)  # [K+1, B, T]
    weight = torch.softmax((values @ query) * inverse_rms, dim=0)
    return (weight.unsqueeze(-1) * values).sum(0).to(sources[-1].dtype)


def _triton(sources: Sequence[Tensor], norm_weight: Tensor, proj_weight: Tensor, eps: float) -> Tensor:
    sources = _in_place(sources)
    from k3.ops.triton_attnres import mix

    announce("triton.attnres")
    return mix(sources, norm_weight, proj_weight.view(-1), eps)


def _fla(sources: Sequence[Tensor], norm_weight: Tensor, proj_weight: Tensor, eps: float) -> Tensor:
    """fla's Triton kernel: every source is read once forward, through its own pointer; it takes no strided source."""
    sources = _in_place(sources)
    from fla.ops.attnres import fused_attnres

    announce("fla.attnres")
    return fused_attnres(proj_weight.view(-1), sources, norm_weight, rms_eps=eps)


def _in_place(sources: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The sources as they are; the kernels read them in 16-byte words and would otherwise copy."""
    bad = [i for i, source in enumerate(sources) if not source.is_contiguous() or source.data_ptr() % 16]
    if bad:
        raise ValueError(f"AttnRes sources {bad} are strided or unaligned and would be copied; use backend='torch'")
    if not sources[0].is_cuda:
        raise ValueError(f"AttnRes kernels run on CUDA and the sources are on {sources[0].device}; use backend='torch'")
    return tuple(sources)


_BACKENDS = {"torch": _torch, "triton": _triton, "fla": _fla}
