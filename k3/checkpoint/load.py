"""Load a public-layout folder into a model of any layout, reading only the bytes this rank stores.

Everything that headers can tell is checked before the model is touched. Then every parameter is filled with NaN and
must be overwritten; a failure on the way leaves all of them NaN, on every rank.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from k3.checkpoint.errors import CheckpointError
from k3.checkpoint.names import to_public
from k3.checkpoint.progress import Progress, show
from k3.checkpoint.release import BLOCK
from k3.checkpoint.slots import Box, Slot, native_shapes, native_tensors, rank_names, slots
from k3.checkpoint.source import Source
from k3.ops import mxfp4
from k3.sharding import local_slices

SOURCE_DTYPES = {"BF16": torch.bfloat16, "F32": torch.float32}
POISON = {  # integer view and bits of a NaN
    torch.bfloat16: (torch.int16, 0x7FEB),
    torch.float16: (torch.int16, 0x7EEB),
    torch.float32: (torch.int32, 0x7FC0BEEF),
    torch.float64: (torch.int64, 0x7FF800000000BEEF),
}


@dataclass
class LoadReport:
    """What a load read and what it needed: sizes in bytes; `ignored` lists source keys a text model has no use for."""

    tensors: int = 0
    packed_pairs: int = 0
    read_bytes: int = 0
    peak_extra_bytes: int = 0
    largest_tensor_bytes: int = 0
    ignored: list[str] = field(default_factory=list)
    duration_s: float = 0.0

    def note(self, read: list[torch.Tensor], made: list[torch.Tensor]) -> None:
        self.tensors += 1
        self.packed_pairs += len(read) == 2
        self.read_bytes += sum(t.nbytes for t in read)
        self.peak_extra_bytes = max(self.peak_extra_bytes, sum(t.nbytes for t in (*read, *made)))


@torch.no_grad()
def load_hf_weights(
    model: nn.Module | Iterable[nn.Module],
    folder: str | Path,
    config: Any,
    parallel_state: Any = None,
    *,
    progress: bool | Callable[[int, int], object] | None = None,
) -> LoadReport:
    """Fill `model` (or its chunks) from `folder`; packed experts are decoded to the parameters' dtype.

    `progress` is a callback (done bytes, all bytes), or whether to draw a bar; None draws one on a terminal.
    Raises CheckpointError (the folder is at fault: the model is untouched) or ValueError (the model is); after a
    failure while reading, every parameter of every rank is NaN.
    """
    started = time.monotonic()
    chunks = [model] if isinstance(model, nn.Module) else list(model)
    with ExitStack() as opened:
        with _same_fate(parallel_state):
            tensors = native_tensors(chunks)
            source = opened.enter_context(Source.open(folder))
            report = LoadReport(
                ignored=source.check(config), largest_tensor_bytes=max(t.nbytes for t in tensors.values())
            )
            _check_model(chunks, tensors, config)
            plan = list(slots(tensors, config, parallel_state))
            _check_dtypes(source, plan)
            _check_padding(source, plan, config)
        with (
            _same_fate(parallel_state, undo=lambda: poison(tensors.values())),
            show(progress, sum(slot.tensor.nbytes for slot in plan), "load") as bar,
        ):
            _fill(source, plan, tensors, report, bar)
    report.duration_s = time.monotonic() - started
    return report


def read_packed_experts(
    folder: str | Path, config: Any, parallel_state: Any, names: Iterable[str]
) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """Yield (native name, codes [E, out, in/2], scales [E, out, in/32]) of this rank's expert stacks, kept packed."""
    with Source.open(folder) as source:
        source.check(config)
        for name in names:
            experts, *box = local_slices(name, native_shapes(config)[name], parallel_state)
            pairs = []
            for expert in range(experts.start, experts.stop):
                public = to_public(name, expert)
                if not source.is_packed(public):
                    raise CheckpointError(f"{source.folder}: {public} is not packed; load it as a plain weight")
                aligned, _ = _whole_blocks(tuple(box))
                if aligned != tuple(box):
                    raise ValueError(f"{public}: inputs {box[1]} cut a block of {BLOCK}; use a smaller etp_size")
                pairs.append(_read_pair(source, public, aligned))
            codes, scales = zip(*pairs, strict=True)
            yield name, torch.stack(codes), torch.stack(scales)


def _check_model(chunks: list[nn.Module], tensors: dict[str, torch.Tensor], config: Any) -> None:
    """The chunks must hold exactly their stages' tensors, on a real device, F32 ones wide enough."""
    expected: set[str] = set()
    for chunk in chunks:
        expected |= rank_names(config, chunk.layer_indices, chunk.first_stage, chunk.last_stage)
    if expected != set(tensors):
        lacking, strange = sorted(expected - set(tensors)), sorted(set(tensors) - expected)
        raise ValueError(f"the model is not of this configuration: lacks {lacking[:5]}, has unknown {strange[:5]}")
    for name, tensor in tensors.items():
        if tensor.is_meta:
            raise ValueError(f"{name} is on the meta device; allocate the model (to_empty) before loading")


