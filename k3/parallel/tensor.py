"""Tensor parallelism: parameters stored as DTensors by the SHARDING table, and regions split by head or inner width.

A region (a mixer, a dense or shared MLP, the head) takes activations that are whole on every tp rank, or split along
tokens under sequence parallelism, and computes with this rank's heads or columns. One collective opens it and one
closes it; nothing inside knows of other ranks.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from torch.nn import functional as F

from k3.layers import local
from k3.parallel import collectives
from k3.precision import at_least_fp32
from k3.sharding import local_slices, placement

TOKENS = 1  # the token dim of every activation [B, T, *]


class PlacedLinear(nn.Linear):
    """A linear whose weight is read through `local`, so that it may be stored as a DTensor."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, local(self, "weight"))


class VocabEmbedding(nn.Embedding):
    """The rows of this tp rank; ids of other ranks give zero, and `close_region` sums the ranks."""

    first_row: int
    local_padding: int | None

    def forward(self, ids: Tensor) -> Tensor:
        weight = local(self, "weight")
        rows = ids - self.first_row
        mine = (rows >= 0) & (rows < weight.shape[0])
        found = F.embedding(rows.where(mine, 0), weight, padding_idx=self.local_padding)
        return found * mine.unsqueeze(-1).to(found.dtype)


def place_parameters(model: nn.Module, parallel: Any) -> None:
    """Keep this rank's part of every split parameter: a DTensor on the axis's mesh, or plain without a mesh."""
    for prefix, module in model.named_modules():
        for key, parameter in list(module.named_parameters(recurse=False)):
            name = f"{prefix}.{key}"
            if any(getattr(parallel, f"{axis}_size") > 1 for axis, _ in placement(name).splits):
                _place(module, key, name, parameter, parallel)


def _place(module: nn.Module, key: str, name: str, parameter: nn.Parameter, parallel: Any) -> None:
    part = parameter.detach()[local_slices(name, parameter.shape, parallel)].clone()
    stored = part if parallel.mesh is None else _as_dtensor(part, name, parameter, parallel)
    setattr(module, key, nn.Parameter(stored, requires_grad=parameter.requires_grad))
    module.placed = getattr(module, "placed", {}) | {key: partial(local_tensor, module, key)}
    if isinstance(module, nn.Linear):
        module.__class__ = PlacedLinear
    elif isinstance(module, nn.Embedding):
        _split_rows(module, name, parameter.shape, parallel)


def _as_dtensor(part: Tensor, name: str, whole: Tensor, parallel: Any) -> DTensor:
    splits = placement(name).splits
    mesh = parallel.mesh.submesh("tp") if splits[0][0] == "tp" else parallel.mesh.expert["ep", "etp"]
    placements = [Shard(dim) for _, dim in splits]
    return DTensor.from_local(part, mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride())


def _split_rows(module: nn.Embedding, name: str, shape: tuple[int, ...], parallel: Any) -> None:
    rows = local_slices(name, shape, parallel)[0]
    module.__class__, module.first_row = VocabEmbedding, rows.start
    pad = module.padding_idx
    module.local_padding = None if pad is None or not rows.start <= pad < rows.stop else pad - rows.start


def local_tensor(module: nn.Module, key: str) -> Tensor:
    """Return the tensor this rank computes with; the gradient comes back in the placement it is stored in."""
    stored = getattr(module, key)
    return stored.to_local() if isinstance(stored, DTensor) else stored


def open_region(module: nn.Module, parallel: Any, tag: str) -> None:
    """Let activations enter: all-gather of tokens (backward reduce-scatter), or as they are (backward all-reduce)."""
    group = parallel.group("tp")

    def enter(_module, args):
        if parallel.sequence_parallel:
            return (collectives.gather_pieces(args[0], TOKENS, group, tag), *args[1:])
        return (collectives.copy_to_ranks(args[0], group, tag), *args[1:])

    module.register_forward_pre_hook(enter)


def close_region(module: nn.Module, parallel: Any, tag: str) -> None:
    """Sum the ranks' partial outputs: reduce-scatter of tokens (backward all-gather), or all-reduce."""
    group = parallel.group("tp")

    def leave(_module, _args, output):
        if parallel.sequence_parallel:
            return collectives.scatter_sum(output, TOKENS, group, tag)
        return collectives.reduce_from_ranks(output, group, tag)

    module.register_forward_hook(leave)


def parallelize_tensor(model: nn.Module, parallel: Any) -> None:
    """Open and close the regions of one stage over tp. Parameters must be placed already."""
    decoder = model.decoder
    if hasattr(decoder, "embed_tokens"):
        close_region(decoder.embed_tokens, parallel, "embedding")
    for layer in decoder.layers.values():
        ffn = layer.ffn.shared_experts if hasattr(layer.ffn, "shared_experts") else layer.ffn
        for module, tag in ((layer.self_attn, "attention"), (ffn, "mlp")):
            open_region(module, parallel, tag)
            close_region(module, parallel, tag)
    if "lm_head" in model.language_model:
        open_region(model.language_model["lm_head"], parallel, "head")


def vocab_parallel_cross_entropy(logits: Tensor, labels: Tensor, first_row: int, group: Any) -> Tensor:
    """Cross entropy [N], whole on every rank, of logits [N, V/tp] of which this rank holds columns `first_row`...

    At least fp32. Labels that no rank holds (the ignore index) give the log of the partition sum; mask them.
    Forward: three all-reduces of [N]. Backward: none, each rank's columns depend on its own logits alone.
    """
    logits = at_least_fp32(logits)
    top = collectives.max_ranks(logits.amax(-1), group, "loss")
    total = collectives.reduce_from_ranks((logits - top.unsqueeze(-1)).exp().sum(-1), group, "loss")
    columns = labels - first_row
    mine = (columns >= 0) & (columns < logits.shape[-1])
    picked = logits.gather(-1, columns.where(mine, 0).unsqueeze(-1)).squeeze(-1).where(mine, 0)
    return total.log() + top - collectives.reduce_from_ranks(picked, group, "loss")


def full_logits(model: nn.Module, logits: Tensor) -> Tensor:
    """Return logits over the whole vocabulary from this tp rank's columns. No gradient."""
    parallel = model.parallel
    if parallel is None or parallel.tp_size == 1 or parallel.mesh is None:
        return logits
    vocab = model.config.vocab_size
    padded = F.pad(logits.detach(), (0, -(-vocab // parallel.tp_size) - logits.shape[-1]))
    return collectives.all_gather(padded, logits.ndim - 1, parallel.group("tp"), "logits")[..., :vocab]


@torch.no_grad()
def whole_parameter(parameter: Tensor) -> Tensor:
    """Return the whole of a stored parameter or gradient; collective when it is a DTensor."""
    return parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
