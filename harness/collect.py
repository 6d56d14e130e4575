"""Brings a run home: looks at its jobs, writes what became of them, tells the ledger. May be interrupted anywhere."""

from __future__ import annotations

from pathlib import Path

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
