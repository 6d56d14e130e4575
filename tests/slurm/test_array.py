"""Many small jobs in one array: one sbatch, every job once in the ledger, whatever happens to the collector."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import pytest

from harness import journal
from harness.gather import stored_record
from ledger.ingest import ingest
from tests.slurm.conftest import lab_profile
from tests.slurm.project import ROOT, submit

pytestmark = pytest.mark.slurm

JOBS = int(os.environ.get("K3_ARRAY_JOBS", "40"))
KILLS = 10


def collector(run_dir: Path, ledger: Path) -> subprocess.Popen:
    """`k3-harness collect` in a process of its own."""
    command = [sys.executable, "-m", "harness.cli", "collect", str(run_dir), "--ledger", str(ledger)]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL)


@pytest.mark.timeout(600)
def test_array_survives_its_collector(lab, project, tmp_path):
    """An array is one sbatch; ten killed collectors lose no job and ingest none twice; the last is in at once."""
    names = [f"job{i:03}" for i in range(JOBS)]
    run_dir = project.run(dict.fromkeys(names, "test_ok"))
    ids = submit(run_dir, lab_profile(array_parallelism=64, retries=2), names)
    assert len(ids) == 1
    ledger = tmp_path / "ledger.db"
    for _ in range(KILLS):
        process = collector(run_dir, ledger)
        time.sleep(1.2)
        process.send_signal(signal.SIGKILL)
        process.wait()
    process = collector(run_dir, ledger)
    assert process.wait(timeout=400) == 0
    ended = max(stored_record(run_dir / "jobs" / name).attempts[-1].ended_at for name in names)
    late = ledger.stat().st_mtime - ended
    check(run_dir, ledger, names)
    print(f"{JOBS} jobs; the last was in the ledger {late:.1f} s after its end")
    assert ingest(run_dir, ledger).records == 0  # everything was known


def check(run_dir: Path, ledger: Path, names: list[str]) -> None:
    """Each job ended well once, is settled, and is in the ledger once; only machine faults were tried again."""
    again = 0
    for name in names:
        *lost, last = stored_record(run_dir / "jobs" / name).attempts
        assert last.state == "completed" and not last.machine_fault, last
        assert all(attempt.machine_fault and attempt.state != "completed" for attempt in lost), lost
        again += len(lost)
    intents = [line for line in journal.read(run_dir) if isinstance(line, journal.Intent)]
    assert len(intents) <= 1 + again
    with sqlite3.connect(ledger) as db:
        tables = {row[0] for row in db.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
        assert tables
        (count,) = db.execute("SELECT count(DISTINCT job) FROM stream").fetchone()
    assert count == len(names)
