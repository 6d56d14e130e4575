"""The local executor: room is kept, machine faults are told from failures, and any shell can take a run over."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from harness import cluster as clusters
from harness import journal, local, process
from harness.journal import Intent, Order
from harness.spec import JobRecord, LaunchRecord, Topology, load
from tests.harness.test_launch import wait_until

SLOW = '"""Slow."""\nimport time\n\n\ndef test_slow():\n    time.sleep(600)\n'
JOB = "cpu1.slow.0"


@pytest.fixture
def slow(toy):
    """A run whose only job is on its only test, for as long as it is let."""
    toy.write("suites/slow.py", SLOW)
    toy.claim("toy.slow", "suites/slow.py::test_slow")
    run_dir = toy.planned("toy.slow")
    local.submit(run_dir, clusters.find("local"), [])
    wait_until(lambda: list(run_dir.glob(f"jobs/{JOB}/attempts/0/rank0.jsonl")))
    yield run_dir
    local.cancel(run_dir, [JOB], "the test is over")


def ended(run_dir):
    """Look until the run has ended; return the job's last attempt."""
    wait_until(lambda: local.look(run_dir).complete)
    return load(run_dir / "jobs" / JOB / "job.json", JobRecord).attempts[-1]


def launcher(run_dir):
    """The launcher's record of the first attempt."""
    return load(run_dir / "jobs" / JOB / "attempts" / "0" / "launch.json", LaunchRecord)


def test_killed_launcher(slow):
    """A launcher that is killed is a machine fault, not a failure, and its rank is gone."""
    os.kill(launcher(slow).pid, signal.SIGKILL)
    attempt = ended(slow)
    assert (attempt.state, attempt.machine_fault) == ("failed", True)
    assert attempt.reason == "the launcher was killed, and its ranks with it"


def test_told_to_stop(slow):
    """A job that something outside tells to stop is cancelled: a machine fault with the signal named."""
    os.kill(launcher(slow).pid, signal.SIGTERM)
    attempt = ended(slow)
    assert (attempt.state, attempt.machine_fault) == ("cancelled", True)
    assert attempt.reason == "the job was told to stop by SIGTERM"
    assert attempt.rank_exit_codes == {"0": -signal.SIGTERM}


def test_killed_rank(slow):
    """A killed rank is a failure of the job, by signal and rank."""
    stream = slow / "jobs" / JOB / "attempts" / "0" / "rank0.jsonl"
    wait_until(lambda: b"test_start" in stream.read_bytes())
    below = subprocess.run(["pgrep", "-P", str(launcher(slow).pid)], capture_output=True, text=True, check=True)
    for pid in map(int, below.stdout.split()):
        if os.getpgid(pid) == pid and b"harness.job" in Path(f"/proc/{pid}/cmdline").read_bytes():
            os.kill(pid, signal.SIGKILL)
    attempt = ended(slow)
    assert (attempt.state, attempt.machine_fault) == ("failed", False)
    assert attempt.reason == "rank 0 was killed by SIGKILL in suites/slow.py::test_slow"


def test_submitter_dies(toy):
    """The shell that submitted may die: another finds the job running and brings it home."""
    run_dir = toy.planned("toy.double")
    script = f"import sys; from pathlib import Path; from harness import local; local.look(Path({str(run_dir)!r}))"
    subprocess.run([sys.executable, "-c", script], env=toy.env, check=True)
    wait_until(lambda: local.look(run_dir).complete)
    assert load(run_dir / "jobs" / "cpu1.toy.0" / "job.json", JobRecord).attempts[-1].state == "completed"
    assert len(journal.groups(journal.read(run_dir))) == 1


def test_launch_that_never_happened(toy):
    """An order whose launcher never came up is a machine fault that says so, not a job that runs for ever."""
    run_dir = toy.planned("toy.double")
    orders = (Order("cpu1.toy.0", 0),)
    journal.append(run_dir, Intent(group="g0", name="cpu1.toy.0", orders=orders, time=time.time() - 60))
    assert local.look(run_dir).complete
    attempt = load(run_dir / "jobs" / "cpu1.toy.0" / "job.json", JobRecord).attempts[-1]
    assert (attempt.state, attempt.machine_fault) == ("launch_failed", True)


def test_room(monkeypatch):
    """At most as many ranks at once as processors; a larger job runs alone; GPU jobs run one at a time."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(4))
    one, four = Topology(name="one"), Topology(name="four", ranks=4, backend="gloo")
    gpu = Topology(name="gpu", device="cuda", gpus_per_node=1)
    assert local._fits(one, [one, one, one]) and not local._fits(one, [one] * 4)
    assert not local._fits(four, [one])
    assert local._fits(gpu, [one]) and not local._fits(gpu, [gpu])


def test_identity_of_processes():
    """A process is known by its pid and start: a reused pid is another process."""
    child = subprocess.Popen(["sleep", "60"])
    started = process.started(child.pid)
    assert process.alive(child.pid, started) and not process.alive(child.pid, started + 1)
    child.kill()
    wait_until(lambda: not process.alive(child.pid, started))
    child.wait()
