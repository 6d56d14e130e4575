"""Follows a run to its end. The scheduler is asked seldom; the spool, which costs nothing, is looked at often.

Polls are 2 s apart at first and back off to 60 s; a finished launcher's report in the spool ends the pause early, so
that the last job is in the ledger seconds after its end and yet no poll follows another within 2 s.
"""

from __future__ import annotations

import argparse
import errno
import sys
import time
from collections.abc import Callable
from pathlib import Path

from rich.console import Console

from harness import selecting
from harness.collect import look
from harness.gather import Progress, stored_record
from harness.progress import Board
from harness.slurm import load_cluster
from harness.spool import job_dirs

SHORTEST_S, LONGEST_S, GROWTH = 2.0, 60.0, 1.5
LOCAL_S = 0.2
INGEST_EVERY_S = 60.0


def configure(parser: argparse.ArgumentParser) -> None:
    """Arguments of `k3-harness watch`."""
    selecting.add_run(parser)


def command(options: argparse.Namespace) -> int:
    """Follow a run to its end and bring it into the ledger. 0: every job ended; the ledger says with what."""
    run_dir = selecting.run_of(options)
    with Board(Console(highlight=False), run_dir) as board:
        follow(run_dir, board.show, options.ledger)
    print(f"run {run_dir.name} is complete and in the ledger")
    return 0


def follow(run_dir: Path, show: Callable[[Progress], None], ledger: Path | None = None, ingest: bool = True) -> None:
    """Look until nothing more is expected of any job, ingesting what has ended as it ends."""
    local = load_cluster(run_dir).scheduler == "local"
    pause, ingested = SHORTEST_S, time.monotonic()
    pending = False
    while True:
        progress = patient_look(run_dir)
        if progress is not None:
            show(progress)
            pending |= ingest and bool(progress.newly_settled)
            if progress.complete:
                break
            if pending and time.monotonic() - ingested > INGEST_EVERY_S:
                _ingest(run_dir, ledger)
                pending, ingested = False, time.monotonic()
        changed = progress is None or progress.changed or bool(progress.newly_settled)
        pause = SHORTEST_S if changed else min(pause * GROWTH, LONGEST_S)
        time.sleep(LOCAL_S) if local else rest(run_dir, pause)
    if ingest:
        _ingest(run_dir, ledger)


def patient_look(run_dir: Path) -> Progress | None:
    """One look; None when the spool is full now, which is said and tried again later."""
    try:
        return look(run_dir)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        print(f"{run_dir}: {error.strerror}; free some space, watching goes on", file=sys.stderr)
        return None


def rest(run_dir: Path, seconds: float) -> None:
    """Pause, but no longer than until another launcher has reported."""
    deadline = time.monotonic() + seconds
    time.sleep(min(SHORTEST_S, seconds))
    before = reported(run_dir)
    while time.monotonic() < deadline and reported(run_dir) == before:
        time.sleep(0.5)


def reported(run_dir: Path) -> frozenset[tuple[str, int]]:
    """The launchers' reports of jobs that are not settled, each with the time it was last written."""
    open_jobs = [folder for folder in job_dirs(run_dir) if not (folder / "job.json").exists()]
    reports = [path for folder in open_jobs for path in folder.glob("attempts/*/launch*.json")]
    return frozenset((str(path), path.stat().st_mtime_ns) for path in reports)


def _ingest(run_dir: Path, ledger: Path | None) -> None:
    from ledger.ingest import ingest

    ingest(run_dir, ledger)


def states(run_dir: Path) -> list[dict]:
    """Every attempt at every job as last stored, for listings; a job never looked at says so."""
    rows = []
    for folder in job_dirs(run_dir):
        record = stored_record(folder) or stored_record(folder, "watch.json")
        if record is None:
            rows.append({"job": folder.name, "attempt": "", "state": "not looked at yet"})
        for attempt in record.attempts if record else ():
            rows.append({
                "job": folder.name, "attempt": attempt.number, "state": attempt.state, "id": attempt.scheduler_id,
                "machine_fault": attempt.machine_fault, "nodes": list(attempt.nodes), "exit_code": attempt.exit_code,
                "signal": attempt.signal, "rank_exit_codes": attempt.rank_exit_codes, "reason": attempt.reason,
                "submitted_at": attempt.submitted_at, "started_at": attempt.started_at, "ended_at": attempt.ended_at,
                "settled": (folder / "job.json").exists(), "note": record.note,
            })  # fmt: skip
    return rows
