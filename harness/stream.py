"""A rank's record: one JSON object a line, on disk before the next thing happens."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from ledger.record import Record, encode

UNWRITABLE = 98  # exit code of a rank that cannot record what it does


class Stream:
    """Appends events to a file that must be new: an attempt is never written twice."""

    def __init__(self, path: Path):
        path.parent.mkdir(parents=True, exist_ok=True)
        self.descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o644)

    def write(self, event: Record) -> None:
        """Write one whole line and wait until it is on disk. A rank that cannot, as on a full disk, ends at once."""
        line = encode(event) + b"\n"
        try:
            while line:
                line = line[os.write(self.descriptor, line) :]
            os.fsync(self.descriptor)
        except OSError as error:
            os.write(sys.stderr.fileno(), f"cannot write records: {error.strerror}\n".encode())
            os._exit(UNWRITABLE)
