"""Every fault a cluster can have, brought about in one cluster at one time; what became of each job is kept.

Nodes n1 and n2 are left in peace; n3 is taken away by a job of higher priority, n4 dies.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path

from harness.gather import Progress, look, read_reports
from ledger.record import Topology
from tests.slurm.cluster import SlurmCluster
from tests.slurm.conftest import lab_profile
from tests.slurm.project import Project, submit

CALM = "n3,n4"  # nodes to keep away from
EAT = "python3 -c 'import os; hoard = [bytearray(os.urandom(1 << 16)) * 256 for _ in range(999)]'"


@dataclass
class Storm:
    """The cluster, the project, and one run per fault."""

    lab: SlurmCluster
    project: Project
    folder: Path
    runs: dict[str, Path] = field(default_factory=dict)
    ids: dict[str, str] = field(default_factory=dict)
    seen: dict[str, list[str]] = field(default_factory=dict)  # states of the last attempt, in the order first seen
    done: dict[str, Progress] = field(default_factory=dict)

    def add(self, name: str, test: str, topology: Topology | None = None, timeout_s: float = 240, **changes) -> None:
        """Submit one job whose fate is then ours to decide."""
        here = self.folder / name
        here.mkdir(parents=True)
        self.runs[name] = self.project.run({name: test}, topology, timeout_s, PROBE_FOLDER=str(here))
        profile = lab_profile(**{"exclude": CALM, **changes})
        self.ids[name] = submit(self.runs[name], profile)[0]

    def waiting(self, name: str) -> None:
        """Return once the job's test has begun to wait."""
        self.lab.wait(lambda: any((self.folder / name).glob("started.*")), 60)

    def go(self, *names: str) -> None:
        """Let the waiting tests of these jobs end well."""
        for name in names:
            (self.folder / name / "go").touch()

    def watch(self, seconds: float) -> None:
        """Look at every run in turn until each is settled."""
        deadline = time.monotonic() + seconds
        while set(self.done) != set(self.runs):
            for name in set(self.runs) - set(self.done):
                self.look(name)
            if time.monotonic() > deadline:
                left = {name: self.seen[name] for name in set(self.runs) - set(self.done)}
                raise TimeoutError(f"not settled after {seconds} s: {left}")
            time.sleep(1)

    def look(self, name: str) -> Progress:
        """One look at one run, noting the state it shows."""
        progress = look(self.runs[name])
        states = self.seen.setdefault(name, [])
        last = progress.views[0].attempts[-1]
        word = f"{last.state} {last.reason}".strip()
        if word not in states:
            states.append(word)
        if progress.complete:
            self.done[name] = progress
        return progress


def rage(storm: Storm) -> None:
    """Submit everything, then break what must break, then watch until all is settled."""
    _submit(storm)
    _break(storm)
    storm.watch(240)


def _submit(storm: Storm) -> None:
    waits = "test_waits_for_a_file"
    on = {node: {"exclude": "", "sbatch": {"nodelist": node}} for node in ("n3", "n4")}
    storm.add("time limit, unwarned", waits, warning_s=0, sbatch={"time": 1})
    storm.add("time limit, warned", waits, warning_s=30, sbatch={"time": 1})
    storm.add("node fails", waits, **on["n4"])
    storm.add("node fails, tried again", waits, retries=1, **on["n4"])
    storm.add("node fails, requeued", waits, requeue=True, **on["n4"])
    storm.add("preempted and requeued", waits, partition="low", requeue=True, **on["n3"])
    storm.add("preempted and cancelled", waits, partition="scrap", **on["n3"])
    storm.add("out of memory in the step", "test_eats_memory")
    storm.add("out of memory in the job", "test_ok", setup=(EAT,))
    storm.add("cancelled while pending", waits, sbatch={"hold": True})
    storm.add("cancelled while running", waits)
    storm.add("held and released", "test_ok", sbatch={"hold": True})
    storm.add("over the partition's limit", "test_ok", partition="short", sbatch={"time": 10})
    storm.add("suspended and resumed", waits)
    storm.add("requeued after finishing", "test_ok", requeue=True)
    storm.add("log folder gone", "test_ok", sbatch={"hold": True})
    storm.add("python gone", "test_ok", python="/no/such/python")
    storm.add("launcher killed", waits)
    storm.add("tests fail", "test_fails", retries=1)
    storm.add("one rank dies", "test_first_rank_dies", Topology(name="x4", ranks=4, nodes=2, backend="gloo"))
    storm.add("no such account", "test_ok", account="nobody")
    storm.add("no such QOS", "test_ok", qos="gold")
    storm.add("no such partition", "test_ok", partition="moon")
    storm.add("too many GPUs", "test_ok", Topology(name="g", device="cuda", gpus_per_node=9), gpus_per_node=9)
    storm.add("dependency never satisfied", "test_ok", dependency=f"afterok:{storm.ids['tests fail']}")
    _full_spool(storm)


