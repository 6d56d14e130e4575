"""`k3-harness verify`: asks the scheduler again about a run, and compares with the answers that were stored.

What is stored is compared with what the ranks saw by the ledger, anywhere and at any time; only here, where the
scheduler can still be asked, is the stored answer itself checked.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

from harness import output, scheduler, selecting
from harness.gather import stored_record
from harness.scheduler import Row
from harness.slurm import load_cluster
from harness.spool import job_dirs
from ledger.record import Answer

COLUMNS = ("job", "verdict", "text")
COMPARED = ("name", "state", "exit_code", "signal", "nodes", "node_count", "alloc_tres", "submitted_at", "started_at",
            "ended_at")  # fmt: skip


@dataclass(frozen=True)
class Verdict:
    """One job's comparison: agrees, disagrees, or cannot be asked any more."""

    job: str
    verdict: str
    text: str


def configure(parser: argparse.ArgumentParser) -> None:
    """Arguments of `k3-harness verify`."""
    selecting.add_run(parser)
    output.add_formats(parser)


def command(options: argparse.Namespace) -> int:
    """Compare every job. 0: all agree; 1: some disagree; 3: none does, and some could not be asked."""
    run_dir = selecting.run_of(options)
    found = verify(run_dir)
    output.emit([vars(one) for one in found], COLUMNS, options)
    words = {one.verdict for one in found}
    return 1 if "disagrees" in words else 3 if words - {"agrees"} else 0


def verify(run_dir: Path) -> list[Verdict]:
    """Ask once for all jobs and compare row by row."""
    if load_cluster(run_dir).scheduler == "local":
        return [Verdict(folder.name, "cannot ask", "the local executor keeps no books") for folder in job_dirs(run_dir)]
    records = {folder.name: stored_record(folder) for folder in job_dirs(run_dir)}
    known = {
        job: [row for answer in record.answers for row in accounted(answer)]
        for job, record in records.items()
        if record is not None
    }
    now = scheduler.poll({row.id.split("_")[0] for rows in known.values() for row in rows})
    return [_compare(job, known.get(job), now) for job in records]


def accounted(answer: Answer) -> list[Row]:
    """The rows of a stored sacct answer; nothing for any other command."""
    if answer.command[:1] != ("sacct",) or answer.exit_code:
        return []
    return [row for rows in scheduler.read_sacct(answer.output).values() for row in rows]


def _compare(job: str, stored: list[Row] | None, now: scheduler.Poll) -> Verdict:
    if stored is None:
        return Verdict(job, "not collected", "collect the run first")
    if not stored:
        return Verdict(job, "cannot ask", "no accounting answer was stored, so there is nothing to confirm")
    if not now.accounting_answers:
        return Verdict(job, "cannot ask", f"sacct does not answer here: {now.accounting.error or 'no reason given'}")
    found = [row for one in {row.id for row in stored} for row in now.rows.get(one, [])]
    differences = [text for row in stored for text in _differences(row, found)]
    if differences:
        return Verdict(job, "disagrees", "; ".join(differences))
    return Verdict(job, "agrees", f"{len(stored)} rows as stored")


def _differences(row: Row, found: list[Row]) -> list[str]:
    same = next((other for other in found if other.submitted_at == row.submitted_at and other.id == row.id), None)
    if same is None:
        return [f"the scheduler has no job {row.id} submitted at {row.submitted_at:.0f} any more"]
    pairs = ((name, getattr(row, name), getattr(same, name)) for name in COMPARED)
    return [f"{name} was {old}, the scheduler now says {new}" for name, old, new in pairs if old != new]
