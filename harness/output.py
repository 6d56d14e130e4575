"""How listings leave a command: a table for people, --json or --csv for programs."""

from __future__ import annotations

import argparse
import csv
import json
import sys
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
    """A plain table, as wide as the terminal allows."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    shown = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        shown.add_column(column.replace("_", " "), overflow="fold")
    for row in rows:
        shown.add_row(*(_cell(row.get(column, "")) for column in columns))
    Console().print(shown)


def _cell(value) -> str:
    if isinstance(value, float):
        return f"{value:.1f}"
    return " ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
