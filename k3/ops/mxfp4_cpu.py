"""MXFP4 of bfloat16 on a CPU, on integers alone, in pieces that stay in its caches.

In bfloat16 bits a code m > 0 under scale s is (s-1)*128 plus 0, 128, 192, ... 448: the scale is an addend, and a zero
is what does not get it. Decoding reads four unscaled values by two code bytes from a table; encoding takes the addend
off, after which one multiplication finds the code. That holds for all but the extreme scales, under which
a code is subnormal or overflows; the caller treats their blocks. `k3.ops.mxfp4` owns the format and the tables.
"""

from __future__ import annotations

from copy import copy

import numpy as np
import torch

FIRST, LAST = 2, 252  # scales under which every code is a normal number or a zero
ROWS = 32768  # blocks worked on at once
EXPONENT_OF_HALF = 126 << 7
MAGNITUDE = np.int16(0x7FFF)
BOTH_NIBBLES = np.int32(0xF000F000 - (1 << 32))
FLAGS = np.int32(0x00010001)


def unscaled_table(pairs: torch.Tensor) -> torch.Tensor:
    """[65536] int64: the four values of two code bytes, given [256, 2] bf16 bits of the values of one.

    A value that is not zero is stored less the exponent of 0.5, with its lowest bit set.
    """
    base = torch.where(pairs & 0x7FFF == 0, pairs, pairs - EXPONENT_OF_HALF + 1)
    two = torch.arange(1 << 16)
    return torch.cat([base[two & 255], base[two >> 8]], dim=1).view(torch.int64).flatten()


def is_extreme(scale: torch.Tensor) -> torch.Tensor:
    """Which scales this file does not decode or encode under."""
    return (scale < FIRST) | (scale > LAST)


def decode(table: torch.Tensor, codes: torch.Tensor, scale: torch.Tensor, out: torch.Tensor) -> None:
    """Write the values [n, 32] of codes [n, 16] under scales [n] to `out`; an extreme scale's mean nothing."""
    work, addends = _Work(len(codes)), _decoding_addends(scale).split(ROWS)
    for piece in zip(codes.split(ROWS), addends, out.split(ROWS), strict=True):
        work.fit(len(piece[0])).decode(table, *piece)


def encode(values: torch.Tensor, scale: torch.Tensor, out: torch.Tensor) -> None:
    """Write the codes [n, 16] of values [n, 32] under scales [n] to `out`.

    Those of a block that its scale cannot represent mean nothing: decode them and compare.
    """
    work, addends = _Work(len(values)), _encoding_addends(scale).split(ROWS)
    for piece in zip(values.split(ROWS), addends, out.split(ROWS), strict=True):
        work.fit(len(piece[0])).encode(*piece)


def _decoding_addends(scale: torch.Tensor) -> torch.Tensor:
    """[n, 1] int32: what to add for a flag, the flag itself taken off."""
    addends = scale.numpy().astype(np.int32)
    addends <<= 7
    addends -= 128 + 1
    return torch.from_numpy(addends)[:, None]


def _encoding_addends(scale: torch.Tensor) -> torch.Tensor:
    """[n, 1] int16: what to add to a value that is not zero, to find its code."""
    addends = scale.numpy().astype(np.int16)
    addends *= -128
    addends += 128 + 80
    return torch.from_numpy(addends)[:, None]


class RoundTrip:
    """Buffers to decode and encode one piece after the other."""

    def __init__(self, table: torch.Tensor):
        self.table, self.work = table, _Work(ROWS)
        self.values = torch.empty(ROWS, 32, dtype=torch.bfloat16)
        self.again = torch.empty(ROWS, 16, dtype=torch.uint8)

    def returns(self, codes: torch.Tensor, scale: torch.Tensor) -> bool:
        """Whether at most ROWS blocks of codes come back, every byte; never said of an extreme scale."""
        work, values, again = self.work.fit(len(codes)), self.values[: len(codes)], self.again[: len(codes)]
        work.decode(self.table, codes, _decoding_addends(scale), values)
        work.encode(values, _encoding_addends(scale), again)
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

    def decode(self, table: torch.Tensor, codes: torch.Tensor, addend: torch.Tensor, out: torch.Tensor) -> None:
        pairs, flags = out.view(torch.int32), self.lanes.view(torch.int32)
        self.index.copy_(codes.view(torch.uint16).view(-1))
        torch.index_select(table, 0, self.index, out=out.view(torch.int64).view(-1))
        np.bitwise_and(pairs.numpy(), FLAGS, out=flags.numpy())
        pairs.addcmul_(flags, addend)

    def encode(self, values: torch.Tensor, addend: torch.Tensor, out: torch.Tensor) -> None:
        bits, lanes, pairs = values.view(torch.int16).numpy(), self.lanes.numpy(), self.lanes.view(torch.int32)
        np.bitwise_and(bits, MAGNITUDE, out=lanes)
        self.lanes.clamp_(max=1).mul_(addend)
        np.add(lanes, bits, out=lanes)
        # x * 57 >> 12 is the code of a zero, 0, and of 0 + 80, 128 + 80, ... 448 + 80; an odd factor keeps the sign
        np.multiply(lanes, np.int16(57), out=lanes)
        both = pairs.numpy()
        np.bitwise_and(both, BOTH_NIBBLES, out=both)
        np.multiply(both, np.int32(0x1001), out=both)
        np.right_shift(both, 24, out=both)
        out.copy_(pairs)
