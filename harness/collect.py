"""Brings a run home: looks at its jobs, writes what became of them, tells the ledger. May be interrupted anywhere."""

from __future__ import annotations

import argparse
from pathlib import Path

from harness import selecting
from harness.gather import Progress
from harness.slurm import load_cluster
from harness.submit import executor


def look(run_dir: Path) -> Progress:
    """One look at all jobs of the run, through its own cluster's executor."""
    return executor(load_cluster(run_dir)).look(run_dir)


def collect(run_dir: Path, ledger: Path | None = None) -> bool:
    """Look once and ingest; True when every job has ended and is in the ledger."""
    from ledger.ingest import ingest

    progress = look(run_dir)
    if progress.complete or progress.newly_settled:
        ingest(run_dir, ledger)
    return progress.complete


def configure(parser: argparse.ArgumentParser) -> None:
    """Arguments of `k3-harness collect`."""
    selecting.add_run(parser)
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--once", action="store_true", help="one look, whatever is still out")
    how.add_argument("--stored", action="store_true", help="ingest a run that came from elsewhere as it is; ask nobody")


def command(options: argparse.Namespace) -> int:
    """Bring a run home, from wherever an earlier collector was interrupted. 0: complete; 1: jobs are still out."""
    if options.stored:
        return _as_it_is(options)
    run_dir = selecting.run_of(options)
    complete = collect(run_dir, options.ledger) if options.once else _to_the_end(run_dir, options.ledger)
    print(f"run {run_dir.name} is {'complete and in the ledger' if complete else 'not complete yet'}")
    return 0 if complete else 1


def _to_the_end(run_dir: Path, ledger: Path | None) -> bool:
    from harness.watch import follow

    follow(run_dir, lambda progress: None, ledger)
    return True


def _as_it_is(options: argparse.Namespace) -> int:
    """Ingest a run directory, or one that was packed into a file on another host, after checking what can be."""
    from harness import pack
    from harness.spool import runs_dir
    from ledger.ingest import ingest

    path = Path(options.run)
    run_dir = pack.unpack(path, runs_dir()) if path.is_file() else selecting.run_of(options)
    done = ingest(run_dir, options.ledger)
    print(f"run {run_dir.name}: {done.records} records of {done.jobs} jobs are new in the ledger")
    return 1 if done.waiting else 0