def _full_spool(storm: Storm) -> None:
    """A run whose spool is a tiny file system, filled between submission and start."""
    small = storm.folder / "small"
    small.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "k3small", small], check=True)
    project = Project(storm.project.root, small)
    run_dir = project.run({"spool full": "test_ok"})
    storm.runs["spool full"] = run_dir
    storm.ids["spool full"] = submit(run_dir, lab_profile(exclude=CALM, sbatch={"hold": True}))[0]
    with open(small / "filler", "wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(b"x" * 4096)


def _break(storm: Storm) -> None:
    lab, ids = storm.lab, storm.ids
    shutil.rmtree(storm.runs["log folder gone"] / "slurm")
    for name in ("log folder gone", "spool full"):
        lab.run("scontrol", "release", ids[name])
    lab.wait(lambda: storm.look("held and released").views[0].attempts[-1].reason == "JobHeldUser", 30)
    lab.run("scontrol", "release", ids["held and released"])
    lab.run("scancel", ids["cancelled while pending"])
    for name in ("node fails", "node fails, tried again", "node fails, requeued"):
        storm.waiting(name)
        storm.look(name)
    lab.kill_node(4)
    for name in ("preempted and requeued", "preempted and cancelled"):
        storm.waiting(name)
    taker = lab.run("sbatch", "--parsable", "-wn3", "-n16", "--mem=7900", "-o/dev/null", "--wrap", "sleep 3").strip()
    storm.waiting("cancelled while running")
    lab.run("scancel", ids["cancelled while running"])
    storm.waiting("suspended and resumed")
    lab.run("scontrol", "suspend", ids["suspended and resumed"])
    lab.wait(lambda: storm.look("suspended and resumed").views[0].state == "suspended", 30)
    lab.run("scontrol", "resume", ids["suspended and resumed"])
    storm.waiting("launcher killed")
    os.kill(launcher_pid(storm.runs["launcher killed"]), 9)
    lab.wait(lambda: lab.state(ids["requeued after finishing"]) == "COMPLETED", 60)
    storm.look("requeued after finishing")
    lab.run("scontrol", "requeue", ids["requeued after finishing"])
    del storm.done["requeued after finishing"]
    lab.wait(lambda: lab.state(ids["spool full"]) == "FAILED", 60)
    (storm.folder / "small" / "filler").unlink()
    lab.wait(lambda: lab.state(taker) == "COMPLETED", 60)
    lab.wait(lambda: "State=DOWN" in lab.run("scontrol", "-o", "show", "node", "n4"), 120)
    lab.start_node(4)
    storm.go(*storm.runs.keys() - {"time limit, warned", "time limit, unwarned", "spool full"})


def launcher_pid(run_dir: Path) -> int:
    """The process id of a run's only launcher, from its own report."""
    return next(report.pid for folder in run_dir.glob("jobs/*/attempts/*") for report in read_reports(folder))
