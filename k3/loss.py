"""The language-model loss: aligned labels, ignore index, loss mask, and the shifted convention as an explicit step."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from k3.ops.cross_entropy import IGNORE_INDEX, cross_entropy


def lm_loss(logits: Tensor, labels: Tensor, loss_mask: Tensor | None = None) -> Tensor:
    """Mean cross entropy over unmasked labels, at least fp32; 0 with zero gradients if none is left (spec i).

    logits [B, T, V]; labels [B, T], position t's target, -100 ignored; loss_mask [B, T], weights, optional.
    """
    total, count = loss_sum_and_count(logits, labels, loss_mask)
    return total / count.clamp_min(1)


def loss_sum_and_count(logits: Tensor, labels: Tensor, loss_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """sum(mask * ce) and sum(mask): what ranks that split the tokens add up before dividing."""
    if labels.shape != logits.shape[:-1]:
        raise ValueError(f"labels {tuple(labels.shape)} must match the logits' {tuple(logits.shape[:-1])}")
    ce = cross_entropy(logits.flatten(0, -2), labels.flatten())
    mask = (labels.flatten() != IGNORE_INDEX).to(ce.dtype)
    if loss_mask is not None:
        mask = mask * loss_mask.flatten().to(ce.dtype)
    return (mask * ce).sum(), mask.sum()


def shift_labels(labels: Tensor, cu_seqlens: Tensor | None = None) -> Tensor:
    """Turn labels equal to the ids into aligned ones: position t gets labels[t+1], the last of a document -100."""
    shifted = F.pad(labels[:, 1:], (0, 1), value=IGNORE_INDEX)
    if cu_seqlens is not None:
        last = cu_seqlens[1:].long() - 1
        shifted = shifted.index_fill(1, torch.unique(last[last >= 0]), IGNORE_INDEX)
    return shifted
