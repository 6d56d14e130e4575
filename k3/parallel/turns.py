"""State passing over head groups in turn: a rank runs one group of heads after the other from the state that enters.

After each group its last state goes to the next rank, which runs that group while this rank runs the next one:
groups + cp - 1 turns of 1/groups of the heads, beside the two runs over all heads that need no turns. Every turn ends
in one exchange in which all ranks take part, so backward is the same turns in reverse.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from k3.kda import KDAState
from k3.parallel import collectives
from k3.precision import wide_dtype

TOKENS_PER_GROUP = 8192  # with fewer local tokens a group the launches of a turn cost more than its kernels


class _KeepInGraph(Function):
    @staticmethod
    def forward(ctx, x, other):
        ctx.other = other.shape, other.dtype, other.device
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        shape, dtype, device = ctx.other
        return grad, torch.zeros(shape, dtype=dtype, device=device)


def keep_in_graph(x: Tensor, other: Tensor) -> Tensor:
    """Return x; in backward `other` gets a zero gradient.

    A rank that does not use a gathered tensor still has to take part in its backward collective.
    """
    return _KeepInGraph.apply(x, other)


def choose_groups(heads: int, ranks: int, local_tokens: int) -> int:
    """Head groups for `heads` local heads, 1 where turns would not beat two runs over all heads.

    The largest divisor of `heads` that is at most four for each rank that waits, and leaves every group enough tokens.
    """
    most = min(4 * (ranks - 1), local_tokens // TOKENS_PER_GROUP)
    groups = max([part for part in range(1, most + 1) if heads % part == 0], default=1)
    return groups if groups > ranks - 1 else 1


def run_in_turns(
    layout: Any,
    core: Callable,
    tensors: Sequence[Tensor],
    weights: Any,
    history: Sequence[Tensor | None],
    groups: int,
    bounds: Tensor | None,
) -> Tensor:
    """`core` on this rank's tokens, group by group from the states of the rank before: o [B, T/cp, H, V].

    `tensors` are q, k, v, z, beta; `history` the convolution inputs before them; `bounds` the local cu_seqlens.
    """
    size, rank = layout.parallel.cp_size, layout.parallel.cp_rank
    parts = list(zip(*(_split(x, groups) for x in (*tensors, *history)), strict=True))
    own = [type(weights)(*group) for group in zip(*(w.chunk(groups) for w in weights), strict=True)]
    nothing = arrived = _no_state(tensors, weights, groups)
    outputs = []
    for turn in range(groups + size - 1):
        leaving, group = nothing, turn - rank
        if 0 <= group < groups:
            past = KDAState(*parts[group][5:], _entering(layout, arrived))
            o, after = core(*parts[group][:5], own[group], cu_seqlens=bounds, state=past, keep_state=True)
            outputs.append(o)
            leaving = after.S[-len(o) :] if rank + 1 < size else nothing
        if turn < groups + size - 2:
            arrived = _pass_on(layout.parallel, keep_in_graph(leaving, arrived), turn, groups, len(tensors[0]))
    return keep_in_graph(torch.cat(outputs, dim=2), arrived)


def _split(x: Tensor | None, groups: int) -> Sequence[Tensor | None]:
    """[B, T, H * F] as `groups` tensors of neighbouring heads."""
    return [None] * groups if x is None else [part.contiguous() for part in x.chunk(groups, dim=-1)]


def _no_state(tensors: Sequence[Tensor], weights: Any, groups: int) -> Tensor:
    """No rows of the states of one group, in the graph of what a layer trains so that backward reaches every turn."""
    q, beta = tensors[0], tensors[-1]
    heads = beta.shape[-1] // groups
    width = q.shape[-1] // beta.shape[-1]
    rows = q.new_empty(0, heads, width, width, dtype=wide_dtype(q.dtype))
    return keep_in_graph(keep_in_graph(rows, beta), weights.dt_bias)


def _entering(layout: Any, arrived: Tensor) -> Tensor | None:
    """The initial states of this rank's pieces of documents: what arrived, then zeros; None where none continues."""
    if not layout.continues(layout.parallel.cp_rank):
        return None
    pieces = len(layout.spans) - 1
    return torch.cat([arrived, arrived.new_zeros(pieces, *arrived.shape[1:])]) if pieces else arrived


def _pass_on(parallel: Any, leaving: Tensor, turn: int, groups: int, rows: int) -> Tensor:
    """Send this turn's last states to the next rank; return those of the rank before, or no rows."""
    size, rank = parallel.cp_size, parallel.cp_rank
    outgoing, incoming = [0] * size, [0] * size
    if rank + 1 < size:
        outgoing[rank + 1] = len(leaving)
    if rank > 0 and 0 <= turn - (rank - 1) < groups:
        incoming[rank - 1] = rows
    return collectives.all_to_all(leaving, outgoing, incoming, parallel.group("cp"), "kda")
