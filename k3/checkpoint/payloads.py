"""Stream every tensor of a release through public -> native -> public and compare raw bytes.

Plain tensors are copied as the loader and the saver copy them and compared bit for bit. Packed pairs are decoded to
bf16 and packed with the source's scale, block by block, by the codec that loading and saving use. Each byte is read
once, through a buffer that fits a cache.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch

from k3.checkpoint.errors import CheckpointError
from k3.checkpoint.header import Stored
from k3.checkpoint.names import EXPERTS, is_ignored, layer_of, to_native
from k3.checkpoint.progress import show
from k3.checkpoint.release import Release
from k3.checkpoint.source import Source
from k3.ops import mxfp4

CHUNK_BYTES = mxfp4.PIECE * mxfp4.BLOCK // 2  # one buffer a shard
STRUCTURES = {
    "routed experts": EXPERTS,
    "shared experts": "block_sparse_moe.shared_experts.",
    "router": "block_sparse_moe.gate.",
    "latent projections": "block_sparse_moe.routed_expert_",
    "dense": ".mlp.",
    "norms and residuals": "norm.weight",
    "residual queries": "res_proj.weight",
}


def check_payloads(
    source: Source, release: Release, *, jobs: int, resume: Path | None, identity: str, progress: Any = None
) -> dict[str, Any]:
    """Check every shard, `jobs` at once, skipping those `resume` knows; return coverage and the structural sample.

    Raises CheckpointError naming the first tensor whose bytes do not survive.
    """
    shards: dict[str, list[str]] = {}
    for name, entry in sorted(source.stored.items(), key=lambda item: item[1].begin):
        shards.setdefault(entry.file, []).append(name)
    sample = sample_names(source.stored, release)
    finished = Finished(resume, source.folder, identity)
    total = sum(entry.end - entry.begin for entry in source.stored.values())
    with show(progress, total, "validate") as bar, ThreadPoolExecutor(jobs) as pool:
        left = [file for file in shards if file not in finished]
        waiting = {pool.submit(_check_shard, source, release, file, shards[file]): file for file in left}
        try:
            for done in as_completed(waiting):
                finished.add(waiting[done], done.result())
                bar.advance(sum(source.stored[n].end - source.stored[n].begin for n in shards[waiting[done]]))
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    return {
        "coverage": finished.table(),
        "sample": [
            {"name": n, "dtype": source.stored[n].dtype, "shape": source.stored[n].shape} for n in sorted(sample)
        ],
        "resumed_shards": finished.resumed,
    }


def _layout(entry: Stored) -> dict[str, Any]:
    return {"dtype": entry.dtype, "shape": entry.shape}


def sample_names(stored: dict[str, Stored], release: Release) -> set[str]:
    """First and last layer, every MLA layer with its neighbours, and in them five experts spread over the stack."""
    config = release.config
    last = config.num_hidden_layers - 1
    mla = [layer for layer in range(last + 1) if config.attention_type(layer) == "mla"]
    layers = {0, last} | {near for layer in mla for near in (layer - 1, layer, layer + 1) if 0 <= near <= last}
    quarters = {max(config.num_experts * part // 4 - 1, 0) for part in range(5)}
    return {
        name for name in stored
        if (layer := layer_of(name)) is None or (layer in layers and to_native(name).expert in {None, *quarters})
    }  # fmt: skip


def structure_of(name: str, release: Release) -> str:
    """Return the structure a public tensor belongs to."""
    if is_ignored(name):
        return "vision and projector"
    layer = layer_of(name)
    if layer is None:
        return "globals"
    if ".self_attn." in name:
        return release.config.attention_type(layer).upper()
    return next(structure for structure, part in STRUCTURES.items() if part in name)


class Finished:
    """Shards checked by an earlier run of the same release, remembered with size and modification time."""

    def __init__(self, path: Path | None, folder: Path, identity: str):
        self.path, self.folder, self.identity = path, folder, identity
        self.files: dict[str, dict[str, int]] = {}
        if path is not None and path.exists():
            for line in path.read_text().splitlines():
                self._recall(line)
        self.resumed = len(self.files)

    def __contains__(self, file: str) -> bool:
        return file in self.files

    def _recall(self, line: str) -> None:
        try:
            entry = json.loads(line)
        except json.JSONDecodeError:
            return  # the line that was being written when the run ended
        if entry["identity"] == self.identity and entry["state"] == self._state(entry["file"]):
            self.files[entry["file"]] = entry["coverage"]

    def _state(self, file: str) -> list[int]:
        stat = (self.folder / file).stat()
        return [stat.st_size, stat.st_mtime_ns]

    def add(self, file: str, coverage: Counter[str]) -> None:
        self.files[file] = dict(coverage)
        if self.path is not None:
            entry = {"identity": self.identity, "file": file, "state": self._state(file), "coverage": dict(coverage)}
            with self.path.open("a") as log:
                log.write(json.dumps(entry) + "\n")

    def table(self) -> dict[str, dict[str, int]]:
        """Tensors by structure and transform, over all shards."""
        counts = sum((Counter(coverage) for coverage in self.files.values()), Counter())
        table: dict[str, dict[str, int]] = {}
        for key, count in sorted(counts.items()):
            structure, transform = key.split("|")
            table.setdefault(structure, {})[transform] = count
        return table


def _check_shard(source: Source, release: Release, file: str, names: list[str]) -> Counter[str]:
    """Check one shard in the order of its bytes; return tensors by structure and transform."""
    covered: Counter[str] = Counter()
    with (source.folder / file).open("rb", buffering=0) as opened:
        shard = OpenShard(opened, bytearray(CHUNK_BYTES), mxfp4.Survival())
        for name in names:
            transform = _check_tensor(source, release, shard, name)
            covered[f"{structure_of(name, release)}|{transform}"] += 1
    return covered


def _check_tensor(source: Source, release: Release, shard: OpenShard, name: str) -> str:
    entry = source.stored[name]
    if name.endswith("_packed") and entry.dtype == "U8":
        _check_pair(source, shard, name.removesuffix("_packed"))
        return "mxfp4 codes, decoded and packed"
    if name.endswith("_scale") and entry.dtype == "U8":
        return "mxfp4 scales, with their codes"
    if name.endswith(".A_log"):
        _check_a_log(shard.whole(entry, name), entry, name, release.config.kda_num_heads)
        return "cut and padded"
    dtype = {"BF16": torch.bfloat16, "F32": torch.float32}[entry.dtype]
    for chunk in shard.chunks(entry, name):
        public = torch.frombuffer(chunk, dtype=dtype)
        native = torch.empty_like(public).copy_(public)
        if not torch.equal(native.view(torch.uint8), public.view(torch.uint8)):
            raise CheckpointError(f"{entry.file}: {name} does not survive public -> native -> public")
    return f"{entry.dtype} kept"


class OpenShard(NamedTuple):
    """A shard being read through one buffer, and the codec's own buffers."""

    file: BinaryIO
    buffer: bytearray
    codec: mxfp4.Survival

    def chunks(self, entry: Stored, name: str) -> Iterator[memoryview]:
        """The bytes of a tensor in order, in pieces that are valid until the next one."""
        self.file.seek(entry.begin)
        left = entry.end - entry.begin
        while left:
            chunk = memoryview(self.buffer)[: min(left, len(self.buffer))]
            if self.file.readinto(chunk) != len(chunk):
                raise CheckpointError(f"{entry.file}: {name} ends early; fetch the shard again")
            left -= len(chunk)
            yield chunk

    def whole(self, entry: Stored, name: str) -> bytearray:
        """All bytes of a tensor, for small ones."""
        return bytearray().join(self.chunks(entry, name))


def _check_a_log(data: bytearray, entry: Stored, name: str, heads: int) -> None:
    """Cut to the live heads as the loader does, pad as the saver does."""
    public = torch.frombuffer(data, dtype=torch.float32)
    again = torch.nn.functional.pad(public[:heads].clone(), (0, entry.shape[0] - heads))
    if not torch.equal(again.view(torch.uint8), public.view(torch.uint8)):
        raise CheckpointError(f"{entry.file}: {name} has values behind its {heads} heads; loading would drop them")


def _check_pair(source: Source, shard: OpenShard, stem: str) -> None:
    """Send a pair through the codec, as its codes are read."""
    packed, scales = stem + "_packed", source.stored[stem + "_scale"]
    scale = torch.frombuffer(shard.whole(scales, stem + "_scale"), dtype=torch.uint8)
    pieces = (
        torch.frombuffer(chunk, dtype=torch.uint8).view(-1, mxfp4.BLOCK // 2)
        for chunk in shard.chunks(source.stored[packed], packed)
    )
    block = shard.codec.first_lost(pieces, scale)
    if block is not None:
        where = f"block {block}, scale {int(scale[block])}"
        raise CheckpointError(f"{scales.file}: {packed} does not survive decoding and packing: {where}")
