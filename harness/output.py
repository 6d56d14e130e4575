"""How listings leave a command: a table for people, --json or --csv for programs."""

from __future__ import annotations

import argparse
import csv
import json
import shutil
import sys
import textwrap
from collections.abc import Sequence


def add_formats(parser: argparse.ArgumentParser) -> None:
    """Every listing takes these two."""
    formats = parser.add_mutually_exclusive_group()
    formats.add_argument("--json", action="store_true", help="print JSON")
    formats.add_argument("--csv", action="store_true", help="print CSV")


def emit(rows: Sequence[dict], columns: Sequence[str], options: argparse.Namespace) -> None:
    """Print `rows`: all their fields as JSON, `columns` as CSV or as a table."""
    if options.json:
        json.dump(list(rows), sys.stdout, indent=1)
        print()
    elif options.csv:
        writer = csv.DictWriter(sys.stdout, columns, extrasaction="ignore")
        writer.writeheader()
        writer.writerows(rows)
    else:
        table(rows, columns)


def table(rows: Sequence[dict], columns: Sequence[str]) -> None:
    """A plain table; on a terminal the last column is folded to what room is left."""
    texts = [[column.replace("_", " ") for column in columns]]
    texts += [[_cell(row.get(column, "")) for column in columns] for row in rows]
    *widths, _ = (max(map(len, column)) for column in zip(*texts, strict=True))
    indent = sum(widths) + 2 * len(widths)
    room = max(shutil.get_terminal_size().columns - indent, 20) if sys.stdout.isatty() else sys.maxsize
    for *first, last in texts:
        start = "".join(f"{text:<{width + 2}}" for text, width in zip(first, widths, strict=True))
        parts = textwrap.wrap(last, room) or [""]
        print("\n".join([(start + parts[0]).rstrip(), *(" " * indent + part for part in parts[1:])]))


def _cell(value) -> str:
    if isinstance(value, float):
        return f"{value:.1f}"
    return " ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
