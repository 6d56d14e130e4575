"""`k3-harness run SUITE --sabotage`: every claim's tests under every wrong edit that it must notice.

Each sabotage is a run of its own kind, on a copy of the snapshot with the edit made; its records carry the sabotage's
id and are never verdicts on the real code. The ledger turns them into kill rates.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import shutil
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path

from msgspec.structs import replace
from rich.console import Console

from harness import cluster as clusters
from harness import output, revision, sabotage, spool
from harness.cluster import Cluster
from harness.collect import collect, look
from harness.plan import Planner, Request
from harness.planning import known_statuses, unavailable
from harness.revision import Snapshot
from harness.sabotage import Sabotage
from harness.spec import Cell, ClaimStatus, Expected, HarnessError, Plan, Topology
from harness.submit import executor, submit
from harness.submit import prepare as write_run
from ledger import claimfile
from ledger.claims import open_judge
from ledger.state import ledger_path

POLL_S = 0.2
COLUMNS = ("claim", "killed", "tried", "rate", "declared", "survivors")


@dataclass(frozen=True, kw_only=True)
class Session:
    """The snapshot that every sabotage is a copy of, and the plan of the untouched tests."""

    root: Path
    cluster: Cluster
    base: Path
    snapshot: Snapshot
    plan: Plan
    ledger: Path | None


def configure(parser: argparse.ArgumentParser) -> None:
    """What `run --sabotage` takes besides the arguments of `run`."""
    parser.add_argument("--sabotage", action="store_true", help="run the tests under every applicable wrong edit")
    parser.add_argument("--only", action="append", default=[], metavar="ID", help="with --sabotage: this edit alone")


def command(options: argparse.Namespace) -> int:
    """Run what has no verdict yet. 0: every selected claim reaches its declared rate; 1: some does not."""
    console = Console(highlight=False)
    session = prepare(options, revision.find_root())
    try:
        todo = pending(session, options)
        console.print(f"{len(todo)} sabotages to run, {sum(len(s.claims) for s in todo)} (claim, sabotage) pairs")
        run_all(session, todo, console)
    finally:
        spool.discard(session.base)
    return report(session, console)


def prepare(options: argparse.Namespace, root: Path) -> Session:
    """Snapshot the tree and plan its tests once; every run of the session shares both."""
    cluster = clusters.find(options.cluster)
    base, _ = spool.new_run(cluster.spool)
    try:
        snapshot = revision.take(root, base / "snapshot")
        name = "" if cluster.scheduler == "local" else cluster.name
        topologies = claimfile.load(snapshot.path).topologies.values()
        plan = Planner(
            root=root, snapshot=snapshot, statuses=[], unavailable=unavailable(topologies, cluster),
            request=Request(names=tuple(options.names), everything=True, cluster=name),
        ).plan()  # fmt: skip
        broken = [f"{cell.claim}: {cell.reason}" for cell in plan.cells if cell.action == "broken"]
        if broken:
            raise HarnessError("cannot run broken claims; " + "; ".join(broken))
    except BaseException:
        spool.discard(base)
        raise
    return Session(root=root, cluster=cluster, base=base, snapshot=snapshot, plan=plan, ledger=options.ledger)


def pending(session: Session, options: argparse.Namespace) -> list[Sabotage]:
    """Applicable sabotages, each with the claims that can run here and have no verdict on it yet."""
    known = sabotage.read(session.snapshot.path)
    if wrong := [name for name in options.only if name not in known]:
        raise HarnessError(f"no sabotage is called {', '.join(wrong)}; suites/sabotages.toml lists them")
    wanted = [known[name] for name in options.only] or list(known.values())
    for entry in wanted:
        sabotage.edited(entry, (session.snapshot.path / entry.file).read_text(encoding="utf-8"))
    sound, tried = _sound(session, options.all), {} if options.all else _tried(session)
    left = [
        replace(one, claims=tuple(c for c in sabotage.applicable(one, sound) if one.id not in tried.get(c, ())))
        for one in wanted
    ]
    return [one for one in left if one.claims]


def _sound(session: Session, everything: bool) -> list[str]:
    """Claims with a cell that can run here, and that holds on the real code: else any edit would look noticed."""
    running = [(cell.claim, cell.topology) for cell in session.plan.cells if cell.action == "run"]
    if everything:
        return list(dict.fromkeys(claim for claim, _ in running))
    statuses = known_statuses(session.root, session.ledger)
    unsound = sorted({s.id for s in statuses if (s.id, s.topology) in running and not _holds(s)})
    if unsound:
        raise HarnessError(f"{', '.join(unsound)} not proven at this tree; k3-harness run them first, or give --all")
    return list(dict.fromkeys(claim for claim, _ in running))


def _holds(status: ClaimStatus) -> bool:
    """Proven, or kept from it by its kill rate alone."""
    return status.state == "proven" or status.reason.startswith("kill rate")


def _tried(session: Session) -> dict[str, set[str]]:
    """Claim -> sabotages with a verdict for these very tests."""
    if not ledger_path(session.ledger).is_file():
        return {}
    judge = open_judge(session.root, session.ledger)
    return {claim.id: set(judge.sabotages(claim)) for claim in session.plan.claims}


def run_all(session: Session, todo: list[Sabotage], console: Console) -> None:
    """Run the sabotages, as many at once as there are processors for their ranks. Ctrl-C ends them in order."""
    queue, active = deque(todo), {}
    try:
        while queue or active:
            while queue and _room(session, queue[0], active):
                one = queue.popleft()
                active[start(session, one)] = one
            for run_dir in [run_dir for run_dir in active if look(run_dir).complete]:
                collect(run_dir, session.ledger)
                console.print(_line(session, active.pop(run_dir), run_dir), soft_wrap=True, markup=False)
            time.sleep(POLL_S)
    except BaseException:
        for run_dir in active:
            jobs = [job.job for job in spool.read_run(run_dir).expected]
            executor(session.cluster).cancel(run_dir, jobs, "cancelled by the user (Ctrl-C)")
            collect(run_dir, session.ledger)
        raise


def start(session: Session, one: Sabotage) -> Path:
    """Submit one sabotage: a run whose snapshot is the base's with the edit made."""
    run_dir, nonce = spool.new_run(session.cluster.spool)
    untouched = copied(session, run_dir)
    sabotage.apply(one, untouched.path)
    manifest = untouched.manifest | {one.file: revision.sha256(untouched.path / one.file)}
    snapshot = dataclasses.replace(untouched, manifest=manifest)
    plan = planned(session.plan, one, snapshot.hash)
    write_run(plan, snapshot, session.cluster, run_dir, nonce)
    submit(plan, session.cluster, run_dir)
    return run_dir


