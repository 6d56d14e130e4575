"""Save and export: the model's weights as the public tensors, streamed one at a time from any layout.

`stored_tensors` says how each weight is stored (bf16, or MXFP4 pairs for routed experts); `save_hf_weights` writes
them into planned shards, `export_hf_weights` hands them out. Nothing here touches files that a loader could see:
that is `commit`'s.
"""

from __future__ import annotations

import copy
import json
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn

from k3.checkpoint import commit
from k3.checkpoint.errors import CheckpointError
from k3.checkpoint.gather import Gather
from k3.checkpoint.index import INDEX_FILE, index_text
from k3.checkpoint.names import is_ignored
from k3.checkpoint.progress import Progress, show
from k3.checkpoint.release import Release, Shard, Tensor
from k3.checkpoint.source import Source, read_config
from k3.checkpoint.writer import ShardWriter, write_durably
from k3.hf_config import PUBLISHED_QUANTIZATION
from k3.ops import mxfp4

Target = Literal["bf16", "mxfp4"]
SCALE_RULES = (*mxfp4.SCALE_RULES, "like_source")
DTYPES = {"BF16": torch.bfloat16, "F32": torch.float32}


@dataclass
class SaveReport:
    """What this rank wrote; `total_bytes` is the payload of the whole checkpoint."""

    shards: list[str]
    written_bytes: int
    total_bytes: int
    peak_extra_bytes: int
    duration_s: float = 0.0


