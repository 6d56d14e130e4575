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
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from k3.loss import IGNORE_INDEX, loss_sum_and_count
from k3.parallel import collectives
from k3.parallel.tensor import vocab_parallel_cross_entropy
from k3.precision import PinnedFloat32
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
    return tuple(axis for axis in axes if axis == "tp") if sharded_by_fsdp(parameter) else axes


def sharded_by_fsdp(parameter: Tensor) -> bool:
    """Whether FSDP splits this parameter over the dp x cp (or expert replica) ranks and reduces its gradient."""
    return isinstance(parameter, DTensor) and not {"dp_cp", "edp"}.isdisjoint(parameter.device_mesh.mesh_dim_names)


def local_gradient(parameter: Tensor) -> Tensor:
    """Return the part of the gradient this rank stores, writable in place."""
    grad = parameter.grad
    return grad.to_local() if isinstance(grad, DTensor) else grad


def owned_share(name: str, parameter: Tensor, parallel: Any) -> float:
    """Return 1 / (how many ranks of a stage store this rank's elements of the parameter)."""
    place = placement(name)
    replicas = parallel.edp_size if place.kind == "expert" else parallel.dp_size * parallel.cp_size
    copies = 1 if sharded_by_fsdp(parameter) else replicas
    return 1 / (copies if place.splits else copies * parallel.tp_size)


def fully_shard_model(
    model: nn.Module,
    *,
    root: nn.Module | None = None,
    mp_policy: MixedPrecisionPolicy | None = None,
    reshard_after_forward: bool = True,
) -> nn.Module:
    """Shard parameters and gradients over dp x cp by FSDP2, experts over their own replicas; return the root.

    Parameters that must stay fp32 (A_log, dt_bias, convolutions, o_norm) are left whole, out of any cast, and experts
    without replicas as they are; `sync_gradients` sums those. `root`: the module whose forward runs this model, the
    model itself if None. Gradients are summed, as everywhere here.
    """
    parallel, root = model.parallel, root or model
    whole = set(pinned_parameters(model))
    experts = [layer.ffn.experts for layer in model.decoder.layers.values() if hasattr(layer.ffn, "experts")]
    if parallel.edp_size == 1:
        whole |= {parameter for module in experts for parameter in module.parameters()}
    options: dict[str, Any] = {"reshard_after_forward": reshard_after_forward}
    if mp_policy is not None:
        options["mp_policy"] = mp_policy
    if parallel.edp_size > 1:
        for module in experts:
            fully_shard(module, mesh=parallel.mesh.submesh("edp"), **options)
    for module in (*model.decoder.layers.values(), root):
        fully_shard(module, mesh=parallel.mesh.submesh("dp_cp"), ignored_params=whole, **options)
    for module in root.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo has no scaled sum
    return root


def pinned_parameters(model: nn.Module) -> list[nn.Parameter]:
    """The parameters that no cast may narrow."""
    return [
        module.get_parameter(name)
        for module in model.modules()
        if isinstance(module, PinnedFloat32)
        for name in module.pinned
        if name in dict(module.named_parameters(recurse=False))
    ]


@torch.no_grad()
def broadcast_replicas(model: nn.Module, parallel: Any) -> None:
    """Give every rank that stores a tensor the values of the first one: ranks may have drawn from different seeds."""
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        place = placement(name)
        axes = ("edp",) if place.kind == "expert" else ("dp_cp",) if place.splits else ("dp_cp", "tp")
        value = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        for axis in axes:
            group = parallel.group(axis)
            if dist.get_world_size(group) > 1:
                dist.broadcast(value.data, group=group, group_src=0)


def shared_seed(seed: int, device: torch.device) -> int:
    """Return the seed of the first rank on every rank. Collective over the world."""
    value = torch.tensor(seed, device=device)
    dist.broadcast(value, src=0)
    return int(value)


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
