"""The Attention-Residual mix: a softmax over depth, per token."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from k3.paths import announce
from k3.precision import at_least_fp32


def attnres_mix(sources: Sequence[Tensor], norm_weight: Tensor, proj_weight: Tensor, eps: float) -> Tensor:
    """Blend the raw sources by softmax of the score of their normalised selves (spec c.7).

    sources: K+1 tensors [B, T, D], snapshots first and the prefix last; norm_weight [D]; proj_weight [1, D].
    The product of the two weights is taken at least in fp32. Returns [B, T, D] in the sources' dtype.
    """
    announce("torch.attnres")
    values = at_least_fp32(torch.stack(tuple(sources)))  # [K+1, B, T, D]
    query = at_least_fp32(norm_weight) * at_least_fp32(proj_weight).squeeze(0)  # [D]
    inverse_rms = torch.rsqrt(values.square().mean(-1) + eps)  # [K+1, B, T]
    weight = torch.softmax((values @ query) * inverse_rms, dim=0)
    return (weight.unsqueeze(-1) * values).sum(0).to(sources[-1].dtype)
