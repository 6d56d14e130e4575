"""How the tokens of a batch lie: whole rows or packed documents (THD), and the packing to and from it.

The default layout runs a mixer's core on the tensors at hand. Context parallelism derives from `SequenceLayout` and
exchanges tensors around the same cores.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from k3 import loss

IGNORE_INDEX = loss.IGNORE_INDEX


def document_bounds(cu_seqlens: Tensor | None, total: int) -> list[int]:
    """Return the bounds as a list, [0, total] without packing. Raises ValueError naming the value and the rule."""
    if cu_seqlens is None:
        return [0, total]
    if cu_seqlens.ndim != 1 or cu_seqlens.is_floating_point():
        raise ValueError(
            f"cu_seqlens of shape {tuple(cu_seqlens.shape)} and {cu_seqlens.dtype}; give integer bounds of rank 1"
        )
    bounds = cu_seqlens.tolist()
    faults = []
    if bounds[:1] != [0]:
        faults.append("must start at 0")
    if bounds[-1:] != [total]:
        faults.append(f"must end at T={total}")
    if sorted(bounds) != bounds:
        faults.append("must not decrease")
    if faults:
        raise ValueError(f"cu_seqlens={bounds} {' and '.join(faults)}; rebuild the bounds of the packed row")
    return bounds


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
        B, T = input_ids.shape
        if B != 1:
            raise ValueError(f"cu_seqlens with batch {B}; pack all documents into one row, [1, T]")
        document_bounds(self.cu_seqlens, T)

    def shift_labels(self, labels: Tensor) -> Tensor:
        """Turn labels equal to the ids into aligned ones; the last token of a document gets none."""
        return loss.shift_labels(labels, self.cu_seqlens)

    def kda(self, core: Callable, q: Tensor, k: Tensor, v: Tensor, z: Tensor, beta: Tensor, weights: Any, state=None):
        """Run KDA's `core` (convolution to recurrence); all tensors [B, T, *], all `weights` per head.

        Returns o [B, T, H, V] before o_norm, and the state after the last token.
        """
        return core(q, k, v, z, beta, weights, cu_seqlens=self.cu_seqlens, state=state)

    def mla(self, core: Callable, q: Tensor, latent: Tensor) -> Tensor:
        """Run MLA's `core` (expansion and attention) on q [B, T, H, K] and latent [B, S, L + tail]: [B, T, H, V]."""
        return core(q, latent, cu_seqlens=self.cu_seqlens)


@dataclass(frozen=True, kw_only=True, eq=False)
class PackedDocuments:
    """Documents in one row [1, total]: each padded at its end, `cu_seqlens` bounding the padded ones."""

    input_ids: Tensor
    labels: Tensor | None
    cu_seqlens: Tensor
    lengths: tuple[int, ...]


def pack_rows(documents: Sequence[Tensor], multiple: int = 1, value: float = 0) -> tuple[Tensor, Tensor]:
    """Join documents [T_i, ...] into one row [1, total, ...], each padded to a `multiple`; also return cu_seqlens."""
    padded = []
    for document in documents:
        pad = document.new_full((-len(document) % multiple, *document.shape[1:]), value)
        padded.append(torch.cat([document, pad]))
    sizes = torch.tensor([0, *(len(document) for document in padded)])
    return torch.cat(padded).unsqueeze(0), sizes.cumsum(0).to(torch.int32)


def pack_documents(
    documents: Sequence[Tensor], labels: Sequence[Tensor] | None = None, *, cp_size: int = 1, pad_id: int = 0
) -> PackedDocuments:
    """Pack ids [T_i] and aligned labels [T_i] so that every cp_size splits them: multiples of 2 * cp_size."""
    if labels is not None and [len(d) for d in documents] != [len(d) for d in labels]:
        raise ValueError("labels and documents differ in length; give one aligned label per token")
    multiple = 2 * cp_size if cp_size > 1 else 1
    ids, cu_seqlens = pack_rows(documents, multiple, pad_id)
    packed_labels = None if labels is None else pack_rows(labels, multiple, IGNORE_INDEX)[0]
    lengths = tuple(len(document) for document in documents)
    return PackedDocuments(input_ids=ids, labels=packed_labels, cu_seqlens=cu_seqlens, lengths=lengths)


def unpack_thd_forward_output(
    output: Tensor, cu_seqlens: Tensor, lengths: Sequence[int] | None = None, layout: Any = None
) -> list[Tensor]:
    """Return each document's part [T_i, ...] of a packed output [1, total, ...], without its padding.

    `lengths`: the documents' true lengths, the padded ones if None. `layout`: the context layout the output was
    computed under, whose shares are joined first (collective, no gradient).
    """
    whole = layout.join(output) if hasattr(layout, "join") else output
    if whole.shape[0] != 1:
        raise ValueError(f"packed output of shape {tuple(whole.shape)}; its first dim is 1, all documents in one row")
    bounds = document_bounds(cu_seqlens, whole.shape[1])
    lengths = [b - a for a, b in zip(bounds, bounds[1:], strict=False)] if lengths is None else lengths
    if len(lengths) != len(bounds) - 1:
        raise ValueError(f"{len(lengths)} lengths for {len(bounds) - 1} documents; give one true length per document")
    return [whole[0, start : start + length] for start, length in zip(bounds, lengths, strict=False)]
