"""From a plan to jobs: writes the head of the run and each job's orders, then hands them to the cluster's executor."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from harness.cluster import Cluster
from harness.journal import Order
from harness.revision import Snapshot
from harness.slurm import save_cluster
from harness.spec import Expected, JobSpec, Plan, RunRecord, load, store
from harness.spool import write_run


@dataclass(frozen=True)
class Executor:
    """The three things a cluster must be able to do with a run directory."""

    submit: Callable  # (run_dir, cluster, orders)
    look: Callable  # (run_dir) -> gather.Progress
    cancel: Callable  # (run_dir, jobs, reason)


def executor(cluster: Cluster) -> Executor:
    """The executor of a cluster."""
    if cluster.scheduler == "local":
        from harness import local

        return Executor(local.submit, local.look, local.cancel)
    from harness import cancel, gather, slurm

    return Executor(slurm.submit, gather.look, cancel.cancel)


def prepare(plan: Plan, snapshot: Snapshot, cluster: Cluster, run_dir: Path, nonce: str) -> None:
    """Write everything a run needs before its first job exists."""
    for expected in plan.expected:
        folder = run_dir / "jobs" / expected.job
        folder.mkdir(parents=True)
        store(folder / "spec.json", orders_for(expected, plan, run_dir.name, nonce))
    save_cluster(run_dir, cluster)
    write_run(
        run_dir,
        RunRecord(
            run=run_dir.name, nonce=nonce, created_at=time.time(), commit=snapshot.commit,
            dirty=bool(snapshot.dirty_files), dirty_files=snapshot.dirty_files, snapshot=snapshot.hash,
            manifest=snapshot.manifest, claims=plan.claims, expected=plan.expected, inputs=plan.inputs,
            cluster=plan.cluster, sabotage=plan.sabotage,
            sabotage_claims=tuple(claim.id for claim in plan.claims) if plan.sabotage else (),
        ),
    )  # fmt: skip


def orders_for(expected: Expected, plan: Plan, run: str, nonce: str) -> JobSpec:
    """One job's orders."""
    return JobSpec(
        run=run, nonce=nonce, job=expected.job, topology=expected.topology, tests=expected.tests,
        snapshot=plan.snapshot, env={**plan.env, "K3_BACKEND": expected.topology.backend}, sabotage=plan.sabotage,
        until_failure=until_failure(expected, plan) if plan.sabotage else {}, timeout_s=60.0 * expected.timeout_min,
        stall_s=expected.topology.stall_s,
    )  # fmt: skip


def until_failure(expected: Expected, plan: Plan) -> dict[str, tuple[str, ...]]:
    """Whose tests stop at the first failure: on one rank, every claim's; on several, that of a job of one claim."""
    if expected.topology.ranks > 1 and len(expected.claims) > 1:
        return {}
    cells = [cell for cell in plan.cells if cell.topology == expected.topology.name and cell.claim in expected.claims]
    return {cell.claim: cell.tests for cell in cells}


def submit(plan: Plan, cluster: Cluster, run_dir: Path) -> None:
    """Hand every job of a prepared run to the cluster."""
    executor(cluster).submit(run_dir, cluster, [Order(expected.job, 0) for expected in plan.expected])


def configure(parser: argparse.ArgumentParser) -> None:
    """Arguments of `k3-harness submit`."""
    from harness.planning import add_selection

    add_selection(parser)
    parser.add_argument("--dry-run", action="store_true", help="print the batch scripts and the cost; submit nothing")


def command(options: argparse.Namespace) -> int:
    """Plan and submit; whoever sees the spool may collect. 0: submitted, or nothing had to be."""
    from harness import planning, spool

    session = planning.prepare(options)
    if options.dry_run or not session.plan.expected:
        print(preview(session.plan, session.cluster, session.run_dir, session.nonce, session.snapshot))
        spool.discard(session.run_dir)
        return 0
    prepare(session.plan, session.snapshot, session.cluster, session.run_dir, session.nonce)
    submit(session.plan, session.cluster, session.run_dir)
    print(f"submitted {len(session.plan.expected)} jobs as run {session.run_dir.name}; "
          f"k3-harness collect {session.run_dir.name} --cluster {options.cluster} brings it home")  # fmt: skip
    return 0


def preview(plan: Plan, cluster: Cluster, run_dir: Path, nonce: str, snapshot: Snapshot) -> str:
    """What a submission would consist of, to the letter, and what it would cost at most and probably."""
    from harness import slurm
    from harness.planning import summary

    prepare(plan, snapshot, cluster, run_dir, nonce)
    specs = [load(run_dir / "jobs" / expected.job / "spec.json", JobSpec) for expected in plan.expected]
    parts = [summary(plan), f"cost: {plan.gpu_s / 3600:.2f} GPU-hours expected, {ceiling(specs):.2f} at most"]
    if cluster.scheduler == "local":
        return "\n".join([*parts, "the local executor writes no batch script"])
    for number, batch in enumerate(slurm.arrange(specs, cluster, slurm.array_limit())):
        group = f"g{number}"
        name = f"k3-{run_dir.name[-8:]}-{group}-(nonce)"
        parts.append(f"--- sbatch {number + 1}: {', '.join(spec.job for spec in batch)}")
        parts.append(slurm.script(run_dir, cluster, group, name, batch))
    return "\n".join(parts)


def ceiling(specs: list[JobSpec]) -> float:
    """GPU-hours if every job ran into its own time limit."""
    return sum(spec.timeout_s * spec.topology.gpus_per_node * spec.topology.nodes for spec in specs) / 3600
