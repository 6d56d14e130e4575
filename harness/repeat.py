"""`k3-harness bench`: benchmarks in fresh processes, one after another, in turn with another commit's if one is named.

The sampling unit is a process that runs its whole table once. Each is a run of its own, on a copy of its side's
snapshot, so that the ledger keeps every one; `ledger.bench` then compares them by an exact rank test.
"""

from __future__ import annotations

import argparse
import contextlib
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from msgspec.structs import replace
from rich.console import Console

from harness import mutate, output, revision, spool
from harness.collect import collect, look
from harness.mutate import Session
from harness.planning import add_selection
from harness.spec import Expected, HarnessError, Plan
from harness.submit import executor, submit
from harness.submit import prepare as write_run

POLL_S = 0.2
COLUMNS = ("test", "measure", "shape", "against", "verdict", "ratio", "p", "processes", "reason")


@dataclass
class Side:
    """One tree's processes so far."""

    name: str
    session: Session
    runs: list[str]


def configure(parser: argparse.ArgumentParser) -> None:
    """Arguments of `k3-harness bench`."""
    add_selection(parser, settled=False)
    parser.add_argument("--against", default="", metavar="REF", help="a commit to run in turn with this tree")
    parser.add_argument("--processes", type=int, default=6, metavar="N", help="fresh processes of each side")
    output.add_formats(parser)


def command(options: argparse.Namespace) -> int:
    """Time, then compare: with the other commit, else with the peers. 0: all was measured and nothing is slower."""
    if not options.names:
        raise HarnessError("bench what? name suites, claims or test files, e.g. k3-harness bench bench.kda")
    if options.processes < 1:
        raise HarnessError(f"--processes {options.processes}: at least one process is needed, six for a verdict")
    console = Console(highlight=False, stderr=True)
    with contextlib.ExitStack() as stack:
        sides = [Side("this tree", stack.enter_context(_session(options, revision.find_root())), [])]
        if options.against:
            other = stack.enter_context(_checkout(sides[0].session.root, options.against))
            sides.insert(0, Side(options.against, stack.enter_context(_session(options, other)), []))
        for number in range(options.processes):
            for side in sides if number % 2 == 0 else sides[::-1]:
                _process(side, number, options.processes, console)
    rows = _compared(sides, options.ledger)
    output.emit(rows, COLUMNS, options)
    return int(not rows or any(row["verdict"] in ("slower", "slower-unconfirmed", "not-measured") for row in rows))


@contextlib.contextmanager
def _session(options: argparse.Namespace, root: Path) -> Iterator[Session]:
    """The snapshot and plan of one side, for as long as its processes are started."""
    session = mutate.prepare(options, root)
    try:
        if not session.plan.expected:
            raise HarnessError("none of this can run here: " + "; ".join({cell.reason for cell in session.plan.cells}))
        yield session
    finally:
        spool.discard(session.base)


@contextlib.contextmanager
def _checkout(root: Path, ref: str) -> Iterator[Path]:
    """The tree at `ref`, in a working tree of its own. Raises HarnessError when git cannot give it."""
    with tempfile.TemporaryDirectory(prefix="k3-against-") as folder:
        place = Path(folder) / "tree"
        command = ["git", "-C", str(root), "worktree", "add", "--detach", "--quiet", str(place), ref]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise HarnessError(f"--against {ref}: {done.stderr.strip()}")
        try:
            yield place
        finally:
            subprocess.run(["git", "-C", str(root), "worktree", "remove", "--force", str(place)], capture_output=True)


def _process(side: Side, number: int, count: int, console: Console) -> None:
    """One fresh process for each job of the side's plan, none beside another."""
    for job in side.session.plan.expected:
        began = time.monotonic()
        side.runs.append(_run(side.session, alone(side.session.plan, job)))
        took = time.monotonic() - began
        console.print(f"{number + 1} of {count}, {side.name}: {job.job} in run {side.runs[-1]}, {took:.0f} s")


def alone(plan: Plan, job: Expected) -> Plan:
    """The plan with this job and nothing else."""
    cells = tuple(cell for cell in plan.cells if cell.claim in job.claims and cell.topology == job.topology.name)
    claims = tuple(claim for claim in plan.claims if claim.id in job.claims)
    return replace(plan, expected=(job,), cells=cells, claims=claims)


def _run(session: Session, plan: Plan) -> str:
    """Run one plan to its end and ingest it. Ctrl-C ends it in order, and what it has recorded is kept."""
    run_dir, nonce = spool.new_run(session.cluster.spool)
    snapshot = mutate.copied(session, run_dir)
    write_run(plan, snapshot, session.cluster, run_dir, nonce)
    try:
        submit(plan, session.cluster, run_dir)
        while not look(run_dir).complete:
            time.sleep(POLL_S)
    except KeyboardInterrupt:
        jobs = [job.job for job in plan.expected]
        executor(session.cluster).cancel(run_dir, jobs, "cancelled by the user (Ctrl-C)")
        raise
    finally:
        collect(run_dir, session.ledger)
    return run_dir.name


def _compared(sides: list[Side], ledger: Path | None) -> list[dict]:
    """The rows of `ledger.bench` for exactly these processes."""
    from ledger import bench
    from ledger.db import connect_read

    with contextlib.closing(connect_read(ledger)) as connection:
        found = [bench.samples(connection, side.runs) for side in sides]
    return [bench.as_row(one) for one in (bench.compare(*found) if len(found) == 2 else bench.against_peers(found[0]))]
