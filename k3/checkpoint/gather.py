"""Bring one public weight together from the ranks that hold its boxes, to one rank or to all; one tensor at a time.

Who holds what follows from the layout alone, so no rank has to ask. Every rank walks the same weights in the same
order: forward, a holder sends its box and a receiver assembles; there is no backward.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache, cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from k3.checkpoint.names import to_native
from k3.checkpoint.slots import Box, native_shapes, native_tensors, rank_names, slots
from k3.paths import announce
from k3.sharding import local_slices


class Gather:
    """The weights of a model under one layout. `fetch` returns a whole weight where it is wanted."""

    def __init__(self, model: nn.Module | Iterable[nn.Module], config: Any, parallel: Any = None):
        self.config, self.parallel = config, parallel
        self.world = 1 if parallel is None else parallel.world_size
        if self.world > 1 and (not dist.is_initialized() or dist.get_world_size() != self.world):
            raise ValueError(f"a layout of {self.world} ranks needs a process group of exactly {self.world} ranks")
        self.rank = dist.get_rank() if self.world > 1 else 0
        tensors = native_tensors(model)
        self.slots = {slot.public: slot for slot in slots(tensors, config, parallel)}
        self.device = next(iter(tensors.values())).device
        self._boxes = cache(self._boxes_of)
        if self.world == 1 and (lacking := sorted(set(native_shapes(config)) - set(tensors))):
            raise ValueError(f"the model lacks {lacking[:5]}; save needs every chunk of it")

    def fetch(self, public: str, dtype: torch.dtype, receiver: int | None = None) -> torch.Tensor | None:
        """Return the whole weight on `receiver` (None: on every rank), as `dtype`; None elsewhere."""
        holders = self._holders(public, receiver)
        if self.world == 1 or (receiver == self.rank and set(holders.values()) == {self.rank} and len(holders) == 1):
            return self._own(public, dtype)
        wanted = receiver in (None, self.rank)
        whole = self._empty(public, dtype) if wanted else None
        for box, holder in holders.items():
            piece = self._move(public, dtype, unfreeze(box), holder, receiver)
            if wanted:
                whole[unfreeze(box)] = piece
        return whole

    def _own(self, public: str, dtype: torch.dtype) -> torch.Tensor:
        return self.slots[public].tensor.detach().to(dtype)

    def _empty(self, public: str, dtype: torch.dtype) -> torch.Tensor:
        native = to_native(public)
        shape = native_shapes(self.config)[native.name]
        return torch.empty(shape if native.expert is None else shape[1:], dtype=dtype, device=self.device)

    def _move(self, public: str, dtype: torch.dtype, box: Box, holder: int, receiver: int | None):
        """One box from its holder to the receiver, or to all."""
        if holder == self.rank:
            piece = self._own(public, dtype).contiguous()
        else:
            piece = torch.empty([part.stop - part.start for part in box], dtype=dtype, device=self.device)
        if receiver is None:
            announce(f"{dist.get_backend()}.broadcast")
            dist.broadcast(piece, holder)
        elif holder != receiver and self.rank in (holder, receiver):
            announce(f"{dist.get_backend()}.send_recv")
            if self.rank == holder:
                dist.send(piece, receiver)
            else:
                dist.recv(piece, holder)
        return piece

    def _holders(self, public: str, receiver: int | None) -> dict[tuple, int]:
        """Distinct boxes of a public weight, each with the rank that sends it: the receiver itself, else the lowest."""
        native = to_native(public)
        found: dict[tuple, int] = {}
        for rank, box in self._boxes(native.name):
            if native.expert is not None:
                experts, *box = box
                if not experts[0] <= native.expert < experts[1]:
                    continue
            if tuple(box) not in found or rank == receiver:
                found[tuple(box)] = rank
        return found

    def _boxes_of(self, name: str) -> list[tuple[int, tuple]]:
        """(rank, box) of every rank that stores a part of the native tensor."""
        if self.world == 1:
            return [(0, freeze(tuple(slice(0, size) for size in native_shapes(self.config)[name])))]
        return [
            (rank, freeze(local_slices(name, native_shapes(self.config)[name], state)))
            for rank, state in enumerate(self._states)
            if name in self._names[rank]
        ]

    @cached_property
    def _states(self) -> list[Any]:
        return [self.parallel.at(rank, self.parallel.mesh) for rank in range(self.world)]

    @cached_property
    def _names(self) -> list[set[str]]:
        """Native names of all chunks of every rank."""
        return [set().union(*(self._chunk_names(state, v) for v in range(state.vpp_size))) for state in self._states]

    def _chunk_names(self, state: Any, virtual: int) -> set[str]:
        state = state.chunk(virtual)
        return rank_names(self.config, state.layer_indices(self.config), state.pp_is_first, state.pp_is_last)


def freeze(box: Box) -> tuple[tuple[int, int], ...]:
    """A box as a dict key."""
    return tuple((part.start, part.stop) for part in box)


def unfreeze(box: tuple[tuple[int, int], ...]) -> Box:
    return tuple(slice(start, stop) for start, stop in box)
