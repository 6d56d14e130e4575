"""`k3-harness status`: every attempt at every job of a run, with the scheduler's newest word."""

from __future__ import annotations

import argparse
import time
from collections import Counter
from pathlib import Path

from filelock import Timeout

from harness import output, selecting
from harness.journal import lock
from harness.watch import SHORTEST_S, patient_look, reported, rest, states

COLUMNS = ("job", "attempt", "state", "id", "nodes", "exit_code", "reason")


def configure(parser: argparse.ArgumentParser) -> None:
    """Arguments of `k3-harness status`."""
    selecting.add_run(parser)
    parser.add_argument("--watch", action="store_true", help="repeat until every job has ended")
    parser.add_argument("--stored", action="store_true", help="what is known already; ask nobody")
    output.add_formats(parser)


def command(options: argparse.Namespace) -> int:
    """Show a run. 0: all its jobs have ended; 1: some are still out."""
    run_dir = selecting.run_of(options)
    while True:
        if not options.stored:
            refresh(run_dir)
        rows = states(run_dir)
        output.emit(rows, COLUMNS, options)
        if not (options.json or options.csv):
            print(summary(run_dir, rows))
        done = bool(rows) and all(row.get("settled") for row in rows)
        if done or not options.watch:
            return 0 if done else 1
        rest(run_dir, 5 * SHORTEST_S)


def refresh(run_dir: Path) -> None:
    """One look, unless somebody else is looking just now."""
    try:
        with lock(run_dir).acquire(timeout=0.1):
            pass
    except Timeout:
        return
    patient_look(run_dir)


def summary(run_dir: Path, rows: list[dict]) -> str:
    """One sentence: how many jobs are in which state, and how many machine faults were met."""
    last = {row["job"]: row["state"] for row in rows}
    counts = ", ".join(f"{count} {state}" for state, count in Counter(last.values()).most_common())
    faults = sum(bool(row.get("machine_fault")) for row in rows)
    reports = len(reported(run_dir))
    text = f"run {run_dir.name} at {time.strftime('%H:%M:%S')}: {counts}; {faults} attempts lost to machine faults"
    return f"{text}; {reports} launchers have reported and are not collected" if reports else text
