"""Random faults on random ranks of many small jobs: is anything green that should not be, or blamed on the code?

    python -m tests.slurm.bench_faults --local 1000 --slurm 100 [--seed 0]

A job has two ranks that meet twice; in between, the fault strikes one of them. Afterwards the ledger is asked about
each job's claim. Prints a table, and exits with 1 if one false green or one lost machine fault was counted as a
failure of the code.
"""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import msgspec

from harness import local, slurm, spool
from harness.cluster import Cluster
from harness.gather import Progress, look
from harness.journal import Order
from harness.spec import JobSpec, load, store
from ledger import claimfile
from ledger.claims import statuses
from ledger.ingest import ingest
from ledger.record import Topology
from tests.slurm.cluster import SlurmCluster
from tests.slurm.conftest import lab_profile
from tests.slurm.project import Project

CASES = '''
"""Two ranks meet, a fault may strike one of them, they meet again."""
import os, signal, time
from datetime import timedelta
from pathlib import Path
import pytest
import torch
import torch.distributed as dist

RANK = os.environ.get("RANK", "0")
FAULT, VICTIM, MEET = (os.environ.get(name, "") for name in ("CASE_FAULT", "CASE_RANK", "CASE_MEET"))


def meet(name):
    if not dist.is_initialized():
        dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    total = torch.ones(1)
    dist.all_reduce(total)
    assert total.item() == 2
    folder = Path(MEET) / os.environ["K3_ATTEMPT"]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.{RANK}").touch()


@pytest.mark.parametrize("case", [f"c{i:04}" for i in range(@COUNT@)])
def test_case(case):
    meet("before")
    if RANK == VICTIM:
        strike()
    meet("after")


def strike():
    if FAULT == "SIGKILL":
        os.kill(os.getpid(), signal.SIGKILL)
    if FAULT == "SIGSTOP":
        os.kill(os.getpid(), signal.SIGSTOP)
    if FAULT == "exit 0":
        os._exit(0)
    if FAULT == "hang":
        time.sleep(1000)
    if FAULT == "exception":
        raise ValueError("as planned")
    if FAULT == "skip":
        pytest.skip("as planned")
    if FAULT in ("cancel", "requeue") and os.environ["K3_ATTEMPT"] == "0":
        time.sleep(1000)
'''
CODE = ("SIGKILL", "SIGSTOP", "exit 0", "hang", "exception", "skip")  # faults of what runs: never green
MACHINE = ("full spool", "cancel", "requeue")  # faults of the machine: never held against the code
GREEN = ("none", "requeue")  # what must be green in the end


@dataclass(frozen=True)
class Case:
    """One job, and what is to strike it."""

    job: str
    fault: str
    victim: int


def plan_cases(count: int, faults: tuple[str, ...], seed: int) -> list[Case]:
    """`count` random faults on random ranks, the same for the same seed."""
    source = random.Random(seed)
    return [Case(f"c{i:04}", source.choice(faults), source.randrange(2)) for i in range(count)]


def make_project(folder: Path, count: int) -> Project:
    """A project that claims one thing per case."""
    folder.mkdir(parents=True)
    project = Project.make(folder)
    (project.root / "suites/cases.py").write_text(CASES.replace("@COUNT@", str(count)))
    text = 'schema = "1.0"\n[topologies.pair]\nranks = 2\nbackend = "gloo"\n'
    for i in range(count):
        text += f'[[claims]]\nid = "c{i:04}"\ntext = "case {i}"\ntests = ["suites/cases.py::test_case[c{i:04}]"]\n'
        text += 'topologies = ["pair"]\nkill_rate = 0.0\nkill_reason = "a benchmark of faults"\n'
    (project.root / "suites/claims.toml").write_text(text)
    return project


def prepare(project: Project, cases: list[Case], folder: Path) -> Path:
    """The run directory, with each job's fault in its orders; a full spool is a tiny file system of its own."""
    tests = {case.job: f"test_case[{case.job}]" for case in cases}
    run_dir = project.run(tests, Topology(name="pair", ranks=2, backend="gloo"), timeout_s=90, suite="cases")
    claims = tuple(claimfile.load(project.root).claims.values())
    spool.write_run(run_dir, msgspec.structs.replace(spool.read_run(run_dir), claims=claims))
    for case in cases:
        path = run_dir / "jobs" / case.job / "spec.json"
        spec = load(path, JobSpec)
        env = {"CASE_FAULT": case.fault, "CASE_RANK": str(case.victim), "CASE_MEET": str(folder / case.job)}
        store(path, msgspec.structs.replace(spec, env={**spec.env, **env}, stall_s=15.0, stopped_s=2.0, grace_s=1.0))
        if case.fault == "full spool":
            attempt = path.parent / "attempts" / "0"
            attempt.mkdir(parents=True)
            subprocess.run(["mount", "-t", "tmpfs", "-o", "size=12k", "k3tiny", attempt], check=True)
    return run_dir


