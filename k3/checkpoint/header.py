"""Safetensors headers, read strictly: what a shard holds and where, without its payload. Imports no torch.

The safetensors library reads payloads; this reads headers because it must name a key given twice, a gap, an overlap or
a cut file, and because headers alone must be readable without torch.
"""

from __future__ import annotations

import json
import struct
from collections import Counter
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from k3.checkpoint.errors import CheckpointError
from k3.checkpoint.release import ITEM_BYTES

MAX_HEADER_BYTES = 100_000_000  # the format's own limit


class Stored(NamedTuple):
    """One tensor in a shard; `begin` and `end` are file offsets."""

    file: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


def read_header(path: Path) -> dict[str, Stored]:
    """Return every tensor of a shard. Raises CheckpointError naming the file, and the key where one is at fault."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = _header_length(path, file.read(8), size)
            entries = json.loads(file.read(length), object_pairs_hook=lambda pairs: _unique(path, pairs))
    except FileNotFoundError as error:
        raise CheckpointError(f"shard {path.name} is missing from {path.parent}; fetch it again") from error
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path.name}: the header is not JSON ({error}); fetch the shard again") from error
    entries.pop("__metadata__", None)
    stored = {name: _stored(path, name, entry, 8 + length) for name, entry in entries.items()}
    _check_coverage(path, stored, 8 + length, size)
    return stored


def encode_header(tensors: list[tuple[str, str, tuple[int, ...], int]]) -> bytes:
    """Return the header of a shard that holds (name, dtype, shape, bytes) back to back in this order."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, dtype, shape, size in tensors:
        entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # payloads start aligned
    return struct.pack("<Q", len(text)) + text


def _header_length(path: Path, prefix: bytes, size: int) -> int:
    length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else -1
    if not 0 <= length <= min(MAX_HEADER_BYTES, size - 8):
        raise CheckpointError(f"{path.name} is cut inside its header ({size} bytes); fetch the shard again")
    return length


def _unique(path: Path, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        twice = [name for name, count in Counter(name for name, _ in pairs).items() if count > 1]
        raise CheckpointError(f"{path.name} holds {', '.join(twice)} twice; every key has one place")
    return found


def _stored(path: Path, name: str, entry: Any, start: int) -> Stored:
    try:
        dtype, shape, (begin, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
        expected = prod(shape) * ITEM_BYTES.get(dtype, (end - begin) // max(prod(shape), 1))
    except (TypeError, KeyError, ValueError) as error:
        raise CheckpointError(f"{path.name}: {name} has an unreadable entry {entry!r}; fetch it again") from error
    if end - begin != expected:
        raise CheckpointError(f"{path.name}: {name} is {dtype} {shape} but spans {end - begin} bytes, not {expected}")
    return Stored(path.name, dtype, shape, start + begin, start + end)


def _check_coverage(path: Path, stored: dict[str, Stored], start: int, size: int) -> None:
    """Payloads must follow each other without gap or overlap, from the header to the end of the file."""
    position = start
    for name, tensor in sorted(stored.items(), key=lambda item: (item[1].begin, item[1].end)):
        if tensor.begin != position:
            raise CheckpointError(f"{path.name}: {name} starts at byte {tensor.begin}, expected {position}")
        position = tensor.end
        if position > size:
            raise CheckpointError(f"{path.name} is cut at byte {size}: {name} ends at {position}; fetch it again")
    if position != size:
        raise CheckpointError(f"{path.name} has {size} bytes, its header describes {position}; fetch it again")
