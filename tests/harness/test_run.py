"""`k3-harness run` with real processes, from the tree to the matrix."""

import json
import os
import shutil
import signal
import subprocess
import sys

import pytest

from harness import process
from harness.spec import JobRecord, LaunchRecord, RunRecord, load
from tests.harness import toy as toys
from tests.harness.test_launch import FOUR, JOB, wait_until
from tests.harness.toy import SUITE

SLEEPY = '''
"""A test that takes its time."""
import time
from k3.math import double


def test_double():
    time.sleep({})
    assert double(2) == 4
'''
QUEUED = '''
"""Holds its job until the tree has been edited, then says what runs."""
import time
from pathlib import Path


def test_double():
    while not Path("@GO@").exists():
        time.sleep(0.01)
    from k3.math import double
    assert double(2) == 4
'''


def states(toy):
    """State and reason of each cell, as the ledger has it now."""
    script = "import msgspec; from ledger.claims import statuses; print(msgspec.json.encode(statuses('.')).decode())"
    asked = subprocess.run([sys.executable, "-c", script], cwd=toy.root, env=toy.env, check=True, capture_output=True)
    return {cell["id"]: (cell["state"], cell["reason"]) for cell in json.loads(asked.stdout)}


@pytest.fixture(scope="module")
def first_run(tmp_path_factory):
    """A toy whose claim one run has proven; not to be changed."""
    toy = toys.make(tmp_path_factory.mktemp("first"))
    done = toy.run("run", "quick")
    assert done.returncode == 0, done.stdout + done.stderr
    return toy


@pytest.fixture
def proven(first_run, tmp_path):
    """A copy of the proven toy and of its state."""
    shutil.copytree(first_run.root, tmp_path / "project")
    shutil.copytree(first_run.state, tmp_path / "state")
    return toys.Toy(tmp_path / "project", tmp_path / "state", list(first_run.claims))


def test_green_then_nothing_to_do(proven):
    """A run proves the claim; at the same tree the next submits nothing and says why; --all runs it anyway."""
    toy = proven
    assert states(toy)["toy.double"][0] == "proven"
    second = toy.run("run", "quick")
    assert second.returncode == 0
    assert "nothing to submit" in second.stdout and f"proven at this tree by run {toy.runs[0].name}" in second.stdout
    assert len(toy.runs) == 1
    assert toy.run("run", "quick", "--all").returncode == 0
    assert len(toy.runs) == 2


def test_edit_while_queued(toy, tmp_path):
    """An edit to a model file while the job waits does not change what runs; the new tree is not green for it."""
    toy.write("suites/toy.py", QUEUED.replace("@GO@", str(tmp_path / "go")))
    running = toy.start("run", "quick")
    wait_until(lambda: toy.runs and list(toy.runs[0].glob("jobs/*/spec.json")))
    toy.write("k3/math.py", "def double(x):\n    return 3 * x\n")
    (tmp_path / "go").touch()
    out, _ = running.communicate(timeout=60)
    record = load(toy.runs[0] / "jobs" / "cpu1.toy.0" / "job.json", JobRecord)
    assert record.attempts[-1].state == "completed"
    assert running.returncode == 1
    assert "toy.double on cpu1: expired: k3/math.py" in out


