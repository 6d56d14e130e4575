"""The spool: run directories, which are the truth. Owns their names and where things lie inside one."""

from __future__ import annotations

import re
import secrets
import shutil
import time
from pathlib import Path

from harness.spec import HarnessError, RunRecord, load, store
from ledger.state import state_dir

RUN_ID = re.compile(r"^\d{8}T\d{6}-[0-9a-f]{8}$")


def runs_dir(spool: str = "") -> Path:
    """The folder of all runs: the cluster's shared spool, else `runs` in the user's state folder."""
    return Path(spool).expanduser() if spool else state_dir() / "runs"


def new_run(spool: str = "") -> tuple[Path, str]:
    """Make a fresh run directory; returns it and the nonce that every record of the run must carry."""
    nonce = secrets.token_hex(16)
    run_dir = runs_dir(spool) / f"{time.strftime('%Y%m%dT%H%M%S', time.gmtime())}-{nonce[:8]}"
    run_dir.mkdir(parents=True)
    return run_dir, nonce


def find_run(name: str = "", spool: str = "") -> Path:
    """The run called `name` (a path, an id, or the beginning or end of one); the newest when no name is given."""
    if name and (Path(name) / "run.json").is_file():
        return Path(name).resolve()
    folder = runs_dir(spool)
    known = sorted(path.parent for path in folder.glob("*/run.json") if RUN_ID.match(path.parent.name))
    found = [path for path in known if path.name.startswith(name) or path.name.endswith(name)]
    if not found:
        raise HarnessError(f"no run {name!r} in {folder}; it holds {len(known)} runs, see k3-harness status")
    if name and len(found) > 1:
        raise HarnessError(f"{name!r} names {len(found)} runs, e.g. {found[0].name}, {found[1].name}; give more of it")
    return found[-1]


def read_run(run_dir: Path) -> RunRecord:
    """The head of a run."""
    return load(run_dir / "run.json", RunRecord)


def write_run(run_dir: Path, record: RunRecord) -> None:
    """Write the head of a run, before anything is submitted."""
    store(run_dir / "run.json", record)


def job_dirs(run_dir: Path) -> list[Path]:
    """Every job of a run, in the plan's order."""
    return [run_dir / "jobs" / expected.job for expected in read_run(run_dir).expected]


def attempts(job_dir: Path) -> list[Path]:
    """The attempts of a job that have started, oldest first."""
    found = [path for path in (job_dir / "attempts").glob("*") if path.name.isdigit()]
    return sorted(found, key=lambda path: int(path.name))


def discard(run_dir: Path) -> None:
    """Remove a run directory from which nothing was submitted."""
    shutil.rmtree(run_dir)
