"""A rank's record: one JSON object a line, on disk before the next thing happens."""

from __future__ import annotations

import os
from pathlib import Path

from ledger.record import Record, encode


class Stream:
    """Appends events to a file that must be new: an attempt is never written twice."""

    def __init__(self, path: Path):
        path.parent.mkdir(parents=True, exist_ok=True)
        self.descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o644)

    def write(self, event: Record) -> None:
        """Write one whole line and wait until it is on disk. Raises OSError when it cannot be (a full disk)."""
        line = encode(event) + b"\n"
        if (written := os.write(self.descriptor, line)) != len(line):
            raise OSError(f"only {written} of {len(line)} bytes of a record were written; is the disk full?")
        os.fsync(self.descriptor)
