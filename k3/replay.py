"""Router replay: record the experts one run chooses and make another run choose the same, under any layout.

Routing flips dominate low-precision comparisons between layouts, kernels or engines; with the choice replayed, only
arithmetic is left. Weights stay the run's own: they are gathered from its own scores at the replayed experts, so the
router keeps its gradient. Recorded choices are whole, [B, T, layers, k] in global token order; the packing helpers
turn them into what a rank of a layout replays.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from k3.moe import Router
from k3.sequence import pack_rows, unpack_thd_forward_output

__all__ = [
    "pack_r3_replay_mask",
    "pack_routed_experts",
    "record_routing",
    "replay_routing",
    "router_replay_roots",
    "unpack_thd_forward_output",
]


def router_replay_roots(models: nn.Module | Sequence[nn.Module]) -> dict[int, Router]:
    """Return the routers of a model, or of this rank's chunks, by global layer index, ascending."""
    chunks = [models] if isinstance(models, nn.Module) else list(models)
    routers = {
        int(index): layer.ffn.gate
        for chunk in chunks
        for index, layer in chunk.decoder.layers.items()
        if isinstance(getattr(layer.ffn, "gate", None), Router)
    }
    return dict(sorted(routers.items()))


@contextmanager
def record_routing(models: nn.Module | Sequence[nn.Module]) -> Iterator[dict[int, list[Tensor]]]:
    """Collect, per layer, the choices [N, k] of every forward inside the block, in this rank's token order."""
    chosen: dict[int, list[Tensor]] = {}
    with _selecting(models, lambda index, own: lambda scores: _keep(chosen, index, own(scores))):
        yield chosen


@contextmanager
def replay_routing(
    models: nn.Module | Sequence[nn.Module],
    routing: dict[int, Tensor] | dict[int, list[Tensor]],
    mask: Tensor | None = None,
) -> Iterator[None]:
    """Choose the recorded experts inside the block: per layer [N, k] for every forward, or a list, one per forward.

    mask [N] bool: tokens that replay; the others choose for themselves. Raises ValueError where the shapes differ.
    """
    queues = {index: list(value) if isinstance(value, (list, tuple)) else value for index, value in routing.items()}
    missing = set(router_replay_roots(models)) - set(queues)
    if missing:
        raise ValueError(f"no routing for layers {sorted(missing)}; record every routed layer of this rank")

    def replace(index: int, own: Callable[[Tensor], Tensor]):
        return lambda scores: _replayed(queues[index], own, scores, mask, index)

    with _selecting(models, replace):
        yield


def _keep(chosen: dict[int, list[Tensor]], index: int, idx: Tensor) -> Tensor:
    chosen.setdefault(index, []).append(idx.clone())
    return idx


def _replayed(source: Any, own: Callable, scores: Tensor, mask: Tensor | None, index: int) -> Tensor:
    if isinstance(source, list) and not source:
        raise ValueError(f"layer {index} runs more forwards than were recorded; record one routing per microbatch")
    idx = (source.pop(0) if isinstance(source, list) else source).to(scores.device, torch.int64)
    if idx.shape[0] != scores.shape[0]:
        raise ValueError(
            f"layer {index}: routing of {idx.shape[0]} tokens for {scores.shape[0]}; pack it with this rank's layout"
        )
    return idx if mask is None else torch.where(mask.to(scores.device).unsqueeze(-1), idx, own(scores))


@contextmanager
def _selecting(models, wrap: Callable[[int, Callable], Callable]) -> Iterator[None]:
    """Put another `select` on every router, and afterwards what was there; nested ones wrap each other."""
    roots = router_replay_roots(models)
    before = {index: vars(router).get("select") for index, router in roots.items()}
    for index, router in roots.items():
        router.select = wrap(index, router.select)
    try:
        yield
    finally:
        for index, router in roots.items():
            del router.select
            if before[index] is not None:
                router.select = before[index]


def pack_routed_experts(
    routed: Tensor | Sequence[Tensor],
    layers: Sequence[int],
    *,
    layout: Any = None,
    parallel: Any = None,
    multiple: int = 1,
    fill: int = 0,
) -> dict[int, Tensor]:
    """Turn whole choices into what this rank replays: per layer [N, k] in its token order.

    routed: [B, T, layers, k] for rows, or one [T_i, layers, k] per document, which are packed as their ids are (padded
    to `multiple` with expert `fill`). `layers`: the global indices of the third axis. `layout` splits tokens over cp,
    `parallel` over tp under sequence parallelism.
    """
    whole = routed if isinstance(routed, Tensor) else pack_rows(list(routed), multiple, fill)[0]
    if whole.ndim != 4 or whole.shape[2] != len(layers):
        raise ValueError(
            f"routed experts of shape {tuple(whole.shape)} for {len(layers)} layers; give [B, T, layers, k] or "
            "one [T_i, layers, k] per document"
        )
    mine = _own_tokens(whole, layout, parallel)
    return {layer: mine[:, :, place].flatten(0, 1).contiguous() for place, layer in enumerate(layers)}


def pack_r3_replay_mask(
    mask: Tensor | Sequence[Tensor], *, layout: Any = None, parallel: Any = None, multiple: int = 1
) -> Tensor:
    """Turn a whole mask of the tokens to replay, [B, T] or one [T_i] per document, into this rank's [N] bool.

    Padding does not replay: it routes for itself.
    """
    whole = mask if isinstance(mask, Tensor) else pack_rows([m.bool() for m in mask], multiple, False)[0]
    if whole.ndim != 2:
        raise ValueError(f"replay mask of shape {tuple(whole.shape)}; give [B, T] or one [T_i] per document")
    return _own_tokens(whole.bool(), layout, parallel).flatten()


def _own_tokens(x: Tensor, layout: Any, parallel: Any) -> Tensor:
    """x [B, T, ...] -> this rank's tokens: its cp share, and of that its tp share under sequence parallelism."""
    if hasattr(layout, "split"):
        x = layout.split(x)
    if parallel is not None and parallel.sequence_parallel and parallel.tp_size > 1:
        x = x.chunk(parallel.tp_size, dim=1)[parallel.tp_rank]
    return x
