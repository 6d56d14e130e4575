"""The embedded cluster: this machine, through submitit's local executor. One submitit task is our launcher.

Jobs wait in the run directory until there is room: at most as many ranks at once as there are processors, and GPU
jobs one at a time. Every look starts what fits, so any shell that sees the run can take it over.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from submitit import LocalExecutor
from submitit.helpers import CommandFunction

from harness import journal, process
from harness.cluster import Cluster
from harness.gather import Progress, View
from harness.journal import Group, Intent, Order, Placed
from harness.revision import search_path
from harness.slurm import load_cluster
from harness.spec import JobSpec, LaunchRecord, load, store
from harness.spool import job_dirs
from ledger.record import Attempt, JobRecord

MARGIN_MIN = 2  # submitit's own limit comes after ours, so that our launcher ends the job and says why
ENDINGS = {"terminated": "cancelled", "timeout": "timeout"}
CANCEL_PATIENCE_S = 10.0


def submit(run_dir: Path, cluster: Cluster, orders: Sequence[Order]) -> list[Group]:
    """Start the jobs that fit now; the rest wait for a later look."""
    del cluster, orders
    look(run_dir)
    return list(journal.groups(journal.read(run_dir)).values())


def look(run_dir: Path) -> Progress:
    """See how each job is doing, write the final record of those that ended, start those that fit."""
    with journal.lock(run_dir):
        lines = journal.read(run_dir)
        groups, cancelled = list(journal.groups(lines).values()), journal.cancelled(lines)
        retries = load_cluster(run_dir).retries
        views = [_view(folder, groups, cancelled, retries) for folder in job_dirs(run_dir)]
        progress = Progress(views)
        for view in views:
            if view.settled and not (run_dir / "jobs" / view.spec.job / "job.json").exists():
                _finish(run_dir, view)
                progress.newly_settled.append(view.spec.job)
        _start_what_fits(run_dir, views, groups, cancelled)
        return progress


def cancel(run_dir: Path, jobs: Sequence[str], reason: str) -> None:
    """End these jobs and wait until nothing of them runs; those that wait are never started."""
    with journal.lock(run_dir):
        journal.cancel(run_dir, tuple(jobs), reason)
    running = [folder for folder in job_dirs(run_dir) if folder.name in jobs]
    deadline = time.time() + CANCEL_PATIENCE_S
    while running and time.time() < deadline:
        running = [folder for folder in running if _end(run_dir, folder)]
        time.sleep(0.1)


def _view(job_dir: Path, groups: list[Group], cancelled: dict[str, str], retries: int) -> View:
    view = View(load(job_dir / "spec.json", JobSpec))
    for group in groups:
        order = group.intent.orders[0]
        if order.job == job_dir.name:
            view.attempts.append(_attempt(job_dir, order, group))
    if not view.attempts:
        view.note = "waits for room"
        view.settled = job_dir.name in cancelled
        if view.settled:
            reason = cancelled[job_dir.name]
            view.attempts.append(Attempt(number=0, state="cancelled", machine_fault=True, reason=reason))
        return view
    last = view.attempts[-1]
    again = last.machine_fault and last.state != "cancelled" and job_dir.name not in cancelled
    view.retry = again and len(view.attempts) <= retries
    view.settled = last.state not in ("pending", "running") and not view.retry
    return view


def _attempt(job_dir: Path, order: Order, group: Group) -> Attempt:
    """One attempt from the launcher's report and from the processes that should be there."""
    pid = group.scheduler_id.split(".")[0]
    known = {"number": order.attempt, "scheduler_id": pid, "submitted_at": group.intent.time}
    controller = _alive(group.scheduler_id)
    report = job_dir / "attempts" / str(order.attempt) / "launch.json"
    if not report.exists():
        if controller or (group.open and time.time() - group.intent.time < 1):
            return Attempt(**known, state="pending")
        reason = f"the launcher never started: {_last_words(job_dir)}"
        return Attempt(**known, state="launch_failed", machine_fault=True, reason=reason)
    launch = load(report, LaunchRecord)
    known |= {"nodes": (launch.node,), "tasks": 1, "started_at": launch.started_at}
    if launch.ended_at is not None:
        return _ended(known, launch)
    if process.alive(launch.pid, launch.pid_started):
        return Attempt(**known, state="running")
    launch = load(report, LaunchRecord)  # it may have ended between the two looks
    if launch.ended_at is not None:
        return _ended(known, launch)
    return Attempt(**known, state="failed", machine_fault=True, reason="the launcher was killed, and its ranks with it")


