"""How the tokens of a batch lie: the default layout runs a mixer's core on the tensors at hand.

Context parallelism derives from `SequenceLayout` and exchanges tensors around the same cores.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor


@dataclass(frozen=True, kw_only=True, eq=False)
class SequenceLayout:
    """Whole sequences in rows, or documents packed in one row by `cu_seqlens` (int32 [N+1], from 0 to T)."""

    cu_seqlens: Tensor | None = None

    def check(self, input_ids: Tensor, cache=None) -> None:
        """Raise unless `cu_seqlens` describes these ids [B, T] and no cache is to follow packed documents."""
        if self.cu_seqlens is None:
            return
        if cache is not None:
            raise NotImplementedError("a cache for packed documents is not implemented; decode them as a batch of rows")
        bounds, (B, T) = self.cu_seqlens.tolist(), input_ids.shape
        if B != 1:
            raise ValueError(f"cu_seqlens with batch {B}; pack all documents into one row, [1, T]")
        if bounds[0] != 0 or bounds[-1] != T or sorted(bounds) != bounds:
            raise ValueError(f"cu_seqlens={bounds} must rise from 0 to T={T}")

    def kda(self, core: Callable, q: Tensor, k: Tensor, v: Tensor, z: Tensor, beta: Tensor, weights: Any, state=None):
        """Run KDA's `core` (convolution to recurrence); all tensors [B, T, *], all `weights` per head.

        Returns o [B, T, H, V] before o_norm, and the state after the last token.
        """
        return core(q, k, v, z, beta, weights, cu_seqlens=self.cu_seqlens, state=state)

    def mla(self, core: Callable, q: Tensor, latent: Tensor) -> Tensor:
        """Run MLA's `core` (expansion and attention) on q [B, T, H, K] and latent [B, S, L + tail]: [B, T, H, V]."""
        return core(q, latent, cu_seqlens=self.cu_seqlens)
