"""Prints rows as text, JSON or CSV, with the standard library alone."""

from __future__ import annotations

import csv
import json
import shutil
import sys
from collections.abc import Sequence


def emit(value, as_csv: bool = False) -> None:
    """Print a list of dicts (or, as JSON, anything plain)."""
    if not as_csv:
        json.dump(value, sys.stdout, indent=2, ensure_ascii=False)
        print()
        return
    if value:
        writer = csv.DictWriter(sys.stdout, list(value[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(value)


def table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Print aligned columns; on a terminal, lines are cut at its width."""
    texts = [tuple("" if value is None else " ".join(str(value).split()) for value in row) for row in [header, *rows]]
    widths = [min(max(map(len, column)), 100) for column in zip(*texts, strict=True)]
    limit = shutil.get_terminal_size().columns if sys.stdout.isatty() else 10_000
    for row in texts:
        line = "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True))
        print(line.rstrip()[:limit])