def _ended(known: dict, launch: LaunchRecord) -> Attempt:
    kind = launch.fault.kind if launch.fault else ""
    state = ENDINGS.get(kind, "completed" if launch.exit_code == 0 else "failed")
    machine = kind in ENDINGS or kind == "spool"
    return Attempt(
        **known, state=state, machine_fault=machine, reason=launch.fault.text if launch.fault else "",
        exit_code=launch.exit_code, ended_at=launch.ended_at, rank_exit_codes=launch.exit_codes,
    )  # fmt: skip


def _finish(run_dir: Path, view: View) -> None:
    spec = view.spec
    record = JobRecord(
        run=spec.run, nonce=spec.nonce, job=spec.job, scheduler="local", topology=spec.topology, tests=spec.tests,
        attempts=tuple(view.attempts), collected_at=time.time(), note="run by the local executor: nobody else to ask",
    )  # fmt: skip
    store(run_dir / "jobs" / spec.job / "job.json", record)


def _start_what_fits(run_dir: Path, views: list[View], groups: list[Group], cancelled: dict[str, str]) -> None:
    running = [view.spec.topology for view in views if view.attempts and not view.settled and not view.retry]
    for view in views:
        wants = view.spec.topology
        due = view.retry or (not view.attempts and view.spec.job not in cancelled)
        if not due or (running and not _fits(wants, running)):
            continue
        _start(run_dir, view.spec, len(view.attempts), len(groups))
        groups.append(None)
        running.append(wants)


def _fits(wants, running: list) -> bool:
    if wants.device == "cuda" and any(other.device == "cuda" for other in running):
        return False
    return wants.ranks + sum(other.ranks for other in running) <= len(os.sched_getaffinity(0))


def _start(run_dir: Path, spec: JobSpec, attempt: int, number: int) -> None:
    """Hand one job to submitit. The intent is written first, so that a crash in between leaves no job unknown."""
    intent = Intent(group=f"g{number}", name=spec.job, orders=(Order(spec.job, attempt),), time=time.time())
    job_dir = run_dir / "jobs" / spec.job
    executor = LocalExecutor(folder=job_dir / "submitit", max_num_timeout=0)
    minutes = int(spec.timeout_s / 60) + 1 + MARGIN_MIN
    executor.update_parameters(timeout_min=minutes, gpus_per_node=spec.topology.gpus_per_node)
    journal.append(run_dir, intent)
    command = [sys.executable, "-m", "harness.launch", str(job_dir), f"--attempt={attempt}"]
    function = CommandFunction(command, verbose=False, cwd=run_dir / "snapshot", env=_environment(run_dir))
    with _deaf_to_interrupts():
        job = executor.submit(function)
    pid = int(job.job_id)
    journal.append(run_dir, Placed(group=intent.group, scheduler_id=f"{pid}.{process.started(pid)}", time=time.time()))


def _environment(run_dir: Path) -> dict[str, str]:
    """The launcher's environment: the snapshot, no byte code in it, and one thread a rank, as room is counted."""
    own = {"PYTHONPATH": search_path(run_dir / "snapshot"), "PYTHONDONTWRITEBYTECODE": "1"}
    return {"OMP_NUM_THREADS": "1", **os.environ, **own}


@contextlib.contextmanager
def _deaf_to_interrupts() -> Iterator[None]:
    """Children started here ignore Ctrl-C: they are ended in order, by `cancel`."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _end(run_dir: Path, job_dir: Path) -> bool:
    """Tell a job's launcher to stop, or its controller where there is no launcher yet; False once neither lives."""
    living = False
    for group in journal.groups(journal.read(run_dir)).values():
        order = group.intent.orders[0]
        if order.job != job_dir.name:
            continue
        report = job_dir / "attempts" / str(order.attempt) / "launch.json"
        if report.exists():
            launch = load(report, LaunchRecord)
            identity = f"{launch.pid}.{launch.pid_started}"
        else:
            identity = group.scheduler_id
        if _alive(identity):
            living = True
            os.kill(int(identity.split(".")[0]), signal.SIGTERM)
    return living


def _alive(identity: str) -> bool:
    pid, _, start = identity.partition(".")
    return bool(pid) and process.alive(int(pid), int(start))


def _last_words(job_dir: Path) -> str:
    logs = sorted((job_dir / "submitit").glob("*.err"), key=lambda path: path.stat().st_mtime)
    lines = logs[-1].read_text(errors="replace").strip().splitlines() if logs else []
    return lines[-1] if lines else "it left no word"
