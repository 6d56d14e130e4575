"""`k3-harness plan`, and the first steps it shares with run and submit: snapshot, statuses, plan."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from harness import cluster as clusters
from harness import costs, fingerprint, output, revision, spool
from harness.cluster import Cluster
from harness.discover import Discovery, discover
from harness.plan import Planner, Request
from harness.revision import Snapshot
from harness.spec import ClaimStatus, Plan, Topology
from ledger import claimfile
from ledger.memory import Memory
from ledger.record import digest
from ledger.state import ledger_path

COLUMNS = ("claim", "topology", "action", "cpu_s", "gpu_s", "reason")


@dataclass(frozen=True, kw_only=True)
class Session:
    """A plan and the run directory that holds its snapshot; nothing is submitted yet."""

    root: Path
    cluster: Cluster
    run_dir: Path
    nonce: str
    snapshot: Snapshot
    plan: Plan
    ledger: Path | None


def add_selection(parser: argparse.ArgumentParser, settled: bool = True) -> None:
    """The arguments that say what is meant; `settled`: whether cells may be left out because they are settled."""
    parser.add_argument("names", nargs="*", metavar="SUITE", help="suites, claims (or their first words), test files")
    parser.add_argument("--cluster", default="local", help="a cluster profile: its name or its path")
    parser.add_argument("--ledger", type=Path, help="another ledger file")
    if not settled:
        return
    parser.add_argument("--all", action="store_true", help="run what is settled at this tree, too")
    parser.add_argument("--stale", action="store_true", help="list only what must be run again, cheapest first")
    parser.add_argument("--budget", default="", help="prove most for this much, e.g. 4gpuh or 30cpumin")


def configure(parser: argparse.ArgumentParser) -> None:
    """Arguments of `k3-harness plan`."""
    add_selection(parser)
    output.add_formats(parser)


def command(options: argparse.Namespace) -> int:
    """Say what a run would do, cell by cell, and submit nothing."""
    plan = look(options)
    rows = [msgspec.to_builtins(cell) for cell in plan.cells]
    if options.stale:
        rows = sorted((row for row in rows if row["action"] == "run"), key=lambda row: (row["gpu_s"], row["cpu_s"]))
    output.emit(rows, COLUMNS, options)
    if not (options.json or options.csv):
        print(summary(plan))
    return 0


def look(options: argparse.Namespace) -> Plan:
    """Plan the tree as it lies; it is copied only if tests must be collected that were not collected in it before."""
    root = revision.find_root()
    memory = Memory(root)
    snapshot = revision.look(root, memory.digest)

    def collect(tree: Path, wanted: list[str]) -> Discovery:
        return collected(memory, snapshot, wanted) if wanted else discover(tree, wanted)

    plan = _plan(options, clusters.find(options.cluster), root, snapshot, collect)
    memory.save()
    return plan


def collected(memory: Memory, snapshot: Snapshot, wanted: list[str]) -> Discovery:
    """The tests of a tree, collected in a copy; remembered, if without faults, for this content and interpreter."""
    ours = sorted(pair for pair in os.environ.items() if pair[0].startswith("K3_") and pair[0] != "K3_STATE_DIR")
    key = digest([snapshot.hash, wanted, sys.version, sys.path, fingerprint.toolchain_here(), ours])
    if (kept := memory.recall("collected", key)) is not None:
        return msgspec.json.decode(kept.value, type=Discovery)
    with tempfile.TemporaryDirectory(prefix="k3-plan-") as folder:
        copy = revision.take(snapshot.path, Path(folder) / "snapshot")
        found = discover(copy.path, wanted)
    if not found.errors and copy.hash == snapshot.hash:
        memory.keep("collected", key, found)
    return found


def prepare(options: argparse.Namespace) -> Session:
    """Snapshot the tree first of all, then plan inside the snapshot. On an error nothing is left behind."""
    cluster = clusters.find(options.cluster)
    root = revision.find_root()
    run_dir, nonce = spool.new_run(cluster.spool)
    try:
        snapshot = revision.take(root, run_dir / "snapshot")
        plan = _plan(options, cluster, root, snapshot, discover)
    except BaseException:
        spool.discard(run_dir)
        raise
    return Session(root=root, cluster=cluster, run_dir=run_dir, nonce=nonce, snapshot=snapshot, plan=plan,
                   ledger=options.ledger)  # fmt: skip


def _plan(options: argparse.Namespace, cluster: Cluster, root: Path, snapshot: Snapshot, collect: Callable) -> Plan:
    request = Request(
        names=tuple(options.names), everything=options.all, budget=options.budget,
        tests_per_job=cluster.tests_per_job,
        cluster="" if cluster.scheduler == "local" else cluster.name,
    )  # fmt: skip
    topologies = claimfile.load(snapshot.path).topologies.values()
    return Planner(
        root=root, snapshot=snapshot, request=request, statuses=known_statuses(root, options.ledger),
        durations=costs.durations(options.ledger), unavailable=unavailable(topologies, cluster),
        toolchain=fingerprint.toolchain_here() if cluster.scheduler == "local" else {}, collect=collect,
    ).plan()  # fmt: skip


def known_statuses(root: Path, ledger: Path | None) -> list[ClaimStatus]:
    """What this user's ledger says of every cell; a ledger that does not exist yet says nothing."""
    from ledger.claims import statuses

    return statuses(root, ledger if ledger_path(ledger).is_file() else None)


def unavailable(topologies, cluster: Cluster) -> dict[str, str]:
    """Topologies that the cluster can never run, and why."""
    check = _not_here if cluster.scheduler == "local" else _not_there
    return {topology.name: reason for topology in topologies if (reason := check(topology, cluster))}


def summary(plan: Plan) -> str:
    """The plan in one or two sentences."""
    running = [cell for cell in plan.cells if cell.action == "run"]
    kept = [cell for cell in plan.cells if cell.action == "keep"]
    ranks = sum(job.topology.ranks * len(job.tests) for job in plan.expected)
    text = f"{len(running)} of {len(plan.cells)} cells to run: {len(plan.expected)} jobs, {ranks} (test, rank) pairs, "
    text += f"about {_span(plan.cpu_s)} of CPU" + (f" and {_span(plan.gpu_s)} of GPU" if plan.gpu_s else "")
    text += " (partly guessed)" if any(cell.estimated for cell in running) else ""
    return f"{text}. {len(kept)} cells are settled at this tree." if kept else f"{text}."


def _span(seconds: float) -> str:
    for limit, size, unit in ((600, 1, "s"), (7200, 60, "min")):
        if seconds < limit:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds / 3600:.1f} h"


def _not_here(topology: Topology, cluster: Cluster) -> str:
    del cluster
    if topology.nodes > 1:
        return f"needs {topology.nodes} nodes; name a cluster with --cluster"
    if topology.device == "cuda":
        wanted, found = topology.gpus_per_node or topology.ranks, len(fingerprint.gpus_here()[0])
        return f"needs {wanted} GPUs, this machine has {found}; name a cluster with --cluster" if found < wanted else ""
    return ""


def _not_there(topology: Topology, cluster: Cluster) -> str:
    return clusters.fits(cluster, topology.gpus_per_node, topology.timeout_min)
