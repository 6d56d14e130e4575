"""What runs as each rank: the start line first, then the proof that this is the planned code, then the tests.

Refuses to run (exit code 97) a tree that differs from the planned one, or packages that come from elsewhere.
"""

from __future__ import annotations

import argparse
import faulthandler
import os
import signal
import sys
import time
from pathlib import Path

from harness import beat, process, revision
from harness.blame import REFUSED
from harness.spec import JobSpec, RunRecord, load
from harness.stream import Stream
from ledger.record import End, Start, digest

SCHEDULER = ("SLURM", "SUBMITIT_LOCAL_JOB_ID")
SHOWN_DIFFERENCES = 3


def main(arguments: list[str] | None = None) -> int:
    """`python -m harness.job JOB_DIR --attempt N --rank R`, started by the launcher."""
    parser = argparse.ArgumentParser(prog="harness.job")
    parser.add_argument("job_dir", type=Path)
    parser.add_argument("--attempt", type=int, required=True)
    parser.add_argument("--rank", type=int, required=True)
    options = parser.parse_args(arguments)
    process.die_with_parent(int(os.environ["K3_LAUNCHER"]))
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    beat.start(Path(os.environ["K3_BEAT"]))
    return run(options.job_dir, options.attempt, options.rank)


def run(job_dir: Path, attempt: int, rank: int) -> int:
    """Record, verify, test. Returns pytest's exit code, or REFUSED."""
    spec = load(job_dir / "spec.json", JobSpec)
    tree = job_dir.parent.parent / "snapshot"
    found = revision.manifest(tree)
    stream = Stream(job_dir / "attempts" / str(attempt) / f"rank{rank}.jsonl")
    stream.write(start_line(spec, attempt, rank, digest(found)))
    if reasons := refusals(spec, tree, digest(found)):
        print("refused: " + "; ".join(reasons), file=sys.stderr)
        return REFUSED
    from harness.plugin import run_tests

    code, collected = run_tests(spec, tree, stream, rank)
    stream.write(End(time=time.time(), exit_code=code, collected=collected))
    return code


def start_line(spec: JobSpec, attempt: int, rank: int, snapshot: str) -> Start:
    """Who this rank is, before anything that could fail."""
    environment = {name: value for name, value in os.environ.items() if name.startswith(SCHEDULER)}
    return Start(
        run=spec.run, nonce=spec.nonce, job=spec.job, attempt=attempt, rank=rank,
        world_size=int(os.environ["WORLD_SIZE"]), snapshot=snapshot, pid=os.getpid(), time=time.time(),
        scheduler_env=environment,
    )  # fmt: skip


def refusals(spec: JobSpec, tree: Path, found: str) -> list[str]:
    """Every reason why this process must not run tests here."""
    reasons = []
    if found != spec.snapshot:
        planned = load(tree.parent / "run.json", RunRecord).manifest
        lines = revision.differences(planned, tree)
        reasons.append("the snapshot is not the planned one: " + ", ".join(lines[:SHOWN_DIFFERENCES]) + "; plan again")
    for name, origin in revision.origins(tree).items():
        if origin.startswith("/"):
            reasons.append(f"{name} resolves to {origin}, outside the snapshot; set PYTHONPATH to the snapshot alone")
    if sys.flags.optimize:
        reasons.append("python runs with -O, which drops asserts; run it without")
    return reasons


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # a hang or a crash while the interpreter is taken down would say nothing about the tests
