"""How commands are told which run and which jobs they are about."""

from __future__ import annotations

import argparse
from pathlib import Path

from harness import cluster as clusters
from harness.spec import HarnessError
from harness.spool import find_run, job_dirs


def add_run(parser: argparse.ArgumentParser, positional: bool = True) -> None:
    """A run: its folder, its id, or the beginning or end of one; the newest when left out."""
    text = "a run's folder or id, or the beginning or end of one; the newest if left out"
    parser.add_argument(*(["run"] if positional else ["--run"]), **({"nargs": "?"} if positional else {}), default="",
                        help=text)  # fmt: skip
    parser.add_argument("--cluster", default="local", help="the profile whose spool holds the run")
    parser.add_argument("--ledger", type=Path, help="another ledger file")


def run_of(options: argparse.Namespace) -> Path:
    """The run directory that the arguments mean."""
    return find_run(options.run, clusters.find(options.cluster).spool)


def jobs_of(run_dir: Path, names: list[str]) -> list[str]:
    """The jobs of those names or beginnings; all for none. Raises HarnessError naming what there is."""
    known = [folder.name for folder in job_dirs(run_dir)]
    found = [job for job in known if not names or any(job == name or job.startswith(name) for name in names)]
    lost = [name for name in names if not any(job.startswith(name) for job in known)]
    if lost:
        raise HarnessError(f"no job {lost[0]!r} in run {run_dir.name}; it has {', '.join(known[:8])}")
    return found
