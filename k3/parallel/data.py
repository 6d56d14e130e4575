"""Data parallelism: the loss over all ranks' tokens, gradients summed over ranks, FSDP2, and mesh-aware clipping.

Every rank's loss is the mean over the tokens of all dp and cp ranks, so gradients are *summed* over ranks, never
averaged: with unequal token counts an average of means would be wrong.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors
from torch.distributed.tensor import DTensor

from k3.loss import IGNORE_INDEX, loss_sum_and_count
from k3.parallel import collectives
from k3.parallel.tensor import vocab_parallel_cross_entropy
from k3.sharding import local_slices, placement

HEAD = "language_model.lm_head.weight"


class ParallelLoss:
    """Drop-in for `loss.lm_loss`: vocabulary split over tp, tokens split over dp and cp."""

    def __init__(self, parallel: Any, vocab_size: int):
        self.parallel = parallel
        self.first_row = local_slices(HEAD, (vocab_size, 1), parallel)[0].start

    def __call__(self, logits: Tensor, labels: Tensor, loss_mask: Tensor | None = None) -> Tensor:
        """Mean cross entropy over the unmasked labels of all dp and cp ranks, the same value on each."""
        total, count = self.sum_and_count(logits, labels, loss_mask)
        if self.parallel.dp_size * self.parallel.cp_size > 1:
            group = self.parallel.group("dp_cp")
            total = collectives.reduce_from_ranks(total, group, "loss")
            count = collectives.sum_ranks(count, group, "loss")
        return total / count.clamp_min(1)

    def sum_and_count(self, logits: Tensor, labels: Tensor, loss_mask: Tensor | None) -> tuple[Tensor, Tensor]:
        """This rank's sum(mask * ce) and sum(mask)."""
        if self.parallel.tp_size == 1:
            return loss_sum_and_count(logits, labels, loss_mask)
        flat, group = labels.flatten(), self.parallel.group("tp")
        ce = vocab_parallel_cross_entropy(logits.flatten(0, -2), flat, self.first_row, group)
        mask = (flat != IGNORE_INDEX).to(ce.dtype)
        if loss_mask is not None:
            mask = mask * loss_mask.flatten().to(ce.dtype)
        return (mask * ce).sum(), mask.sum()


def gradient_axes(name: str, parallel: Any) -> tuple[str, ...]:
    """Return the groups over which the gradient of parameter `name` is summed after backward."""
    place = placement(name)
    if place.kind == "expert":
        return ("edp",) if parallel.edp_size > 1 else ()
    axes = ("dp_cp",) if parallel.dp_size * parallel.cp_size > 1 else ()
    summed_over_tp = place.kind == "shared" or (place.kind == "token" and parallel.sequence_parallel)
    return axes + (("tp",) if summed_over_tp and parallel.tp_size > 1 else ())


@torch.no_grad()
def sync_gradients(model: nn.Module) -> None:
    """Sum gradients over ranks where a parameter is stored more than once. Call once per step, after all backwards.

    One flat all-reduce per (group, dtype). Gradients that FSDP has reduced already keep only their tp sum.
    """
    parallel = model.parallel
    if parallel is None or parallel.mesh is None:
        return
    for axis in ("tp", "dp_cp", "edp"):
        buckets: dict[torch.dtype, list[Tensor]] = defaultdict(list)
        for name, parameter in model.named_parameters():
            if parameter.grad is not None and axis in _pending_axes(name, parameter, parallel):
                buckets[parameter.grad.dtype].append(local_gradient(parameter))
        for grads in buckets.values():
            summed = collectives.sum_ranks(_flatten_dense_tensors(grads), parallel.group(axis), "gradients", True)
            for grad, value in zip(grads, _unflatten_dense_tensors(summed, grads), strict=True):
                grad.copy_(value)


def _pending_axes(name: str, parameter: Tensor, parallel: Any) -> tuple[str, ...]:
    axes = gradient_axes(name, parallel)
    if getattr(parameter, "fsdp_managed", False):
        return tuple(axis for axis in axes if axis == "tp")
    return axes


def local_gradient(parameter: Tensor) -> Tensor:
    """Return the part of the gradient this rank stores, writable in place."""
    grad = parameter.grad
    return grad.to_local() if isinstance(grad, DTensor) else grad


def owned_share(name: str, parameter: Tensor, parallel: Any) -> float:
    """Return 1 / (how many ranks of the world store this rank's elements of the parameter)."""
    place = placement(name)
    if place.kind == "expert":
        copies = parallel.edp_size
        split_by_fsdp = parallel.edp_size
    else:
        split_by_fsdp = parallel.dp_size * parallel.cp_size
        copies = split_by_fsdp * (1 if place.splits else parallel.tp_size)
    return 1 / (copies // split_by_fsdp if getattr(parameter, "fsdp_managed", False) else copies)


@torch.no_grad()
def clip_gradients(model: nn.Module, max_norm: float, chunks: tuple[nn.Module, ...] = ()) -> Tensor:
    """Scale all gradients so that their norm over the whole model is at most `max_norm`; return the norm before.

    Every element counts once however many ranks store it. `chunks`: further virtual stages of this rank.
    """
    models, parallel = (model, *chunks), model.parallel
    named = [item for chunk in models for item in chunk.named_parameters() if item[1].grad is not None]
    device = named[0][1].grad.device if named else "cpu"
    total = torch.zeros((), dtype=torch.float64, device=device)
    for name, parameter in named:
        share = 1.0 if parallel is None else owned_share(name, parameter, parallel)
        total += local_gradient(parameter).double().square().sum() * share
    if parallel is not None and parallel.mesh is not None:
        total = collectives.sum_ranks(total, dist.group.WORLD, "norm")
    norm = total.sqrt()
    scale = (max_norm / (norm + 1e-6)).clamp_max(1.0)
    for _, parameter in named:
        local_gradient(parameter).mul_(scale.to(parameter.grad.dtype))
    return norm
