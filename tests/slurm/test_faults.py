"""Each fault a cluster can have, brought about for real: its word is the true one, and no verdict on a test."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.slurm.storm import Storm, rage

# fault -> states of all attempts, a part of the last fault's reason
EXPECTED = {
    "time limit, unwarned": (["timeout"], "reached the scheduler's time limit"),
    "time limit, warned": (["timeout"], "warned of the time limit"),
    "node fails": (["node_fail"], "a node failed on n4"),
    "node fails, tried again": (["node_fail", "completed"], "a node failed on n4"),
    "node fails, requeued": (["node_fail", "completed"], "a node failed on n4"),
    "preempted and requeued": (["preempted", "completed"], "preempted on n3"),
    "preempted and cancelled": (["preempted"], "preempted on n3"),
    "out of memory in the step": (["out_of_memory"], "killed for memory"),
    "out of memory in the job": (["out_of_memory"], "killed for memory"),
    "cancelled while pending": (["cancelled"], "cancelled while pending"),
    "cancelled while running": (["cancelled"], "cancelled while running"),
    "held and released": (["completed"], ""),
    "over the partition's limit": (["rejected"], "PartitionTimeLimit"),
    "suspended and resumed": (["completed"], ""),
    "requeued after finishing": (["requeued", "completed"], "put back into the queue"),
    "log folder gone": (["launch_failed"], "the node could not start the job"),
    "python gone": (["launch_failed"], "/no/such/python"),
    "launcher killed": (["failed"], "the launcher ended before it could report"),
    "no such account": (["rejected"], "Invalid account"),
    "no such QOS": (["rejected"], "Invalid qos"),
    "no such partition": (["rejected"], "invalid partition"),
    "too many GPUs": (["rejected"], "Requested node configuration is not available"),
    "dependency never satisfied": (["rejected"], "DependencyNeverSatisfied"),
    "spool full": (["launch_failed"], "nothing of ours started"),
}
HARMLESS = {"held and released": "pending JobHeldUser", "suspended and resumed": "suspended suspended on n1"}


@pytest.fixture(scope="module")
def storm(lab, project, tmp_path_factory):
    """All faults at once; settled when the fixture returns."""
    storm = Storm(lab, project, Path(tmp_path_factory.mktemp("storm")))
    try:
        rage(storm)
        yield storm
    finally:
        subprocess.run(["umount", "-l", storm.folder / "small"], stderr=subprocess.DEVNULL)


@pytest.mark.slurm
@pytest.mark.timeout(360)  # the first test waits for the whole storm: a node is given up and a minute runs out
@pytest.mark.parametrize("fault", EXPECTED)
def test_fault(storm, fault):
    """The fault is called by its name, blamed on a machine, and kept with its attempts."""
    states, reason = EXPECTED[fault]
    attempts = storm.done[fault].views[0].attempts
    assert [attempt.state for attempt in attempts] == states
    lost = [attempt for attempt in attempts if attempt.state != "completed"]
    assert all(attempt.machine_fault for attempt in lost)
    assert all(not attempt.machine_fault for attempt in attempts if attempt.state == "completed")
    assert [attempt.number for attempt in attempts] == list(range(len(attempts)))
    assert reason in (lost[-1].reason if lost else "")


@pytest.mark.slurm
@pytest.mark.parametrize("fault", HARMLESS)
def test_passing_state(storm, fault):
    """Held and suspended are shown as such while they last, and cost the job nothing."""
    assert HARMLESS[fault] in storm.seen[fault]


@pytest.mark.slurm
def test_failing_tests_are_no_machine_fault(storm):
    """A job whose test fails is failed, blames no machine, and is not tried again although retries are allowed."""
    (attempt,) = storm.done["tests fail"].views[0].attempts
    assert (attempt.state, attempt.machine_fault, attempt.exit_code) == ("failed", False, 1)
    assert attempt.rank_exit_codes == {"0": 1}


@pytest.mark.slurm
def test_one_rank_ends_all(storm):
    """When one of four ranks on two nodes dies, the others end within seconds and each true exit code is kept."""
    (attempt,) = storm.done["one rank dies"].views[0].attempts
    assert (attempt.state, attempt.machine_fault) == ("failed", False)
    assert attempt.rank_exit_codes["1"] == 7
    assert set(attempt.rank_exit_codes) == {"0", "1", "2", "3"}
    assert attempt.ended_at - attempt.started_at < 45  # the other ranks would have slept for a minute
    assert "rank 1 exited with code 7" in attempt.reason


@pytest.mark.slurm
def test_nodes_and_times_are_kept(storm):
    """Every attempt that started says where and when, as the scheduler told it."""
    for fault in ("node fails, requeued", "preempted and requeued", "time limit, unwarned"):
        for attempt in storm.done[fault].views[0].attempts:
            assert attempt.nodes and attempt.submitted_at <= attempt.started_at <= attempt.ended_at
