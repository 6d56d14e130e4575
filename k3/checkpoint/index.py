"""`model.safetensors.index.json`: read strictly, and audited against what the configuration demands.

Decoding is msgspec's, which keeps the last of two equal keys; a count of quotation marks shows whether any were lost,
and only then is the file read again by a parser that names them. Imports no torch.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from dataclasses import dataclass, field
from itertools import repeat
from pathlib import Path
from typing import Any

import msgspec

from k3.checkpoint.errors import CheckpointError
from k3.checkpoint.release import Release, Shard

INDEX_FILE = "model.safetensors.index.json"
SHOWN = 20  # names listed per fault; the counts are always complete


class _File(msgspec.Struct):
    weight_map: dict[str, str]
    metadata: msgspec.Raw = msgspec.Raw()


@dataclass(frozen=True)
class Index:
    """A decoded index: file of every key, its metadata, and the SHA-256 of its bytes."""

    weight_map: dict[str, str]
    metadata: dict[str, Any]
    sha256: str
    size_bytes: int


@dataclass
class Audit:
    """What an index lacks or has too much of; every list holds at most `SHOWN` names, `counts` all of them."""

    counts: Counter = field(default_factory=Counter)
    faults: dict[str, list[str]] = field(default_factory=dict)

    def add(self, kind: str, messages: list[str]) -> None:
        if messages:
            self.counts[kind] += len(messages)
            kept = self.faults.setdefault(kind, [])
            kept += messages[: SHOWN - len(kept)]

    @property
    def passed(self) -> bool:
        return not self.counts

    def text(self) -> str:
        """Counts and the listed names, one a line."""
        lines = []
        for kind, names in self.faults.items():
            lines += [f"{self.counts[kind]} {kind}:", *(f"  {name}" for name in names)]
            lines += [f"  ... {self.counts[kind] - len(names)} more"] * (self.counts[kind] > len(names))
        return "\n".join(lines)


def read_index(path: str | Path) -> Index:
    """Decode an index file. Raises CheckpointError for what is not one, or names a key twice."""
    path = Path(path)
    raw = path.read_bytes()
    try:
        file = msgspec.json.decode(raw, type=_File)
        metadata = json.loads(bytes(file.metadata) or b"{}")
    except (msgspec.DecodeError, ValueError) as error:
        raise CheckpointError(f"{path.name} is not a checkpoint index: {error}; write it again") from error
    if not _every_key_kept(raw, file):
        json.loads(raw, object_pairs_hook=lambda pairs: _unique(path, pairs))
    return Index(file.weight_map, metadata, hashlib.sha256(raw).hexdigest(), len(raw))


def _every_key_kept(raw: bytes, file: _File) -> bool:
    """Whether the quotation marks of the file are those of the decoded keys: 4 an entry, 2 a top-level key."""
    metadata = bytes(file.metadata)
    expected = 4 * len(file.weight_map) + 2 + (2 + metadata.count(b'"') if metadata else 0)
    return b"\\" not in raw and raw.count(b'"') == expected


def _unique(path: Path, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        twice = [name for name, count in Counter(name for name, _ in pairs).items() if count > 1]
        raise CheckpointError(f"{path.name} names {', '.join(twice[:SHOWN])} twice; every key has one shard")
    return found


def index_text(release: Release, shards: list[Shard], max_shard_size_bytes: int | None) -> str:
    """Return the index of planned shards; the limit is recorded where it cut, so that an audit can plan the same."""
    metadata: dict[str, Any] = {"total_size": release.size_bytes}
    if len(shards) != len(release.groups):
        metadata["max_shard_size_bytes"] = max_shard_size_bytes
    weight_map = {name: shard.file for shard in shards for name in shard.names}
    return json.dumps({"metadata": metadata, "weight_map": weight_map}, indent=2)


def audit(index: Index, release: Release) -> Audit:
    """Compare an index with the release its configuration describes. Takes the index's map apart as it goes."""
    found = Audit()
    left = index.weight_map
    for shard in release.shards(index.metadata.get("max_shard_size_bytes")):
        names = shard.names
        files = list(map(left.pop, names, repeat(None)))
        if files.count(shard.file) != len(files):
            _explain(found, shard, names, files)
    found.add("extra", [f"{name} in {file}" for name, file in left.items()])
    total = index.metadata.get("total_size")
    if total != release.size_bytes:
        found.add("total", [f"metadata.total_size is {total}, the configuration gives {release.size_bytes}"])
    return found


def _explain(found: Audit, shard: Shard, names: list[str], files: list[str | None]) -> None:
    """Sort what one planned shard does not find into missing, misplaced and split pairs."""
    placed = dict(zip(names, files, strict=True))
    found.add("missing", [f"{name} (expected in {shard.file})" for name, file in placed.items() if file is None])
    misplaced = {name: file for name, file in placed.items() if file not in (None, shard.file)}
    found.add("misplaced", [f"{name} in {file}, expected in {shard.file}" for name, file in misplaced.items()])
    for stem in (name.removesuffix("_packed") for name in names if name.endswith("_packed")):
        packed, scale = placed[stem + "_packed"], placed[stem + "_scale"]
        if packed and scale and packed != scale:
            found.add("split", [f"{stem}_packed in {packed} but {stem}_scale in {scale}"])
