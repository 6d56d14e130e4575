"""Makes projects and run directories as the harness would, for tests to read, damage and forge.

A `Made` run holds plain dicts until `write()`: a test changes what it likes before or after.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from ledger import claimfile, closure
from ledger.record import Claim, Topology, digest

T0 = 1_750_000_000.0
TORCH = "2.13.0+cpu"
NODES = ("n1", "n2", "n3", "n4")

CLAIMS = """
schema = "1.0"
[topologies.cpu1]
device = "cpu"
[topologies.gloo2]
ranks = 2
backend = "gloo"
[topologies.nodes2]
ranks = 4
nodes = 2
backend = "gloo"
[topologies.shared4]
device = "cuda"
ranks = 4
backend = "gloo"
gpus_per_node = 2
[topologies.cuda2]
device = "cuda"
ranks = 2
backend = "nccl"
gpus_per_node = 2
[inputs.release]
env = "K3_RELEASE"
files = { "config.json" = "%s" }
[[claims]]
id = "kda.golden"
text = "KDA equals the vendor's vectors."
tests = ["suites/kda_suite.py::test_state", "suites/kda_suite.py::test_grad"]
topologies = ["cpu1", "gloo2", "nodes2", "cuda2"]
suites = ["quick"]
paths = ["torch.kda"]
[[claims]]
id = "moe.route"
text = "The router picks the top experts."
tests = ["suites/moe_suite.py::test_route"]
topologies = ["cpu1"]
[[claims]]
id = "io.release"
text = "The public release loads."
tests = ["suites/moe_suite.py::test_release"]
topologies = ["cpu1"]
inputs = ["release"]
""" % ("a" * 64)

TREE = {
    "k3/__init__.py": '"""k3."""\n',
    "k3/kda.py": '"""KDA."""\n\nfrom k3.ops import scan\n\nSCALE = 2.0\n\n\n'
    'def kda(x, scale=SCALE):\n    """Mix."""\n    # comment\n    return scan(x) * scale\n\n\n'
    "def unused(x):\n    return -x\n",
    "k3/ops.py": '"""Operators."""\n\n\ndef scan(x):\n    return x + 1\n',
    "k3/moe.py": '"""MoE."""\n\nTOP = 2\n\n\ndef route(x):\n    return x[:TOP]\n',
    "suites/__init__.py": "",
    "suites/kda_suite.py": "from k3.kda import kda\n\n\ndef test_state():\n    assert kda(1) == 4\n\n\n"
    "def test_grad():\n    assert kda(2) == 6\n",
    "suites/moe_suite.py": "from k3.moe import route\n\n\n"
    "def test_route():\n    assert route([1, 2, 3]) == [1, 2]\n\n\n"
    "def test_release():\n    assert True\n",
    "suites/claims.toml": CLAIMS,
    "README.md": "# Title\n\n<!-- matrix:begin -->\n<!-- matrix:end -->\n\nend\n",
}
# The functions each test executes, by piece.
EXECUTES = {
    "suites/kda_suite.py": ("k3/kda.py::kda", "k3/ops.py::scan"),
    "suites/moe_suite.py": ("k3/moe.py::route",),
}


def project(folder: Path) -> Path:
    """Write the little project; returns its root."""
    for path, text in TREE.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)
    (folder / "ledger" / "evidence").mkdir(parents=True)
    (folder / "ledger" / "keys").mkdir()
    return folder


def edit(root: Path, path: str, old: str, new: str) -> None:
    """Replace text in one file, which must hold it once."""
    text = (root / path).read_text()
    assert text.count(old) == 1, f"{old!r} stands {text.count(old)} times in {path}"
    (root / path).write_text(text.replace(old, new))


def test_pieces(root: Path, test: str) -> dict[str, str]:
    """The closure that the recorder would write for a test of the little project."""
    file, _, name = test.partition("::")
    wanted = {f"{file}::{name.split('[')[0]}", *EXECUTES[file]}
    found = {}
    for path in closure.static_files(root, [file]):
        for piece, value in closure.pieces((root / path).read_text()).items():
            if piece == "<module>" or f"{path}::{piece}" in wanted:
                found[f"{path}::{piece}"] = value
    return found


test_pieces.__test__ = False


@dataclass
class Made:
    """A run in the making: `head` is run.json, `jobs` are job.json by job, `ranks` lines by (job, attempt, rank)."""

    folder: Path
    root: Path
    head: dict
    jobs: dict[str, dict] = field(default_factory=dict)
    ranks: dict[tuple[str, int, int], list[dict]] = field(default_factory=dict)

    def write(self) -> Path:
        """Write everything down as the harness does; returns the run directory."""
        shutil.copytree(self.root, self.folder / "snapshot", ignore=shutil.ignore_patterns("README.md", "ledger"),
                        dirs_exist_ok=True)  # fmt: skip
        save(self.folder / "run.json", self.head)
        for job, record in self.jobs.items():
            save(self.folder / "jobs" / job / "job.json", record)
        for (job, attempt, rank), lines in self.ranks.items():
            file = self.folder / "jobs" / job / "attempts" / str(attempt) / f"rank{rank}.jsonl"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text("".join(json.dumps(line) + "\n" for line in lines))
        return self.folder

    def lines(self, kind: str, job: str | None = None, rank: int | None = None) -> list[dict]:
        """The lines of one kind, to change in place."""
        return [line for (name, _, number), lines in self.ranks.items() for line in lines
                if line["kind"] == kind and job in (None, name) and rank in (None, number)]  # fmt: skip

    def file(self, job: str, rank: int = 0, attempt: int = 0) -> Path:
        return self.folder / "jobs" / job / "attempts" / str(attempt) / f"rank{rank}.jsonl"


def save(path: Path, value: dict) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value))


def run(root: Path, spool: Path, *, cells=(("kda.golden", "cpu1"),), number: int = 1, scheduler: str = "local",
        torch: str = TORCH, sabotage: str = "", cluster: str = "lab") -> Made:  # fmt: skip
    """A clean run of some cells at the tree as it is: every test passes on every rank."""
    nonce = hashlib.sha256(f"nonce{number}".encode()).hexdigest()[:16]
    name = f"20250615t{number:06d}-{nonce[:8]}"
    claims = claimfile.load(root)
    manifest = {path: digest((root / path).read_bytes()) for path in sorted(TREE) if path != "README.md"}
    chosen = [(claims.claims[claim], claims.topologies[topology]) for claim, topology in cells]
    head = {
        "schema": "1.0", "recorder": 1, "run": name, "nonce": nonce, "created_at": T0 + number * 1000,
        "commit": "c" * 40, "dirty": False, "dirty_files": [], "snapshot": digest(manifest), "manifest": manifest,
        "claims": msgspec.to_builtins([claim for claim, _ in {c.id: (c, t) for c, t in chosen}.values()]),
        "expected": [expected(claim, topology) for claim, topology in chosen],
        "inputs": {}, "cluster": cluster if scheduler == "slurm" else "", "sabotage": sabotage,
        "sabotage_claims": [claim.id for claim, _ in chosen] if sabotage else [],
    }  # fmt: skip
    made = Made(spool / name, root, head)
    for index, (claim, topology) in enumerate(chosen):
        add_job(made, claim, topology, scheduler, torch, index)
    return made


def expected(claim: Claim, topology: Topology) -> dict:
    return {"job": f"{topology.name}.{claim.id}", "topology": msgspec.to_builtins(topology),
            "tests": list(claim.tests), "claims": [claim.id], "timeout_min": 10}  # fmt: skip


def add_job(made: Made, claim: Claim, topology: Topology, scheduler: str, torch: str, index: int) -> None:
    """One job with one clean attempt: the scheduler's word, the launcher's, and each rank's."""
    plan = expected(claim, topology)
    start = made.head["created_at"] + 10
    nodes = list(NODES[: topology.nodes])
    attempt = {
        "number": 0, "state": "completed", "machine_fault": False, "reason": "", "scheduler_id": str(100 + index),
        "nodes": nodes, "tasks": topology.nodes, "alloc_tres": tres(topology), "exit_code": 0, "signal": 0,
        "submitted_at": start - 5, "started_at": start - 1, "ended_at": start + 20,
        "rank_exit_codes": {str(rank): 0 for rank in range(topology.ranks)},
    }  # fmt: skip
    job = {
        "schema": "1.0", "run": made.head["run"], "nonce": made.head["nonce"], "job": plan["job"],
        "scheduler": scheduler, "cluster": made.head["cluster"], "topology": plan["topology"], "tests": plan["tests"],
        "attempts": [attempt], "answers": [], "collected_at": start + 30, "note": "",
    }  # fmt: skip
    if scheduler == "slurm":
        job["answers"] = [sacct(made, topology, attempt)]
    made.jobs[plan["job"]] = job
    for rank in range(topology.ranks):
        made.ranks[plan["job"], 0, rank] = rank_lines(made, claim, topology, rank, scheduler, torch, attempt)


