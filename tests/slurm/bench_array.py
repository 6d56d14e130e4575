"""What the harness costs on a cluster: an array of small jobs against a plain sbatch array of the same no-op.

    python -m tests.slurm.bench_array [--jobs 200] [--pairs 1]

Both run `JOBS` tasks with the same limits on the same four virtual nodes, one after the other, in pairs. The plain
array runs `python -m pytest` on the same test in each task; ours also verifies the snapshot, records, and ingests.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sqlite3
import sys
import tempfile
import time
from pathlib import Path

from harness import slurm
from harness.journal import Order
from harness.watch import follow
from tests.slurm.cluster import SlurmCluster
from tests.slurm.conftest import lab_profile
from tests.slurm.project import Project

NOOP = "def test_ok():\n    assert True\n"


def ours(project: Project, ledger: Path, jobs: int, width: int) -> tuple[float, float]:
    """Seconds from submission until all is in the ledger, and from the last job's end until then."""
    names = [f"job{i:03}" for i in range(jobs)]
    run_dir = project.run(dict.fromkeys(names, "test_ok"))
    profile = lab_profile(memory_gb_per_node=1, array_parallelism=width)
    slurm.save_cluster(run_dir, profile)
    ended: list[float] = []

    def show(progress):
        ended[:] = [view.attempts[-1].ended_at or 0 for view in progress.views if view.attempts]

    began = time.time()
    slurm.submit(run_dir, profile, [Order(name, 0) for name in names])
    follow(run_dir, show, ledger)
    done = time.time()
    with contextlib.closing(sqlite3.connect(ledger)) as db:
        (count,) = db.execute("SELECT count(DISTINCT job) FROM stream WHERE run = ?", (run_dir.name,)).fetchone()
    assert count == jobs, f"{count} of {jobs} jobs are in the ledger"
    return done - began, done - max(ended)


def plain(lab: SlurmCluster, folder: Path, jobs: int, width: int) -> float:
    """Seconds for the same number of tasks that only run pytest on the same test."""
    (folder / "noop.py").write_text(NOOP)
    command = f"srun {sys.executable} -m pytest -q -p no:cacheprovider {folder / 'noop.py'}"
    options = [f"--array=0-{jobs - 1}%{width}", "--mem=1G", "--time=3", "-o", str(folder / "%a.out")]
    began = time.time()
    job = lab.run("sbatch", "--parsable", *options, "--wrap", command).strip()
    while lab.run("squeue", "-h", "-j", job, check=False).strip():
        time.sleep(0.5)
    done = time.time()
    passed = sum("1 passed" in path.read_text() for path in folder.glob("*.out"))
    assert passed == jobs, f"{passed} of {jobs} plain tasks passed"
    return done - began


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=200)
    parser.add_argument("--pairs", type=int, default=1)
    parser.add_argument("--width", type=int, default=4, help="tasks at a time, in both")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="k3a", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        project = Project.make(folder)
        with SlurmCluster(folder / "lab") as lab:
            os.environ["SLURM_CONF"] = str(lab.conf)
            for pair in range(options.pairs):
                here = folder / f"plain{pair}"
                here.mkdir()
                baseline = plain(lab, here, options.jobs, options.width)
                wall, late = ours(project, folder / "ledger.db", options.jobs, options.width)
                print(f"{options.jobs} tasks, {options.width} at a time: plain {baseline:.1f} s, ours {wall:.1f} s;")
                print(f"ratio {wall / baseline:.2f}; ledger {late:.1f} s after the last job's end", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
