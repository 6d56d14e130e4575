"""Write a release of any size with the official names, shards, dtypes and padding, and values made from names.

Deterministic: the bytes of a tensor depend on the seed and its name alone. Used by tests and benchmarks.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np

from k3.checkpoint.index import INDEX_FILE, index_text
from k3.checkpoint.release import Release, Shard, Tensor
from k3.checkpoint.writer import ShardWriter, write_durably

# Random bits are cut to exponents between 2^-7 and 2^-4, so that a model of these weights runs.
BF16_KEPT, BF16_SET = 0x81FF, 0x3C00
SCALE_KEPT, SCALE_SET = 0x03, 118
SMALL_CODES = 0xBB  # clears the upper magnitude bit of both codes of a byte


def write_release(folder: str | Path, hf: dict[str, Any], *, seed: int = 0, max_shard_size_bytes: int | None = None):
    """Write the release that the public nested config `hf` describes; return the `Release`."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    release = Release.from_hf(hf)
    shards = release.shards(max_shard_size_bytes)
    for shard in shards:
        _write_shard(folder, shard, release, seed)
    write_durably(folder / "config.json", json.dumps(hf, indent=2))
    write_durably(folder / INDEX_FILE, index_text(release, shards, max_shard_size_bytes))
    return release


def _write_shard(folder: Path, shard: Shard, release: Release, seed: int) -> None:
    tensors = list(shard.group.tensors())
    with ShardWriter(folder / shard.file, tensors) as writer:
        for tensor in tensors:
            writer.write_bytes(tensor_bytes(tensor, release.config.kda_num_heads, seed))


def tensor_bytes(tensor: Tensor, live_heads: int, seed: int) -> bytes:
    """Return the bytes of one tensor: finite values of either sign, zeros behind the live heads of A_log."""
    random = np.random.default_rng([seed, crc32(tensor.name.encode())])
    count = tensor.size_bytes
    if tensor.dtype == "U8":
        bits = np.frombuffer(random.bytes(count), np.uint8)
        return _scales(bits) if tensor.name.endswith("_scale") else _codes(bits)
    bits = np.frombuffer(random.bytes(count), np.uint16)
    if tensor.dtype == "BF16":
        return (bits & BF16_KEPT | BF16_SET).tobytes()
    bits = bits.copy()
    bits[1::2] = bits[1::2] & BF16_KEPT | BF16_SET  # the upper half of a little-endian float32
    values = bits.view(np.float32)
    if tensor.name.endswith(".A_log"):
        values[live_heads:] = 0
    return values.tobytes()


def _scales(bits: np.ndarray) -> bytes:
    return ((bits & SCALE_KEPT) + SCALE_SET).tobytes()


def _codes(bits: np.ndarray) -> bytes:
    """Random codes; every fifth block has magnitudes up to 1.5 only, for which no scale rule gives its scale back."""
    blocks = bits.reshape(-1, 16).copy()
    blocks[::5] &= SMALL_CODES
    return blocks.tobytes()