def tres(topology: Topology) -> str:
    gpus = f",gres/gpu={topology.gpus_per_node * topology.nodes}" if topology.gpus_per_node else ""
    return f"billing=2,cpu=2{gpus},node={topology.nodes}"


SACCT = ("JobID", "JobIDRaw", "JobName", "State", "ExitCode", "DerivedExitCode", "Reason", "NodeList", "NNodes",
         "NTasks", "AllocTRES", "Submit", "Start", "End", "Partition", "Account", "QOS")  # fmt: skip


def sacct(made: Made, topology: Topology, attempt: dict) -> dict:
    """What `sacct -D -P` says of the job and its step."""
    nodes = "n1" if topology.nodes == 1 else f"n[1-{topology.nodes}]"
    number, times = attempt["scheduler_id"], [str(int(attempt[k])) for k in ("submitted_at", "started_at", "ended_at")]
    common = [nodes, str(topology.nodes)]
    head = [number, number, made.head["run"], "COMPLETED", "0:0", "0:0", "None", *common, "", attempt["alloc_tres"],
            *times, "main", "root", "normal"]  # fmt: skip
    step = [f"{number}.0", f"{number}.0", "python", "COMPLETED", "0:0", "", "", *common, str(topology.nodes),
            attempt["alloc_tres"], *times, "", "root", ""]  # fmt: skip
    output = "\n".join("|".join(row) for row in (SACCT, head, step))
    return {"command": ["sacct", "-D", "-P", "-j", number, "-o", ",".join(SACCT)], "asked_at": attempt["ended_at"] + 5,
            "exit_code": 0, "output": output, "error": ""}  # fmt: skip


