"""Every collective the layouts use, differentiable where a gradient crosses it, counted in one place.

Each function states its forward and its backward. `count()` collects what moved: path (the group's real backend and the
operation, as announced), tag (which part of the model), direction and bytes this rank sent to others.

The autograd functions are written here rather than taken from torch's functional collectives for two measured reasons:
`all_reduce` there sums again in backward, which multiplies the gradient of a replicated loss by the group size, and
the traffic of its backward passes cannot be counted.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function

from k3.paths import announce


@dataclass(frozen=True)
class Move:
    """One collective as this rank took part in it; `size_bytes` is what it sent to other ranks."""

    path: str
    tag: str
    backward: bool
    size_bytes: int


# torch 2.13 renamed these two and warns at the old names; torch 2.11 has only the old ones.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

_listeners: list[list[Move]] = []


@contextmanager
def count() -> Iterator[list[Move]]:
    """Collect the moves of this process inside the block; also those autograd threads make."""
    moves: list[Move] = []
    _listeners.append(moves)
    try:
        yield moves
    finally:
        _listeners.remove(moves)


def backend_of(group: dist.ProcessGroup, device: torch.device) -> str:
    """Return the backend that carries tensors of `device` in `group`, e.g. gloo or nccl."""
    pairs = dict(entry.split(":") for entry in dist.get_backend_config(group).split(","))
    return pairs[device.type]


def record(operation: str, group: dist.ProcessGroup, device: torch.device, size_bytes: float, tag: str, backward=False):
    """Announce one collective by its real path and hand it to every open `count()`."""
    path = f"{backend_of(group, device)}.{operation}"
    announce(path)
    for moves in _listeners:
        moves.append(Move(path, tag, backward, int(size_bytes)))


def _wide(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return x for a sum: in fp32 over gloo when it is half precision, which gloo rounds at every hop."""
    half = x.dtype in (torch.bfloat16, torch.float16)
    return x.float() if half and backend_of(group, x.device) == "gloo" else x


def _rows(x: Tensor, dim: int) -> Tensor:
    return x.movedim(dim, 0).contiguous()


def sum_ranks(x: Tensor, group: dist.ProcessGroup, tag: str, backward: bool = False) -> Tensor:
    """Return the sum of x over the group. No gradient."""
    size = dist.get_world_size(group)
    wide = _wide(x.detach(), group).clone(memory_format=torch.contiguous_format)
    record("all_reduce", group, x.device, 2 * (size - 1) / size * wide.nbytes, tag, backward)
    dist.all_reduce(wide, group=group)
    return wide.to(x.dtype)


def max_ranks(x: Tensor, group: dist.ProcessGroup, tag: str) -> Tensor:
    """Return the elementwise maximum of x over the group. No gradient."""
    size = dist.get_world_size(group)
    out = x.detach().clone(memory_format=torch.contiguous_format)
    record("all_reduce", group, x.device, 2 * (size - 1) / size * out.nbytes, tag)
    dist.all_reduce(out, op=dist.ReduceOp.MAX, group=group)
    return out


def all_gather(x: Tensor, dim: int, group: dist.ProcessGroup, tag: str, backward: bool = False) -> Tensor:
    """Return the ranks' equal pieces joined along `dim`. No gradient."""
    size = dist.get_world_size(group)
    rows = _rows(x.detach(), dim)
    out = rows.new_empty((size * rows.shape[0], *rows.shape[1:]))
    record("all_gather", group, x.device, (size - 1) * rows.nbytes, tag, backward)
    _all_gather(out, rows, group=group)
    return out.movedim(0, dim)


