"""Write one shard: header first, from the plan, then tensors as they come; visible under its name only when whole."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from k3.checkpoint.header import encode_header
from k3.checkpoint.release import Tensor

if TYPE_CHECKING:
    import torch

DTYPE_NAMES = {"torch.bfloat16": "BF16", "torch.float32": "F32", "torch.uint8": "U8"}
BUFFER_BYTES = 1 << 22


class ShardWriter:
    """A shard whose tensors are handed over in the planned order, one at a time."""

    def __init__(self, path: Path, tensors: list[Tensor]):
        self.path, self.temporary = path, path.with_name(path.name + ".tmp")
        self._left = iter(tensors)
        self._file = self.temporary.open("wb", buffering=BUFFER_BYTES)
        self._file.write(encode_header([(*tensor, tensor.size_bytes) for tensor in tensors]))

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            if kind is None:
                self._publish()
        finally:
            with suppress(OSError):  # a full disk fails again when the buffer is flushed
                self._file.close()
            self._file.raw.close()
            self.temporary.unlink(missing_ok=True)

    def write(self, tensor: torch.Tensor) -> None:
        """Append the next planned tensor. Raises ValueError when dtype or shape are not as planned."""
        planned = next(self._left)
        found = (DTYPE_NAMES.get(str(tensor.dtype)), tuple(tensor.shape))
        if found != (planned.dtype, planned.shape):
            raise ValueError(f"{planned.name} is {found}, planned as {(planned.dtype, planned.shape)}")
        self.write_bytes(raw_bytes(tensor))

    def write_bytes(self, data: memoryview | bytes) -> None:
        self._file.write(data)

    def _publish(self) -> None:
        """Make the shard durable and give it its name."""
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        os.replace(self.temporary, self.path)


def raw_bytes(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a tensor, copied only when it is not contiguous on the CPU."""
    import torch

    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return memoryview(flat.view(torch.uint8).numpy())


def write_durably(path: Path, text: str) -> None:
    """Write a small file so that its name always shows a whole one."""
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def sync_folder(folder: Path) -> None:
    """Make renames and removals in a folder durable."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