def rank_lines(made: Made, claim: Claim, topology: Topology, rank: int, scheduler: str, torch: str, attempt) -> list:
    """The stream of a rank on which every test passes."""
    node = NODES[rank * topology.nodes // topology.ranks]
    local = rank % (topology.ranks // topology.nodes)
    at = attempt["started_at"] + 2
    env = {"SLURM_JOB_ID": attempt["scheduler_id"], "SLURMD_NODENAME": node, "SLURM_RESTART_COUNT": "0"}
    gpus = [{"index": local, "name": "NVIDIA H200", "uuid": f"GPU-{node}-{local}"}] if topology.device == "cuda" else []
    lines = [
        {"kind": "start", "schema": "1.0", "recorder": 1, "run": made.head["run"], "nonce": made.head["nonce"],
         "job": f"{topology.name}.{claim.id}", "attempt": 0, "rank": rank, "world_size": topology.ranks,
         "snapshot": made.head["snapshot"], "pid": 1000 + rank, "time": at,
         "scheduler_env": env if scheduler == "slurm" else {}},
        {"kind": "environment", "device": topology.device, "backend": topology.backend,
         "modules": {"k3": "k3/__init__.py", "suites": "suites/__init__.py"},
         "fingerprint": {"host": f"secret-host-{node}", "node": node, "torch": torch, "python": "3.11.7", "gpus": gpus,
                         "os": "Linux", "cpu": "x", "cpu_count": 2, "env": {"OMP_NUM_THREADS": "1"}}},
    ]  # fmt: skip
    for step, test in enumerate(claim.tests):
        begun = at + 1 + step * 2
        lines.append({"kind": "test_start", "test": test, "time": begun})
        lines.append({"kind": "test_end", "test": test, "outcome": "passed", "duration_s": 0.5, "time": begun + 0.6,
                      "paths": list(claim.paths), "closure": test_pieces(made.root, test), "kernels": [],
                      "measures": [], "message": "", "data": {}})  # fmt: skip
    end = {"kind": "end", "time": at + 10, "exit_code": 0, "collected": list(claim.tests)}
    return [*lines, end]
