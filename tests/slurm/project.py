"""A small project and run directories made from it, so that a job's fate is the only thing under test."""

from __future__ import annotations

import shutil
import time
from dataclasses import dataclass
from pathlib import Path

from harness import revision, slurm, spool
from harness.cluster import Cluster
from harness.gather import Progress, look
from harness.journal import Order
from harness.spec import JobSpec, store
from ledger.record import Claim, Expected, RunRecord, Topology

ROOT = Path(__file__).parents[2]

PROBE = '''
"""Tests whose fate is decided from outside."""
import os, time

def test_ok():
    assert True

def test_fails():
    assert False, "as planned"

def test_sleeps():
    time.sleep(float(os.environ.get("PROBE_S", "20")))

def test_eats_memory():
    hoard = []
    while True:
        hoard.append(bytearray(os.urandom(4096)) * 4096)

def test_waits_for_a_file():
    folder = os.environ["PROBE_FOLDER"]
    open(os.path.join(folder, "started." + os.environ["SLURM_JOB_ID"]), "w").close()
    while not os.path.exists(os.path.join(folder, "go")):
        time.sleep(0.1)

def test_first_rank_dies():
    if os.environ["RANK"] == "1":
        os._exit(7)
    time.sleep(60)
'''


@dataclass
class Project:
    """A tree to take snapshots of, and a spool to run them from."""

    root: Path
    spool: Path

    @classmethod
    def make(cls, folder: Path) -> Project:
        """Copy harness and ledger as they are, with a probe in place of the suites."""
        root = folder / "project"
        skip = shutil.ignore_patterns("__pycache__", "evidence")
        for name in ("harness", "ledger"):
            shutil.copytree(ROOT / name, root / name, ignore=skip)
        for name, text in {"k3/__init__.py": "", "suites/__init__.py": "", "suites/probe.py": PROBE,
                           "suites/claims.toml": 'schema = "1.0"\n', "pyproject.toml": ""}.items():  # fmt: skip
            (root / name).parent.mkdir(exist_ok=True)
            (root / name).write_text(text)
        (folder / "spool").mkdir()
        return cls(root, folder / "spool")

    def run(
        self, jobs: dict[str, str], topology: Topology | None = None, timeout_s: float = 120, suite="probe", **env
    ) -> Path:
        """A planned run: each job is one test of the suite. Nothing is submitted."""
        topology = topology or Topology(name="cpu1")
        run_dir, nonce = spool.new_run(str(self.spool))
        snapshot = revision.take(self.root, run_dir / "snapshot")
        expected, claims = [], []
        for job, test in jobs.items():
            tests = (f"suites/{suite}.py::{test}",)
            spec = JobSpec(run=run_dir.name, nonce=nonce, job=job, topology=topology, tests=tests,
                           snapshot=snapshot.hash, timeout_s=timeout_s,
                           env={**env, "OMP_NUM_THREADS": "1"})  # fmt: skip
            (run_dir / "jobs" / job).mkdir(parents=True)
            store(run_dir / "jobs" / job / "spec.json", spec)
            expected.append(Expected(job=job, topology=topology, tests=tests, claims=(job,)))
            claims.append(Claim(id=job, text=f"{job} runs", tests=tests, topologies=(topology.name,)))
        record = RunRecord(run=run_dir.name, nonce=nonce, created_at=time.time(), snapshot=snapshot.hash,
                           manifest=snapshot.manifest, claims=tuple(claims), expected=tuple(expected))  # fmt: skip
        spool.write_run(run_dir, record)
        return run_dir


def submit(run_dir: Path, cluster: Cluster, jobs: list[str] | None = None) -> list[str]:
    """Submit all jobs of a run (or those named); returns the scheduler's ids."""
    slurm.save_cluster(run_dir, cluster)
    names = jobs or [folder.name for folder in spool.job_dirs(run_dir)]
    return [group.scheduler_id for group in slurm.submit(run_dir, cluster, [Order(name, 0) for name in names])]


def settle(run_dir: Path, seconds: float = 120) -> Progress:
    """Look again and again until nothing more is expected of any job."""
    deadline = time.monotonic() + seconds
    while not (progress := look(run_dir)).complete:
        if time.monotonic() > deadline:
            raise TimeoutError(f"after {seconds} s: {[(view.spec.job, view.attempts) for view in progress.views]}")
        time.sleep(0.5)
    return progress


def states(progress: Progress) -> dict[str, list[str]]:
    """The states of every attempt, by job."""
    return {view.spec.job: [attempt.state for attempt in view.attempts] for view in progress.views}