class Encoder:
    """Turns whole weights into stored tensors: dtype, packing rule, padding of A_log, and what comes from a source."""

    def __init__(self, gather: Gather, release: Release, rule: str, source: Source | None):
        if rule not in SCALE_RULES:
            raise ValueError(f"scale_rule={rule!r} is unknown; use one of {', '.join(SCALE_RULES)}")
        if rule == "like_source" and source is None:
            raise ValueError("scale_rule='like_source' needs source=FOLDER, the packed checkpoint to be like")
        self.gather, self.release, self.rule, self.source = gather, release, rule, source
        self.peak_extra_bytes = 0

    def stored(self, planned: Tensor, receiver: int | None) -> list[torch.Tensor] | None:
        """Return the stored tensors of one planned weight (two for a pair) where wanted; every rank must call it."""
        wanted = receiver in (None, self.gather.rank)
        if is_ignored(planned.name):
            return [self.source.read(planned.name)] if wanted else None
        packed = planned.name.endswith("_packed")
        public = planned.name.removesuffix("_packed")
        whole = self.gather.fetch(public, torch.bfloat16 if packed else DTYPES[planned.dtype], receiver)
        if whole is None:
            return None
        made = list(self._pack(public, whole)) if packed else [_padded(whole, planned.shape)]
        self.peak_extra_bytes = max(
            self.peak_extra_bytes, sum(t.nbytes for t in {id(t): t for t in (whole, *made)}.values())
        )
        return made

    def _pack(self, public: str, whole: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if self.rule != "like_source":
            return mxfp4.pack(whole, self.rule)
        if not self.source.is_packed(public):
            return mxfp4.pack(whole)
        return mxfp4.pack_like(whole, self.source.read(public + "_scale").to(whole.device))


def _padded(whole: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """A_log gets its zeros back; everything else has its stored shape already."""
    missing = shape[0] - whole.shape[0]
    return torch.nn.functional.pad(whole, (0, missing)) if missing else whole


@torch.no_grad()
def export_hf_weights(
    model: nn.Module | Iterable[nn.Module],
    config: Any,
    parallel_state: Any = None,
    *,
    target: Target = "bf16",
    scale_rule: str = "even",
    source: str | Path | None = None,
    receiver: int | None = None,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (public name, stored tensor) in shard order: what `save_hf_weights` writes, without touching disk.

    Every rank must exhaust it; each sees all tensors, or only `receiver` does. A pair comes codes first.
    """
    with _encoder(model, config, parallel_state, target, scale_rule, source) as encoder:
        for group in encoder.release.groups:
            yield from _stream(encoder, list(group.tensors()), receiver)


@torch.no_grad()
def save_hf_weights(
    model: nn.Module | Iterable[nn.Module],
    folder: str | Path,
    config: Any,
    parallel_state: Any = None,
    *,
    target: Target = "bf16",
    scale_rule: str = "even",
    source: str | Path | None = None,
    max_shard_size_bytes: int | None = 5 * 1024**3,
    progress: bool | Callable[[int, int], object] | None = None,
) -> SaveReport:
    """Replace the checkpoint in `folder` by this model, as a whole or not at all; every rank must call it.

    `max_shard_size_bytes` bounds every file, header included; None writes one shard a layer whatever its size.
    `source` is the folder the weights came from: `like_source` reuses its scales, and its vision tensors are copied.
    Raises CheckpointError when anything could not be written; the folder then holds what it held before.
    """
    started, folder = time.monotonic(), Path(folder)
    with _encoder(model, config, parallel_state, target, scale_rule, source) as encoder:
        shards = encoder.release.shards(max_shard_size_bytes)
        with _staged(folder, encoder.gather) as staging, show(progress, encoder.release.size_bytes, "save") as bar:
            report = _write_shards(staging, encoder, shards, bar)
            with _together(encoder.gather):
                if encoder.gather.rank == 0:
                    hf = hf_config(config, target, encoder.release)
                    write_durably(staging / "config.json", json.dumps(hf, indent=2))
                    write_durably(staging / INDEX_FILE, index_text(encoder.release, shards, max_shard_size_bytes))
                    commit.commit(folder, [*(shard.file for shard in shards), "config.json", INDEX_FILE])
        with _together(encoder.gather):
            pass  # no rank returns before the first one has given the folder back
    report.duration_s = time.monotonic() - started
    return report


def hf_config(config: Any, target: Target, release: Release) -> dict[str, Any]:
    """Return the public config of what is written: quantization and vision are said exactly where they are stored."""
    hf = copy.deepcopy(config.to_hf())
    hf.pop("quantization_config", None)
    hf["text_config"].pop("quantization_config", None)
    if target == "mxfp4":
        hf["text_config"]["quantization_config"] = copy.deepcopy(PUBLISHED_QUANTIZATION)
    hf.pop("vision_config", None)
    if release.vision is not None:
        hf["vision_config"] = dict(release.vision)
    return hf


@contextmanager
def _encoder(model, config, parallel_state, target, scale_rule, source) -> Iterator[Encoder]:
    if target not in ("bf16", "mxfp4"):
        raise ValueError(f"target={target!r} is unknown; use 'bf16' or 'mxfp4'")
    release = Release(config, target)
    gather = Gather(model, config, parallel_state)
    if source is None:
        yield Encoder(gather, release, scale_rule, None)
        return
    with Source.open(source) as opened:
        if opened.check(config):
            release = replace(release, vision=read_config(source)["vision_config"])
        yield Encoder(gather, release, scale_rule, opened)


def _stream(encoder: Encoder, tensors: list[Tensor], receiver: int | None) -> Iterator[tuple[str, torch.Tensor]]:
    """Stored tensors of a run of planned ones, in their order."""
    for planned in tensors:
        if planned.name.endswith(".weight_scale"):
            continue  # came with its codes
        names = [planned.name, planned.name.removesuffix("_packed") + "_scale"]
        yield from zip(names, encoder.stored(planned, receiver) or [], strict=False)


def _write_shards(staging: Path, encoder: Encoder, shards: list[Shard], bar: Progress) -> SaveReport:
    """Write every shard on the rank it falls to; the others contribute their boxes."""
    gather, mine, written = encoder.gather, [], 0
    with _together(gather) as failures:
        for number, shard in enumerate(shards):
            owner, tensors = number % gather.world, list(shard.group.tensors())
            stream = _stream(encoder, tensors, owner)
            if owner == gather.rank and not failures:
                failures += _write_shard(staging / shard.file, tensors, stream, bar)
                mine.append(shard.file)
                written += shard.size_bytes
            for _ in stream:  # contribute; also after a failure, so that no peer waits for this rank
                pass
    return SaveReport(mine, written, encoder.release.size_bytes, encoder.peak_extra_bytes)


def _write_shard(path: Path, tensors: list[Tensor], stream: Iterator, bar: Progress) -> list[OSError]:
    """Write one shard; a full disk or a lost file system is returned, not raised."""
    try:
        with ShardWriter(path, tensors) as writer:
            for _, tensor in stream:
                writer.write(tensor)
                bar.advance(tensor.nbytes)
    except OSError as error:
        return [error]
    return []


@contextmanager
def _staged(folder: Path, gather: Gather) -> Iterator[Path]:
    """The staging folder of a save. Whatever fails before the commit leaves the folder as it was."""
    lock = None
    try:
        with _together(gather):
            if gather.rank == 0:
                lock = commit.begin(folder)
        yield folder / commit.STAGING
    except Exception as error:
        if lock is not None:
            commit.abandon(folder)
        if isinstance(error, OSError):
            raise CheckpointError(f"saving to {folder} failed: {error}; it holds what it held before") from error
        raise
    finally:
        if lock is not None:
            commit.release(folder, lock)


@contextmanager
def _together(gather: Gather) -> Iterator[list[Exception]]:
    """A block all ranks run; a failure on one rank fails them all at its end.

    Yields a list in which the block may leave a failure that it wants raised only then.
    """
    failures: list[Exception] = []
    try:
        yield failures
    except Exception as error:
        failures.append(error)
    reports: list[str | None] = [repr(failures[0]) if failures else None]
    if gather.world > 1:
        own, reports = reports[0], [None] * gather.world
        dist.all_gather_object(reports, own)
    if failures:
        raise failures[0]
    if failed := {rank: report for rank, report in enumerate(reports) if report}:
        raise CheckpointError(f"saving failed on ranks {failed}; the folder holds what it held before")
