"""A small project tree with its own claims, suites and k3, around the real harness and ledger. Ranks start in 0.3 s."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

from msgspec.structs import replace

from harness import cluster as clusters
from harness import revision, spool, submit
from harness.plan import Planner, Request
from harness.spec import JobSpec, load, store

PROJECT = Path(__file__).resolve().parents[2]
TOPOLOGIES = """
schema = "1.0"
[topologies.cpu1]
device = "cpu"
[topologies.toy4]
ranks = 4
backend = "gloo"
stall_s = 4.0
"""
K3_MATH = '''
"""The toy's model."""


def double(x):
    return 2 * x


def triple(x):
    return 3 * x
'''
SUITE = '''
"""The toy's suite."""
from k3.math import double


def test_double():
    assert double(2) == 4
'''


@dataclass
class Toy:
    """One tree, with a state folder of its own."""

    root: Path
    state: Path
    claims: list[str] = field(default_factory=list)
    more: dict[str, str] = field(default_factory=dict)  # further environment of this user

    def write(self, path: str, text: str) -> Path:
        """Write one file of the tree."""
        target = self.root / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)
        return target

    def claim(self, name: str, *tests: str, topology: str = "cpu1", more: str = "") -> None:
        """Claim something."""
        listed = ", ".join(f'"{test}"' for test in tests)
        self.claims.append(
            f'[[claims]]\nid = "{name}"\ntext = "The toy does {name}"\ntests = [{listed}]\n'
            f'topologies = ["{topology}"]\nsuites = ["quick"]\nkill_rate = 0.0\nkill_reason = "toy"\n{more}\n'
        )
        self.write("suites/claims.toml", TOPOLOGIES + "\n".join(self.claims))

    @property
    def env(self) -> dict[str, str]:
        """The environment of a user of this tree."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("K3_", "PYTEST"))}
        own = {"K3_STATE_DIR": str(self.state), "PYTHONPATH": str(self.root), "PYTHONDONTWRITEBYTECODE": "1"}
        return {**kept, **own, **self.more}

    def start(self, *arguments: str, module: str = "harness.cli") -> subprocess.Popen:
        """Start `k3-harness ARGUMENTS` in the tree."""
        return subprocess.Popen(
            [sys.executable, "-m", module, *arguments], cwd=self.root, env=self.env, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip

    def run(self, *arguments: str, module: str = "harness.cli", timeout: float = 60) -> subprocess.CompletedProcess:
        """Run `k3-harness ARGUMENTS` in the tree to its end."""
        process = self.start(*arguments, module=module)
        out, err = process.communicate(timeout=timeout)
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)

    def planned(self, *names: str) -> Path:
        """Snapshot and plan in this process, write the run directory, submit nothing."""
        run_dir, nonce = spool.new_run(str(self.state / "runs"))
        snapshot = revision.take(self.root, run_dir / "snapshot")
        plan = Planner(root=self.root, snapshot=snapshot, request=Request(names=names), statuses=[]).plan()
        assert plan.expected, plan.cells
        submit.prepare(plan, snapshot, clusters.find("local"), run_dir, nonce)
        return run_dir

    def launch(self, run_dir: Path, job: str, environment: dict | None = None, **orders) -> subprocess.Popen:
        """Start the launcher of one job from inside the snapshot, with changed orders."""
        path = run_dir / "jobs" / job / "spec.json"
        store(path, replace(load(path, JobSpec), **orders))
        env = {**self.env, "PYTHONPATH": str(run_dir / "snapshot"), **(environment or {})}
        return subprocess.Popen(
            [sys.executable, "-m", "harness.launch", str(path.parent), "--attempt=0"], cwd=run_dir / "snapshot",
            env=env, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip

    @property
    def runs(self) -> list[Path]:
        """The run directories, oldest first."""
        return sorted((self.state / "runs").glob("*-*"))


def make(folder: Path) -> Toy:
    """Lay out the tree: real harness and ledger, real conftest and ranks of the suites, a toy k3 and one claim."""
    toy = Toy(folder / "project", folder / "state")
    for package in ("harness", "ledger"):
        ignored = shutil.ignore_patterns("__pycache__", "evidence", "keys")
        shutil.copytree(PROJECT / package, toy.root / package, ignore=ignored)
    for path in ("suites/__init__.py", "suites/conftest.py", "suites/ranks.py", "k3/paths.py", "pyproject.toml"):
        toy.write(path, (PROJECT / path).read_text())
    toy.write("k3/__init__.py", "from k3.paths import announce\n")
    toy.write("k3/math.py", K3_MATH)
    toy.write("suites/toy.py", SUITE)
    toy.claim("toy.double", "suites/toy.py::test_double")
    return toy