def copied(session: Session, run_dir: Path) -> Snapshot:
    """The session's snapshot in a run directory of its own, by hard links: its files are never written to."""
    shutil.copytree(session.snapshot.path, run_dir / "snapshot", copy_function=os.link)
    return dataclasses.replace(session.snapshot, path=run_dir / "snapshot")


def planned(plan: Plan, one: Sabotage, snapshot: str) -> Plan:
    """The plan of one sabotage: one job with all tests of its claims on one rank, one a claim on several ranks."""
    claims = tuple(claim for claim in plan.claims if claim.id in one.claims)
    cells = tuple(cell for cell in plan.cells if cell.claim in one.claims and cell.action == "run")
    topologies = {job.topology.name: job.topology for job in plan.expected}
    jobs = []
    for name in dict.fromkeys(cell.topology for cell in cells):
        here = [cell for cell in cells if cell.topology == name]
        groups = [[cell] for cell in here] if topologies[name].ranks > 1 else [here]
        jobs += [_job(topologies[name], group) for group in groups]
    return replace(plan, claims=claims, cells=cells, expected=tuple(jobs), sabotage=one.id, snapshot=snapshot)


def _job(topology: Topology, cells: list[Cell]) -> Expected:
    tests = tuple(dict.fromkeys(test for cell in cells for test in cell.tests))
    name = cells[0].claim if topology.ranks > 1 else "sabotage"
    return Expected(
        job=f"{topology.name}.{name}.0", topology=topology, tests=tests, claims=tuple(cell.claim for cell in cells),
        timeout_min=topology.timeout_min,
    )  # fmt: skip


def _room(session: Session, one: Sabotage, active: dict[Path, Sabotage]) -> bool:
    """Whether the processors can take one more run. A scheduler decides for itself."""
    if session.cluster.scheduler != "local" or not active:
        return True
    wanted = sum(_ranks(session, other) for other in [one, *active.values()])
    return wanted <= len(os.sched_getaffinity(0))


def _ranks(session: Session, one: Sabotage) -> int:
    return max(job.topology.ranks for job in planned(session.plan, one, "").expected)


def _line(session: Session, one: Sabotage, run_dir: Path) -> str:
    judge = open_judge(session.root, session.ledger)
    words = {True: "noticed", False: "SURVIVED", None: "no verdict"}
    found = {name: judge.sabotages(judge.claims.claims[name]).get(one.id) for name in one.claims}
    return f"{one.id}: " + ", ".join(f"{name} {words[killed]}" for name, killed in found.items()) + f" ({run_dir.name})"


def report(session: Session, console: Console) -> int:
    """Print every selected claim's rate and its survivors."""
    judge, known = open_judge(session.root, session.ledger), sabotage.read(session.root)
    rows, low = [], 0
    for claim in session.plan.claims:
        found = judge.sabotages(claim)
        survivors = [name for name, killed in found.items() if not killed]
        rate = sum(found.values()) / len(found) if found else 0.0
        low += rate < claim.kill_rate
        rows.append({
            "claim": claim.id, "killed": sum(found.values()), "tried": len(found), "rate": f"{rate:.0%}",
            "declared": f"{claim.kill_rate:.0%}", "survivors": "; ".join(_reason(known.get(s), s) for s in survivors),
        })  # fmt: skip
    output.emit(rows, COLUMNS, argparse.Namespace(json=False, csv=False))
    console.print(f"{low} of {len(rows)} claims are below their declared kill rate")
    return 1 if low else 0


def _reason(one: Sabotage | None, name: str) -> str:
    return f"{name} ({one.survives})" if one and one.survives else name