LIMIT_S = 20  # from the fault to the end of all ranks: the time-out of a hang is 4 s here, the grace 3 s
FAULTS = {
    "killed": ("os.kill(os.getpid(), signal.SIGKILL)", "rank 2 was killed by SIGKILL"),
    "exit 0": ("os._exit(0)", "rank 2 exited with code 0 half-way"),
    "stopped": ("os.kill(os.getpid(), signal.SIGSTOP)", "rank 2 is stopped by a signal"),
    "asleep": ("time.sleep(1000)", "rank 2 holds the job up"),
    "skips": ("pytest.skip('nothing here')", "nothing here"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_fault_is_not_green(toy, tmp_path, name):
    """One rank of four killed, gone, stopped, hung or skipping: no claim is green, and it says what, on which rank."""
    fault, text = FAULTS[name]
    body = FOUR.replace("@FAULT@", f"if RANK == 2: {fault}").replace("@MEET@", str(tmp_path))
    toy.write("suites/four.py", body.replace('barrier("second")', "pass") if name == "skips" else body)
    toy.claim("toy.four", "suites/four.py::test_first", "suites/four.py::test_second", topology="toy4")
    done = toy.run("run", "toy.four")
    state, reason = states(toy)["toy.four"]
    assert done.returncode == 1
    assert state != "proven"
    job_dir = toy.runs[0] / "jobs" / JOB
    assert text in reason
    assert f"toy.four on toy4: {state}: {reason}" in done.stdout
    launch = load(job_dir / "attempts" / "0" / "launch.json", LaunchRecord)
    assert launch.ended_at - _second_test_started(job_dir) < LIMIT_S


def _second_test_started(job_dir):
    """When the faulty test began on the faulty rank."""
    lines = map(json.loads, (job_dir / "attempts" / "0" / "rank2.jsonl").read_text().splitlines())
    return next(line["time"] for line in lines if line["kind"] == "test_start" and "second" in line["test"])


def test_interrupted(toy):
    """Ctrl-C leaves nothing running and every attempt with a word; what ended counts, and the next run goes on."""
    toy.write("suites/slow.py", SLEEPY.format(600))
    toy.claim("toy.slow", "suites/slow.py::test_double")
    running = toy.start("run", "quick")
    wait_until(lambda: toy.runs and list(toy.runs[0].glob("jobs/cpu1.slow.0/attempts/0/rank0.jsonl")))
    wait_until(lambda: list(toy.runs[0].glob("jobs/cpu1.toy.0/job.json")))
    children = _descendants(running.pid)
    running.send_signal(signal.SIGINT)
    running.communicate(timeout=30)
    assert running.returncode == 130
    wait_until(lambda: not [pid for pid in children if process.state(pid) not in ("", "Z")])
    attempt = load(toy.runs[0] / "jobs" / "cpu1.slow.0" / "job.json", JobRecord).attempts[-1]
    assert (attempt.state, attempt.machine_fault) == ("cancelled", True)
    assert states(toy)["toy.double"][0] == "proven" and states(toy)["toy.slow"][0] == "unproven"
    toy.write("suites/slow.py", SLEEPY.format(0))
    assert toy.run("run", "quick").returncode == 0
    assert [job.job for job in load(toy.runs[1] / "run.json", RunRecord).expected] == ["cpu1.slow.0"]


def _descendants(pid):
    """Every live process below `pid`."""
    parents = {int(entry): int(process._stat(int(entry))[1]) for entry in os.listdir("/proc")
               if entry.isdigit() and process._stat(int(entry))}  # fmt: skip
    found, todo = [], [pid]
    while todo:
        parent = todo.pop()
        below = [child for child, above in parents.items() if above == parent]
        found += below
        todo += below
    return found


@pytest.mark.parametrize(
    ("name", "suite"),
    [
        ("renamed", SUITE.replace("def test_double", "def test_twice")),
        ("deleted", None),
        ("skipped", SUITE.replace("def test", "import pytest\n\n\n@pytest.mark.skip\ndef test")),
        ("duplicated", f"{SUITE}\n\ndef test_double():\n    pass\n"),
        ("emptied", "def test_double():\n    import pytest\n    pytest.skip('later')\n"),
    ],
)
def test_changed_tests_are_not_green(proven, name, suite):
    """A green claim is so no longer once its test is renamed, deleted, skipped or doubled: run again or not."""
    toy = proven
    if suite is None:
        (toy.root / "suites" / "toy.py").unlink()
    else:
        toy.write("suites/toy.py", suite)
    assert states(toy)["toy.double"][0] != "proven"
    again = toy.run("run", "quick")
    assert again.returncode == 1
    assert states(toy)["toy.double"][0] != "proven"
    assert "toy.double on cpu1: " in again.stdout


def test_deselected_claim_is_not_green(toy):
    """A claim that loses one of its tests in claims.toml needs new evidence; so does one with another sentence."""
    toy.write("suites/two.py", "def test_one(): pass\ndef test_two(): pass\n")
    toy.claim("toy.two", "suites/two.py::test_one", "suites/two.py::test_two")
    assert toy.run("run", "toy.two").returncode == 0
    text = (toy.root / "suites" / "claims.toml").read_text()
    toy.write("suites/claims.toml", text.replace(', "suites/two.py::test_two"', ""))
    assert states(toy)["toy.two"][0] == "expired"
    toy.write("suites/claims.toml", text.replace("The toy does toy.two", "The toy does everything"))
    assert states(toy)["toy.two"][0] == "expired"


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("run",), "run what? name suites, claims or test files"),
        (("run", "nonesuch"), "no suite, claim or test file is called 'nonesuch'"),
        (("run", "quick", "--cluster", "moon"), "no cluster profile 'moon'"),
        (("run", "quick", "--budget", "much"), "is not a number with a unit"),
    ],
)
def test_bad_arguments(toy, arguments, text):
    """A mistake on the command line is one line and exit code 2, and leaves no run behind."""
    done = toy.run(*arguments)
    assert done.returncode == 2
    assert text in done.stderr and "Traceback" not in done.stderr
    assert toy.runs == []


