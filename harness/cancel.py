"""`k3-harness cancel`: ends jobs of a run. The wish is written down first; a collector repeats it until it is heard."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from harness import journal, scheduler, selecting
from harness.slurm import load_cluster


def configure(parser: argparse.ArgumentParser) -> None:
    """Arguments of `k3-harness cancel`."""
    selecting.add_run(parser)
    parser.add_argument("--job", action="append", default=[], help="only this job (or beginning); may be repeated")


def command(options: argparse.Namespace) -> int:
    """Cancel, then take one look so that the outcome is stored."""
    from harness.submit import executor

    run_dir = selecting.run_of(options)
    meant = selecting.jobs_of(run_dir, options.job)
    jobs = [job for job in meant if not (run_dir / "jobs" / job / "job.json").exists()]
    made = executor(load_cluster(run_dir))
    made.cancel(run_dir, jobs, "cancelled by the user")
    made.look(run_dir)
    print(f"{len(jobs)} jobs of run {run_dir.name} told to end; see k3-harness status {run_dir.name}")
    return 0


def cancel(run_dir: Path, jobs: Sequence[str], reason: str) -> None:
    """Tell Slurm to end these jobs. One that it does not hear now is told again at the next look."""
    with journal.lock(run_dir):
        journal.cancel(run_dir, tuple(jobs), reason)
        groups = journal.groups(journal.read(run_dir)).values()
    ids = [group.task_id(order) for group in groups for order in group.intent.orders if order.job in jobs]
    if known := [task for task in ids if task]:
        scheduler.ask(["scancel", *known])
