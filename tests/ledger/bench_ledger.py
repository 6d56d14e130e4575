"""How the ledger bears a million test records: ingest rate, file size, and the time of each reading command.

    python -m tests.ledger.bench_ledger [--records 1000000]

Runs are generated one at a time (a run of 5,000 records: 10 claims on 5 ranks, 100 tests each), ingested and removed.
Commands are timed as a user starts them, against `python -c pass`.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from ledger.claimfile import load
from ledger.closure import pieces
from ledger.ingest import ingest
from ledger.record import digest
from tests.ledger import make

CLAIMS, TESTS, RANKS, FILES, FUNCTIONS = 10, 100, 5, 12, 12
RECORDS_PER_RUN = CLAIMS * TESTS * RANKS


def project(root: Path) -> Path:
    """A project of some size: 12 model files of 12 functions, 10 suites of 100 tests."""
    tree = {
        f"k3/m{i}.py": "".join(f"def f{j}(x):\n    return x + {j}\n\n\n" for j in range(FUNCTIONS))
        for i in range(FILES)
    }
    for c in range(CLAIMS):
        imports = f"from k3.m{c} import f0, f1\n\n\n"
        tree[f"suites/s{c}.py"] = imports + "".join(f"def test_{t}():\n    assert f0({t})\n\n\n" for t in range(TESTS))
    text = 'schema = "1.0"\n[topologies.gloo5]\nranks = 5\nbackend = "gloo"\n'
    for c in range(CLAIMS):
        tests = json.dumps([f"suites/s{c}.py::test_{t}" for t in range(TESTS)])
        text += f'[[claims]]\nid = "c{c}.holds"\ntext = "Claim {c}."\ntests = {tests}\ntopologies = ["gloo5"]\n'
    tree |= {"suites/claims.toml": text, "README.md": make.TREE["README.md"]}
    for path, content in tree.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(content)
    (root / "ledger" / "evidence").mkdir(parents=True)
    (root / "ledger" / "keys").mkdir()
    return root


def write_run(root: Path, spool: Path, number: int) -> Path:
    """One clean run of every claim; from time to time the tree has changed in between."""
    nonce = hashlib.sha256(str(number).encode()).hexdigest()[:16]
    folder = spool / f"20250615t{number:06d}-{nonce[:8]}"
    claims = load(root)
    files = [p for p in sorted(root.rglob("*")) if p.is_file() and p.name != "README.md"]
    manifest = {p.relative_to(root).as_posix(): digest(p.read_bytes()) for p in files}
    topology = claims.topologies["gloo5"]
    head = {
        "run": folder.name, "nonce": nonce, "created_at": make.T0 + 100 * number, "snapshot": digest(manifest),
        "manifest": manifest, "claims": [json.loads(json.dumps(_plain(c))) for c in claims.claims.values()],
        "expected": [make.expected(claim, topology) for claim in claims.claims.values()],
    }  # fmt: skip
    shutil.copytree(root, folder / "snapshot", ignore=shutil.ignore_patterns("README.md", "ledger"))
    make.save(folder / "run.json", head)
    hashes = {path: pieces((root / path).read_text()) for path in manifest if path.endswith(".py")}
    for index, claim in enumerate(claims.claims.values()):
        write_job(folder, head, claim, topology, hashes, index)
    return folder


def _plain(claim) -> dict:
    return {name: getattr(claim, name) for name in claim.__struct_fields__}


def write_job(folder: Path, head: dict, claim, topology, hashes: dict, index: int) -> None:
    """One job with its rank files; every test of a claim has a closure of its own."""
    made = make.Made(folder, folder, head | {"cluster": ""})
    made.ranks = {}
    job = f"gloo5.{claim.id}"
    used = {f"k3/m{index}.py::{name}": value for name, value in hashes[f"k3/m{index}.py"].items()}
    suite = hashes[f"suites/s{index}.py"]
    start = head["created_at"] + 10
    for rank in range(RANKS):
        lines = [
            {"kind": "start", "run": head["run"], "nonce": head["nonce"], "job": job, "attempt": 0, "rank": rank,
             "world_size": RANKS, "snapshot": head["snapshot"], "pid": 100 + rank, "time": start},
            {"kind": "environment", "device": "cpu", "backend": "gloo",
             "fingerprint": {"host": "h", "node": "h", "torch": make.TORCH, "python": "3.11.7"}},
        ]  # fmt: skip
        for place, test in enumerate(claim.tests):
            file, _, name = test.partition("::")
            closure = used | {f"{file}::<module>": suite["<module>"], test: suite[name]}
            lines.append({"kind": "test_start", "test": test, "time": start + place / 10})
            lines.append({"kind": "test_end", "test": test, "outcome": "passed", "duration_s": 0.05,
                          "time": start + place / 10 + 0.05, "closure": closure})  # fmt: skip
        lines.append({"kind": "end", "time": start + 11, "exit_code": 0, "collected": list(claim.tests)})
        file = made.file(job, rank)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    attempt = {"number": 0, "state": "completed", "nodes": ["h"], "tasks": 1, "exit_code": 0,
               "submitted_at": start - 2, "started_at": start - 1, "ended_at": start + 12,
               "rank_exit_codes": {str(rank): 0 for rank in range(RANKS)}}  # fmt: skip
    plan = head["expected"][index]
    make.save(folder / "jobs" / job / "job.json", {
        "run": head["run"], "nonce": head["nonce"], "job": job, "scheduler": "local", "topology": plan["topology"],
        "tests": plan["tests"], "attempts": [attempt], "collected_at": start + 20})  # fmt: skip


def timed(arguments: list[str], root: Path, best_of: int = 5) -> tuple[float, float]:
    """Best wall and processor time of a command, as a fresh process."""
    wall = cpu = float("inf")
    for _ in range(best_of):
        begun, before = time.perf_counter(), os.times()
        subprocess.run(arguments, cwd=root, check=True, stdout=subprocess.DEVNULL)
        after = os.times()
        wall = min(wall, time.perf_counter() - begun)
        used = after.children_user + after.children_system - before.children_user - before.children_system
        cpu = min(cpu, used)
    return wall, cpu


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--records", type=int, default=1_000_000)
    runs = -(-options.parse_args().records // RECORDS_PER_RUN)
    with tempfile.TemporaryDirectory() as place:
        os.environ["K3_STATE_DIR"] = place
        os.environ["PYTHONPATH"] = str(Path(__file__).resolve().parents[2])
        root, ledger = project(Path(place) / "project"), Path(place) / "ledger.db"
        took, size = [0.0, 0.0], 0
        for number in range(1, runs + 1):
            if number % 20 == 0:
                make.edit(root, "k3/m0.py", "def f1(x):\n", f"def f1(x):\n    x += {number}\n")
            folder = write_run(root, Path(place) / "runs", number)
            size += sum(file.stat().st_size for file in folder.rglob("rank*.jsonl"))
            begun = time.perf_counter(), time.process_time()
            done = ingest(folder, ledger)
            took = [took[0] + time.perf_counter() - begun[0], took[1] + time.process_time() - begun[1]]
            assert done.records == RECORDS_PER_RUN, done
            shutil.rmtree(folder)
        report(root, ledger, runs, took, size)


def report(root: Path, ledger: Path, runs: int, took: list[float], size: int) -> None:
    """Print the table of the README."""
    records, kept = runs * RECORDS_PER_RUN, ledger.stat().st_size
    print(f"| records | {records:,} in {runs} runs, {size / records:,.0f} bytes each |")
    print(f"| ingest | {records / took[0]:,.0f} records/s ({records / took[1]:,.0f} per second of processor) |")
    print(f"| ledger file | {kept / 2**20:,.0f} MiB, {kept / records:,.0f} bytes a record |")
    python, command = [sys.executable, "-c"], [sys.executable, "-m", "ledger.cli"]
    rows = {"python -c pass": [*python, "pass"], "claims": [*command, "claims"], "why": [*command, "why", "c0.holds"]}
    rows |= {"matrix": [*command, "matrix", "--local"], "show": [*command, "show"]}
    for name, arguments in rows.items():
        wall, cpu = timed(arguments, root)
        print(f"| {name} | {wall:.3f} s ({cpu:.3f} s of processor) |")


if __name__ == "__main__":
    main()