def test_broken_claim_file(toy):
    """A broken claim file is told with every fault of it, and nothing is left behind."""
    toy.write("suites/claims.toml", 'schema = "9.0"\n')
    done = toy.run("run", "quick")
    assert done.returncode == 2
    assert "schema 9.0 found, 1.x required" in done.stderr
    assert toy.runs == []


def test_unwritable_state(toy):
    """Where the state folder cannot be written, the error names it and nothing was started."""
    toy.state.write_text("a file in its place")
    done = toy.run("run", "quick", timeout=30)
    assert done.returncode == 2
    assert str(toy.state) in done.stderr


FULL = '''
"""Fills the disk under its own records."""
from pathlib import Path


def test_double():
    with open(Path("@DISK@") / "junk", "wb", buffering=0) as junk:
        while True:
            try:
                junk.write(b"0" * 4096)
            except OSError:
                break
'''


def test_disk_fills_up(toy, small_disk):
    """A disk that fills under a run: the rank ends, the command says why it waits, and goes on once there is room."""
    toy.state = small_disk
    toy.write("suites/toy.py", FULL.replace("@DISK@", str(small_disk)))
    running = toy.start("run", "quick")
    wait_until(lambda: (small_disk / "junk").exists() and not os.statvfs(small_disk).f_bavail)
    assert "No space left on device" in running.stderr.readline()
    (small_disk / "junk").unlink()
    running.communicate(timeout=30)
    assert running.returncode == 1
    attempt = load(toy.runs[0] / "jobs" / "cpu1.toy.0" / "job.json", JobRecord).attempts[-1]
    assert attempt.machine_fault
    assert states(toy)["toy.double"][0] == "unproven"


def test_no_room_for_a_snapshot(toy, small_disk):
    """Without room for the snapshot nothing is planned and nothing is left behind."""
    toy.state = small_disk
    (small_disk / "junk").write_bytes(b"0" * (4 * 2**20 - 65536))
    done = toy.run("run", "quick")
    assert (done.returncode, toy.runs) == (2, [])
    assert "No space left on device" in done.stderr


def test_read_only_state(toy, small_disk):
    """A read-only state folder is refused before anything starts."""
    toy.state = small_disk
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    done = toy.run("run", "quick")
    assert done.returncode == 2
    assert "Read-only file system" in done.stderr