def reduce_scatter(x: Tensor, dim: int, group: dist.ProcessGroup, tag: str, backward: bool = False) -> Tensor:
    """Return this rank's piece, along `dim`, of the sum over the group. No gradient."""
    size = dist.get_world_size(group)
    rows = _rows(_wide(x.detach(), group), dim)
    out = rows.new_empty((rows.shape[0] // size, *rows.shape[1:]))
    record("reduce_scatter", group, x.device, (size - 1) * out.nbytes, tag, backward)
    _reduce_scatter(out, rows, group=group)
    return out.movedim(0, dim).to(x.dtype)


def exchange(
    x: Tensor, outgoing: list[int] | None, incoming: list[int] | None, group, tag: str, backward: bool = False
) -> Tensor:
    """Send runs of rows to each rank and return what each sent here, in rank order. No gradient.

    `outgoing[r]` and `incoming[r]` count the rows to and from rank r; None means equal runs.
    """
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    rows = x.detach().contiguous()
    outgoing = outgoing or [rows.shape[0] // size] * size
    incoming = incoming or [rows.shape[0] // size] * size
    out = rows.new_empty((sum(incoming), *rows.shape[1:]))
    row_bytes = rows[:1].nbytes
    record("all_to_all", group, x.device, (sum(outgoing) - outgoing[rank]) * row_bytes, tag, backward)
    dist.all_to_all_single(out, rows, incoming, outgoing, group=group)
    return out


class _Copy(Function):
    @staticmethod
    def forward(ctx, x, group, tag):
        ctx.group, ctx.tag = group, tag
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return sum_ranks(grad, ctx.group, ctx.tag, backward=True), None, None


class _Reduce(Function):
    @staticmethod
    def forward(ctx, x, group, tag):
        return sum_ranks(x, group, tag)

    @staticmethod
    def backward(ctx, grad):
        return grad, None, None


class _GatherSum(Function):
    @staticmethod
    def forward(ctx, x, dim, group, tag):
        ctx.args = dim, group, tag
        return all_gather(x, dim, group, tag)

    @staticmethod
    def backward(ctx, grad):
        return reduce_scatter(grad, *ctx.args, backward=True), None, None, None


class _ScatterSum(Function):
    @staticmethod
    def forward(ctx, x, dim, group, tag):
        ctx.args = dim, group, tag
        return reduce_scatter(x, dim, group, tag)

    @staticmethod
    def backward(ctx, grad):
        return all_gather(grad, *ctx.args, backward=True), None, None, None


class _Take(Function):
    @staticmethod
    def forward(ctx, x, dim, group, tag):
        ctx.args = dim, group, tag
        return _own_piece(x, dim, group)

    @staticmethod
    def backward(ctx, grad):
        return all_gather(grad, *ctx.args, backward=True), None, None, None


class _Join(Function):
    @staticmethod
    def forward(ctx, x, dim, group, tag):
        ctx.args = dim, group
        return all_gather(x, dim, group, tag)

    @staticmethod
    def backward(ctx, grad):
        return _own_piece(grad, *ctx.args), None, None, None


class _Exchange(Function):
    @staticmethod
    def forward(ctx, x, outgoing, incoming, group, tag):
        ctx.args = incoming, outgoing, group, tag
        return exchange(x, outgoing, incoming, group, tag)

    @staticmethod
    def backward(ctx, grad):
        return exchange(grad, *ctx.args, backward=True), None, None, None, None


def _own_piece(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    step = x.shape[dim] // dist.get_world_size(group)
    return x.narrow(dim, dist.get_rank(group) * step, step).contiguous()


def copy_to_ranks(x: Tensor, group: dist.ProcessGroup, tag: str) -> Tensor:
    """Forward: x, whole on every rank, enters work that is split over the group. Backward: all-reduce."""
    return _Copy.apply(x, group, tag)


def reduce_from_ranks(x: Tensor, group: dist.ProcessGroup, tag: str) -> Tensor:
    """Forward: all-reduce of the ranks' partial sums. Backward: the gradient, whole on every rank, as it is."""
    return _Reduce.apply(x, group, tag)


def gather_pieces(x: Tensor, dim: int, group: dist.ProcessGroup, tag: str) -> Tensor:
    """Forward: all-gather along `dim` into work that differs per rank. Backward: reduce-scatter."""
    return _GatherSum.apply(x, dim, group, tag)


def scatter_sum(x: Tensor, dim: int, group: dist.ProcessGroup, tag: str) -> Tensor:
    """Forward: reduce-scatter of partial sums along `dim`. Backward: all-gather."""
    return _ScatterSum.apply(x, dim, group, tag)


def take_piece(x: Tensor, dim: int, group: dist.ProcessGroup, tag: str) -> Tensor:
    """Forward: this rank's piece of an x that is whole on every rank. Backward: all-gather."""
    return _Take.apply(x, dim, group, tag)


def join_pieces(x: Tensor, dim: int, group: dist.ProcessGroup, tag: str) -> Tensor:
    """Forward: all-gather along `dim` into work that is the same on every rank. Backward: this rank's piece."""
    return _Join.apply(x, dim, group, tag)


def all_to_all(x: Tensor, outgoing: list[int] | None, incoming: list[int] | None, group, tag: str) -> Tensor:
    """Forward: exchange runs of rows (see `exchange`). Backward: the same exchange, reversed."""
    return _Exchange.apply(x, outgoing, incoming, group, tag)
