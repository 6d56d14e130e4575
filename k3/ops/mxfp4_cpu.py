"""MXFP4 of bfloat16 on a CPU, on integers alone, in pieces that stay in its caches.

In bfloat16 bits a code m > 0 under scale s is (s-1)*128 plus 0, 128, 192, ... 448: a scale lowers the bits of every
value by so much, but never below zero. Decoding reads four values under scale LAST by two code bytes from a table and
lowers them; encoding lowers what it is given, after which one multiplication finds the code. That holds for all but
the extreme scales, under which a code is subnormal or overflows; the caller treats their blocks. `k3.ops.mxfp4` owns
the format and the tables.
"""

from __future__ import annotations

from copy import copy

import numpy as np
import torch

FIRST, LAST = 2, 252  # scales under which every code is a normal number or a zero
ROWS = 32768  # blocks worked on at once
ONE = 127  # the scale of 1.0
MAGNITUDE = np.int16(0x7FFF)
BOTH_NIBBLES = np.int32(0xF000F000 - (1 << 32))


def large_table(pairs: torch.Tensor) -> torch.Tensor:
    """[65536] int64: four values of two code bytes under scale LAST, given [256, 2] bf16 bits of one's under ONE."""
    large = torch.where(pairs & 0x7FFF == 0, pairs, pairs + (LAST - ONE) * 128)
    two = torch.arange(1 << 16)
    return torch.cat([large[two & 255], large[two >> 8]], dim=1).view(torch.int64).flatten()


def is_extreme(scale: torch.Tensor) -> torch.Tensor:
    """Which scales this file does not decode or encode under."""
    return (scale < FIRST) | (scale > LAST)


def decode(table: torch.Tensor, codes: torch.Tensor, scale: torch.Tensor, out: torch.Tensor) -> None:
    """Write the values [n, 32] of codes [n, 16] under scales [n] to `out`; an extreme scale's mean nothing."""
    work, lower = _Work(len(codes)), _below_last(scale).split(ROWS)
    for piece in zip(codes.split(ROWS), lower, out.split(ROWS), strict=True):
        work.fit(len(piece[0])).decode(table, *piece)


def encode(values: torch.Tensor, scale: torch.Tensor, out: torch.Tensor) -> None:
    """Write the codes [n, 16] of values [n, 32] under scales [n] to `out`.

    Those of a block that its scale cannot represent mean nothing: decode them and compare.
    """
    work, lower = _Work(len(values)), _above_codes(scale).split(ROWS)
    for piece in zip(values.split(ROWS), lower, out.split(ROWS), strict=True):
        work.fit(len(piece[0])).encode(*piece)


def _below_last(scale: torch.Tensor) -> torch.Tensor:
    """[n, 1] int16: by how much a scale's bits are below those of scale LAST."""
    lower = scale.numpy().astype(np.int16)
    lower *= -128
    lower += LAST * 128
    return torch.from_numpy(lower)[:, None]


def _above_codes(scale: torch.Tensor) -> torch.Tensor:
    """[n, 1] int16: by how much a scale's bits are above the 80, 208, 272, ... 528 that codes are found from."""
    lower = scale.numpy().astype(np.int16)
    lower *= 128
    lower -= 128 + 80
    return torch.from_numpy(lower)[:, None]


class RoundTrip:
    """Buffers to decode and encode one piece after the other."""

    def __init__(self, table: torch.Tensor):
        self.table, self.work = table, _Work(ROWS)
        self.values = torch.empty(ROWS, 32, dtype=torch.bfloat16)
        self.again = torch.empty(ROWS, 16, dtype=torch.uint8)

    def returns(self, codes: torch.Tensor, scale: torch.Tensor) -> bool:
        """Whether at most ROWS blocks of codes come back, every byte; never said of an extreme scale."""
        work, values, again = self.work.fit(len(codes)), self.values[: len(codes)], self.again[: len(codes)]
        work.decode(self.table, codes, _below_last(scale), values)
        work.encode(values, _above_codes(scale), again)
        plain = scale.numpy().min() >= FIRST and scale.numpy().max() <= LAST
        return plain and np.array_equal(again.numpy().view(np.int64), codes.numpy().view(np.int64))


class _Work:
    """Buffers for one piece, and the work on it."""

    def __init__(self, rows: int):
        rows = min(rows, ROWS)
        self.index = torch.empty(rows * 8, dtype=torch.int32)
        self.lanes = torch.empty(rows, 32, dtype=torch.int16)

    def fit(self, rows: int) -> _Work:
        """The same buffers, for a piece with as many rows."""
        if rows == len(self.lanes):
            return self
        part = copy(self)
        part.index, part.lanes = self.index[: rows * 8], self.lanes[:rows]
        return part

    def lower(self, bits: np.ndarray, lower: torch.Tensor, out: np.ndarray) -> None:
        """Take `lower` off the magnitude of every value, or all of it if it is less."""
        np.bitwise_and(bits, MAGNITUDE, out=self.lanes.numpy())
        torch.minimum(self.lanes, lower, out=self.lanes)
        np.subtract(bits, self.lanes.numpy(), out=out)

    def decode(self, table: torch.Tensor, codes: torch.Tensor, lower: torch.Tensor, out: torch.Tensor) -> None:
        self.index.copy_(codes.contiguous().view(torch.uint16).view(-1))
        torch.index_select(table, 0, self.index, out=out.view(torch.int64).view(-1))
        bits = out.view(torch.int16).numpy()
        self.lower(bits, lower, out=bits)

    def encode(self, values: torch.Tensor, lower: torch.Tensor, out: torch.Tensor) -> None:
        lanes, pairs = self.lanes.numpy(), self.lanes.view(torch.int32)
        self.lower(values.view(torch.int16).numpy(), lower, out=lanes)
        # x * 57 >> 12 is the code, 0 to 7, of 0, 80, 208, 272, ... 528; an odd factor keeps the sign
        np.multiply(lanes, np.int16(57), out=lanes)
        both = pairs.numpy()
        np.bitwise_and(both, BOTH_NIBBLES, out=both)
        np.multiply(both, np.int32(0x1001), out=both)
        np.right_shift(both, 24, out=both)
        out.copy_(pairs)
