"""`k3-harness logs`: what a job's ranks printed, from the spool; with -f as they print it."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from harness import selecting
from harness.spec import HarnessError
from harness.spool import attempts


def configure(parser: argparse.ArgumentParser) -> None:
    """Arguments of `k3-harness logs`."""
    parser.add_argument("job", help="a job, or the beginning of one")
    parser.add_argument("-f", "--follow", action="store_true", help="go on until the job has ended")
    parser.add_argument("--rank", type=int, help="one rank only; all if left out")
    parser.add_argument("--attempt", type=int, help="which attempt; the newest if left out")
    parser.add_argument("--batch", action="store_true", help="the scheduler's own log of the batch script")
    selecting.add_run(parser, positional=False)


def command(options: argparse.Namespace) -> int:
    """Print logs; a line says where each begins."""
    run_dir = selecting.run_of(options)
    job_dir = run_dir / "jobs" / selecting.jobs_of(run_dir, [options.job])[0]
    shown: dict[Path, int] = {}
    while True:
        for path in files(run_dir, job_dir, options):
            shown[path] = emit(path, shown.get(path, 0), run_dir)
        if not options.follow or (job_dir / "job.json").exists():
            break
        time.sleep(0.5)
    if not shown:
        raise HarnessError(f"job {job_dir.name} has left no log yet; see k3-harness status {run_dir.name}")
    return 0


def files(run_dir: Path, job_dir: Path, options: argparse.Namespace) -> list[Path]:
    """The logs that are meant and exist."""
    if options.batch:
        return sorted(path for path in (run_dir / "slurm").glob("*/*log.*") if path.is_file())
    folders = [path for path in attempts(job_dir) if options.attempt in (None, int(path.name))]
    if not folders:
        return []
    wanted = "rank*.log" if options.rank is None else f"rank{options.rank}.log"
    return sorted(folders[-1].glob(wanted), key=lambda path: int(path.stem.removeprefix("rank")))


def emit(path: Path, start: int, run_dir: Path) -> int:
    """Print a file from `start`; returns where it ends now."""
    with open(path, "rb") as file:
        file.seek(start)
        text = file.read()
    if text:
        print(f"==> {path.relative_to(run_dir)} <==", file=sys.stderr)
        sys.stdout.write(text.decode(errors="replace"))
        sys.stdout.flush()
    return start + len(text)
