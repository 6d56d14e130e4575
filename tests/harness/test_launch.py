"""The launcher with real ranks: every fault ends the job within seconds, names the rank, and leaves nothing running."""

import os
import signal
import time

import msgspec
import pytest

from harness import process
from harness.spec import LaunchRecord, load
from ledger.record import worst

FOUR = '''
"""Four ranks that meet through files, as a collective would."""
import os, signal, sys, time
from pathlib import Path

import pytest

RANK = int(os.environ.get("RANK", 0))
MEET = Path("@MEET@")


def barrier(name):
    (MEET / f"{name}.{RANK}").touch()
    while len(list(MEET.glob(f"{name}.*"))) < 4:
        time.sleep(0.01)


def test_first():
    barrier("first")


def test_second():
    @FAULT@
    barrier("second")
'''
JOB = "toy4.four.0"
FAULTS = {
    "segv": ("os.kill(os.getpid(), signal.SIGSEGV)", "signal", "rank 2 was killed by SIGSEGV"),
    "exit 7": ("os._exit(7)", "exit", "rank 2 exited with code 7 in suites/four.py::test_second"),
}


def write_four(toy, fault, meet):
    """Claim the four ranks' suite with this fault in it; the ranks meet in the folder `meet`."""
    body = FOUR.replace("@FAULT@", f"if RANK == 2: {fault}" if fault else "pass").replace("@MEET@", str(meet))
    toy.write("suites/four.py", body)
    toy.claim("toy.four", "suites/four.py::test_first", "suites/four.py::test_second", topology="toy4")


def finish(toy, fault, tmp_path, limit=60, **orders):
    """Run the four ranks to their end; return the launcher's record, its exit code and the attempt's folder."""
    (meet := tmp_path / "meet").mkdir()
    write_four(toy, fault, meet)
    run_dir = toy.planned("toy.four")
    launcher = toy.launch(run_dir, JOB, **orders)
    launcher.communicate(timeout=limit)
    attempt = run_dir / "jobs" / JOB / "attempts" / "0"
    return load(attempt / "launch.json", LaunchRecord), launcher.returncode, attempt


def outcomes(attempt):
    """Outcome of each test over ranks, from the records alone; a test without an end is lost."""
    found = {"suites/four.py::test_first": {}, "suites/four.py::test_second": {}}
    for rank in range(4):
        for line in (attempt / f"rank{rank}.jsonl").read_bytes().splitlines():
            event = msgspec.json.decode(line)
            if event["kind"] == "test_end":
                found[event["test"]][rank] = event["outcome"]
    return {test: worst(ranks.get(rank, "lost") for rank in range(4)) for test, ranks in found.items()}


def test_four_ranks_pass(toy, tmp_path):
    """Four ranks that meet all pass, and the launcher says so."""
    record, code, attempt = finish(toy, "", tmp_path)
    assert (code, record.fault, record.exit_codes) == (0, None, {"0": 0, "1": 0, "2": 0, "3": 0})
    assert set(outcomes(attempt).values()) == {"passed"}


@pytest.mark.parametrize("name", FAULTS)
def test_fault(toy, tmp_path, name):
    """One faulty rank ends the job within seconds; it is named with what it did, and no test of the rank passes."""
    fault, kind, text = FAULTS[name]
    record, code, attempt = finish(toy, fault, tmp_path, grace_s=1)
    assert code == 3
    assert (record.fault.kind, record.fault.rank) == (kind, 2)
    assert text in record.fault.text
    assert outcomes(attempt) == {"suites/four.py::test_first": "passed", "suites/four.py::test_second": "lost"}
    assert all(process.state(pid) == "" for pid in ranks_of(attempt))


def test_stall(toy, tmp_path):
    """A hung job names the rank that holds it up, and leaves each rank's stack in its log before it is ended."""
    record, _, attempt = finish(toy, "time.sleep(1000)", tmp_path, stall_s=3, grace_s=1)
    assert (record.fault.kind, record.fault.rank) == ("stalled", 2)
    assert "in test_second" in (attempt / "rank2.log").read_text()
    assert "in barrier" in (attempt / "rank0.log").read_text()


GLOO = '''
"""Four real ranks in a collective, one of which does not come."""
import time

import pytest
import torch.distributed as dist


@pytest.mark.ranks(4)
def test_meet():
    if dist.get_rank() == 2:
        time.sleep(1000)
    dist.barrier()
'''