def _fill(source: Source, plan: list[Slot], tensors: dict, report: LoadReport, bar: Progress) -> None:
    """Poison everything, overwrite it slot by slot, and look for poison that is left."""
    poison(tensors.values())
    for slot in plan:
        _copy(source, slot, report)
        bar.advance(slot.tensor.nbytes)
    left = [name for name, tensor in tensors.items() if is_poisoned(tensor)]
    if left:
        raise CheckpointError(f"{source.folder}: {left[:5]} were not overwritten completely; this is a fault in k3")


def poison(tensors: Iterable[torch.Tensor]) -> None:
    """Fill tensors with a NaN whose payload no conversion produces."""
    for tensor in tensors:
        integer, pattern = POISON[tensor.dtype]
        tensor.detach().view(integer).fill_(pattern)


def is_poisoned(tensor: torch.Tensor) -> bool:
    """Whether any element still holds the NaN of `poison`."""
    integer, pattern = POISON[tensor.dtype]
    return bool((tensor.detach().view(integer) == pattern).any())


@contextmanager
def _same_fate(parallel_state: Any, undo: Callable[[], None] | None = None) -> Iterator[None]:
    """When the block fails on any rank, undo it and raise on all; ranks agree where a mesh connects them."""
    failure: Exception | None = None
    try:
        yield
    except Exception as error:
        failure = error
    failed = _failed_ranks(failure, parallel_state)
    if failed and undo is not None:
        undo()
    if failure is not None:
        raise failure
    if failed:
        raise CheckpointError(f"loading failed on ranks {failed}, so it failed on all; see their errors")


def _failed_ranks(failure: Exception | None, parallel_state: Any) -> list[int]:
    if getattr(parallel_state, "mesh", None) is None:
        return [0] if failure is not None else []
    flags: list[bool] = [False] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(flags, failure is not None)
    return [rank for rank, flag in enumerate(flags) if flag]


def _check_dtypes(source: Source, plan: list[Slot]) -> None:
    """Nothing becomes narrower: F32 stays F32, and no 16-bit float other than bf16 holds what bf16 can."""
    for slot in plan:
        stored = "BF16" if source.is_packed(slot.public) else source.stored[slot.public].dtype
        if torch.promote_types(SOURCE_DTYPES[stored], slot.tensor.dtype) != slot.tensor.dtype:
            raise ValueError(f"{slot.public} is stored as {stored} and would be narrowed to {slot.tensor.dtype}")


def _copy(source: Source, slot: Slot, report: LoadReport) -> None:
    """Overwrite one slot with its box of the source, decoded where the source is packed."""
    if not source.is_packed(slot.public):
        stored = source.read(slot.public, slot.box)
        slot.tensor.copy_(stored)
        return report.note([stored], [])
    aligned, inner = _whole_blocks(slot.box)
    packed, scale = _read_pair(source, slot.public, aligned)
    device = slot.tensor.device
    values = mxfp4.unpack(packed.to(device), scale.to(device), slot.tensor.dtype)
    slot.tensor.copy_(values[:, inner])
    return report.note([packed, scale], [values])


def _check_padding(source: Source, plan: list[Slot], config: Any) -> None:
    """What follows the live heads of A_log is dropped, so it must be zeros."""
    for slot in plan:
        if slot.public.endswith(".A_log"):
            entry = source.stored[slot.public]
            if source.read(slot.public, (slice(config.kda_num_heads, entry.shape[0]),)).any():
                raise CheckpointError(
                    f"{entry.file}: {slot.public} is not zero behind its {config.kda_num_heads} heads; "
                    "loading would drop these values"
                )


def _whole_blocks(box: Box) -> tuple[Box, slice]:
    """Widen the inputs of a box to whole MXFP4 blocks; return it and where the box lies inside."""
    rows, inputs = box
    start, stop = inputs.start // BLOCK * BLOCK, -(-inputs.stop // BLOCK) * BLOCK
    return (rows, slice(start, stop)), slice(inputs.start - start, inputs.stop - start)


def _read_pair(source: Source, public: str, box: Box) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scales of a box whose inputs are whole blocks."""
    rows, inputs = box
    packed = source.read(public + "_packed", (rows, slice(inputs.start // 2, inputs.stop // 2)))
    scale = source.read(public + "_scale", (rows, slice(inputs.start // BLOCK, inputs.stop // BLOCK)))
    return packed, scale