def drive(run_dir: Path, cases: list[Case], looking, interfere) -> Progress:
    """Look until all is settled; `interfere` strikes the jobs whose fault comes from outside."""
    struck: set[str] = set()
    by_job, shown = {case.job: case for case in cases}, 0
    while True:
        progress = looking(run_dir)
        for view in progress.views:
            case = by_job[view.spec.job]
            outside = case.fault in ("cancel", "requeue") and case.job not in struck
            if outside and view.state == "running" and list(run_dir.parent.parent.glob(f"meet/{case.job}/0/before.*")):
                interfere(case, view.attempts[-1].scheduler_id)
                struck.add(case.job)
        if progress.complete:
            return progress
        done = sum(view.settled for view in progress.views)
        if done // 10 != shown:
            shown = done // 10
            print(f"{done} of {len(cases)} settled", file=sys.stderr, flush=True)
        time.sleep(0.5)


def run_local(folder: Path, count: int, seed: int) -> list[tuple]:
    """The cases through the local executor."""
    cases = plan_cases(count, ("none", *CODE, "full spool", "cancel"), seed)
    project = make_project(folder, count)
    run_dir = prepare(project, cases, folder / "meet")
    slurm.save_cluster(run_dir, Cluster(name="local", scheduler="local", retries=0))
    local.look(run_dir)

    def interfere(case, _id):
        local.cancel(run_dir, [case.job], "struck by the benchmark")

    progress = drive(run_dir, cases, local.look, interfere)
    return judge(project, run_dir, cases, progress, folder / "ledger.db")


def run_slurm(folder: Path, count: int, seed: int) -> list[tuple]:
    """The cases through a real Slurm, as one array."""
    cases = plan_cases(count, ("none", *CODE, *MACHINE), seed)
    project = make_project(folder, count)
    run_dir = prepare(project, cases, folder / "meet")
    with SlurmCluster(folder / "lab") as lab:
        os.environ["SLURM_CONF"] = str(lab.conf)
        profile = lab_profile(requeue=True, memory_gb_per_node=2.5, array_parallelism=3)
        slurm.save_cluster(run_dir, profile)
        slurm.submit(run_dir, profile, [Order(case.job, 0) for case in cases])

        def interfere(case, task):
            lab.run(*(("scancel",) if case.fault == "cancel" else ("scontrol", "requeue")), task, check=False)

        progress = drive(run_dir, cases, look, interfere)
        return judge(project, run_dir, cases, progress, folder / "ledger.db")


def judge(project: Project, run_dir: Path, cases: list[Case], progress: Progress, ledger: Path) -> list[tuple]:
    """(fault, claim's state, was a machine blamed, the ledger's reason) for each case."""
    for folder in spool.job_dirs(run_dir):
        subprocess.run(["umount", "-l", folder / "attempts" / "0"], stderr=subprocess.DEVNULL)
    ingest(run_dir, ledger)
    found = {status.id: status for status in statuses(project.root, ledger)}
    blamed = {view.spec.job: any(one.machine_fault for one in view.attempts) for view in progress.views}
    return [(case.fault, found[case.job].state, blamed[case.job], found[case.job].reason) for case in cases]


def report(title: str, rows: list[tuple]) -> int:
    """Print one table; returns the number of wrong cells."""
    print(f"\n{title}\n| fault | jobs | proven | refuted or flaky | other | machine blamed | wrong |")
    print("|---|---|---|---|---|---|---|")
    wrong = 0
    for fault in dict.fromkeys(row[0] for row in sorted(rows)):
        mine = [row for row in rows if row[0] == fault]
        states = Counter(row[1] for row in mine)
        faulty = [row for row in mine if is_wrong(*row[:3])]
        bad = len(faulty)
        wrong += bad
        for row in faulty[:3]:
            print(f"wrong: {row}", file=sys.stderr)
        against = states["refuted"] + states["flaky"]
        rest = len(mine) - states["proven"] - against
        print(
            f"| {fault} | {len(mine)} | {states['proven']} | {against} | {rest} | {sum(r[2] for r in mine)} | {bad} |"
        )
    return wrong


def is_wrong(fault: str, state: str, blamed: bool) -> bool:
    """A false green, a green lost without a machine to blame, or a machine's fault held against the code."""
    if fault in GREEN:
        return state in ("refuted", "flaky") or (state != "proven" and (not blamed or fault == "requeue"))
    if fault in MACHINE:
        return state in ("proven", "refuted", "flaky") or not blamed
    return state == "proven"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--local", type=int, default=1000)
    parser.add_argument("--slurm", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    wrong = 0
    with tempfile.TemporaryDirectory(prefix="k3f", ignore_cleanup_errors=True) as folder:
        if options.local:
            wrong += report("local executor", run_local(Path(folder) / "local", options.local, options.seed))
        if options.slurm:
            wrong += report("Slurm", run_slurm(Path(folder) / "slurm", options.slurm, options.seed))
    print(f"\nwrong: {wrong}")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