@pytest.mark.slow
def test_hang_in_a_collective(toy):
    """Ranks that wait in gloo are not blamed: the one that does not come is, while they still wait."""
    toy.write("suites/meet.py", GLOO)
    toy.claim("toy.meet", "suites/meet.py::test_meet", topology="toy4")
    run_dir = toy.planned("toy.meet")
    toy.launch(run_dir, "toy4.meet.0", environment={"OMP_NUM_THREADS": "1"}, stall_s=15).communicate(timeout=240)
    record = load(run_dir / "jobs" / "toy4.meet.0" / "attempts" / "0" / "launch.json", LaunchRecord)
    assert [fault.rank for fault in record.faults] == [2]
    assert "rank 2 holds the job up in suites/meet.py::test_meet, at meet.py:" in record.fault.text


def test_job_limit(toy, tmp_path):
    """A job over its own limit is ended, and the rank that held it up is named."""
    record, code, _ = finish(toy, "time.sleep(1000)", tmp_path, timeout_s=10, stall_s=60, grace_s=1)
    assert (code, record.fault.kind, record.fault.rank) == (3, "timeout", 2)
    assert "the job's limit of 10 s is over" in record.fault.text


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_nothing_survives_the_launcher(toy, tmp_path, number):
    """Ranks, and what they started themselves, end with the launcher, whatever ended it."""
    (meet := tmp_path / "meet").mkdir()
    write_four(toy, "import subprocess; subprocess.Popen(['sleep', '1000']); time.sleep(1000)", meet)
    run_dir = toy.planned("toy.four")
    launcher = toy.launch(run_dir, JOB, grace_s=1)
    attempt = run_dir / "jobs" / JOB / "attempts" / "0"
    wait_until(lambda: len(list(meet.glob("second.*"))) == 3)
    groups = ranks_of(attempt)
    wait_until(lambda: len(members(groups)) == 5)
    launcher.send_signal(number)
    launcher.communicate(timeout=10)
    wait_until(lambda: not members(groups))
    record = load(attempt / "launch.json", LaunchRecord)
    assert (record.fault.kind if record.fault else "") == ("terminated" if number == signal.SIGTERM else "")


def test_two_nodes(toy, tmp_path):
    """A fault on one node ends the ranks of the other within seconds, and that node says whose fault it was not."""
    write_four(toy, "os.kill(os.getpid(), signal.SIGKILL)", tmp_path)
    run_dir = toy.planned("toy.four")
    nodes = [{"K3_NODES": "2", "K3_NODE_RANK": str(rank), "MASTER_PORT": "1"} for rank in range(2)]
    launchers = [toy.launch(run_dir, JOB, environment=node, grace_s=1) for node in nodes]
    for launcher in launchers:
        launcher.communicate(timeout=60)
    attempt = run_dir / "jobs" / JOB / "attempts" / "0"
    first, second = (load(attempt / name, LaunchRecord) for name in ("launch.json", "launch1.json"))
    assert (second.fault.kind, second.fault.rank, set(second.exit_codes)) == ("signal", 2, {"2", "3"})
    assert (first.fault.kind, first.fault.rank, set(first.exit_codes)) == ("peer_node", -1, {"0", "1"})
    assert "node 1 reported a fault" in first.fault.text


def test_refuses_a_changed_snapshot(toy):
    """A file changed in the snapshot after planning: every rank refuses, naming it, and no test runs."""
    write_four(toy, "", "/nowhere")
    run_dir = toy.planned("toy.four")
    changed = run_dir / "snapshot" / "k3" / "math.py"
    changed.chmod(0o644)
    changed.write_text("def double(x): return x\n")
    launcher = toy.launch(run_dir, JOB)
    launcher.communicate(timeout=20)
    record = load(run_dir / "jobs" / JOB / "attempts" / "0" / "launch.json", LaunchRecord)
    assert (launcher.returncode, record.fault.kind) == (3, "refused")
    assert "k3/math.py changed" in record.fault.text


def test_refuses_a_second_launch(toy):
    """An attempt is never written twice."""
    run_dir = toy.planned("toy.double")
    toy.launch(run_dir, "cpu1.toy.0").communicate(timeout=20)
    again = toy.launch(run_dir, "cpu1.toy.0")
    assert "already ran; use the next number" in again.communicate(timeout=20)[1]


def ranks_of(attempt):
    """Process ids of the ranks, from their start lines."""
    return [msgspec.json.decode(path.read_bytes().splitlines()[0])["pid"] for path in attempt.glob("rank*.jsonl")]


def members(groups):
    """Live processes in these process groups."""
    found = []
    for entry in os.listdir("/proc"):
        fields = process._stat(int(entry)) if entry.isdigit() else []
        if fields and int(fields[2]) in groups and fields[0] not in "ZX":
            found.append(int(entry))
    return found


def wait_until(condition, seconds=20):
    """Poll until `condition` holds."""
    deadline = time.time() + seconds
    while not condition():
        assert time.time() < deadline, "it never came to that"
        time.sleep(0.05)
