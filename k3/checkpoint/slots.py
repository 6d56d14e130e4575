"""Which box of which public weight each parameter of a model holds, on this rank and on any other.

A slot is one public weight (an expert's, when stacked) and the part of it a rank stores. Loading fills slots, saving
reads them; both learn the split from `k3.sharding` alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from k3.checkpoint.names import GLOBALS, is_stack, layer_of, to_native, to_public
from k3.checkpoint.release import Release
from k3.sharding import canonical, local_slices

Box = tuple[slice, ...]
FIRST_STAGE = "language_model.model.embed_tokens.weight"


class Slot(NamedTuple):
    """The box of a public weight that `tensor`, a view of this rank's parameter, stores."""

    public: str
    box: Box
    tensor: torch.Tensor


@torch.no_grad()
def native_tensors(model: nn.Module | Iterable[nn.Module]) -> dict[str, torch.Tensor]:
    """Return this rank's part of every parameter and persistent buffer of a model, or of its chunks, by name."""
    chunks = [model] if isinstance(model, nn.Module) else list(model)
    found: dict[str, torch.Tensor] = {}
    for chunk in chunks:
        for name, tensor in chunk.state_dict(keep_vars=True).items():
            if canonical(name) in found:
                raise ValueError(f"{canonical(name)} is in two chunks; pass each chunk once")
            found[canonical(name)] = _local(canonical(name), tensor)
    return found


def _local(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a parameter that the sharding table splits."""
    if not isinstance(tensor, DTensor):
        return tensor
    from k3.parallel.data import sharded_by_fsdp

    if sharded_by_fsdp(tensor):
        raise NotImplementedError(
            f"{name} is sharded by FSDP; load before fully_shard_model, and save through k3.parallel.state"
        )
    return tensor.to_local()


@lru_cache(maxsize=8)
def native_shapes(config: Any) -> dict[str, tuple[int, ...]]:
    """Return the whole shape of every native tensor: experts stacked, A_log without its padding."""
    shapes: dict[str, tuple[int, ...]] = {}
    for tensor in Release(config, "bf16").tensors():
        native = to_native(tensor.name)
        if native.expert is None:
            shapes[native.name] = tensor.shape
        elif native.expert == 0:
            shapes[native.name] = (config.num_experts, *tensor.shape)
    a_log = {name: (config.kda_num_heads,) for name in shapes if name.endswith(".A_log")}
    return shapes | a_log


def rank_names(config: Any, layers: Iterable[int], first: bool, last: bool) -> set[str]:
    """Return the native names a pipeline stage with these layers must hold."""
    layers = set(layers)
    names = {name for name in native_shapes(config) if layer_of(name) in layers}
    for stem in GLOBALS:
        name = f"language_model.{stem}.weight"
        if first if name == FIRST_STAGE else last:
            names.add(name)
    return names


def slots(tensors: dict[str, torch.Tensor], config: Any, parallel: Any) -> Iterator[Slot]:
    """Yield the slots of this rank's native tensors. Raises ValueError where a local shape is not the table's."""
    shapes = native_shapes(config)
    for name, tensor in tensors.items():
        box = local_slices(name, shapes[name], parallel)
        expected = tuple(part.stop - part.start for part in box)
        if tuple(tensor.shape) != expected:
            raise ValueError(
                f"{name} is {list(tensor.shape)} here, the sharding table gives this rank {list(expected)}"
            )
        if not is_stack(name):
            yield Slot(name, box, tensor)
            continue
        for row, expert in enumerate(range(box[0].start, box[0].stop)):
            yield Slot(to_public(name, expert), box[1:], tensor[row])
