"""Reading what a scheduler said: every text below was said by a real one (Slurm 22.05)."""

from __future__ import annotations

import pytest

from harness.classify import classify, merge
from harness.scheduler import SQUEUE_FIELDS, Poll, ask, expand_ids, expand_nodes, read_sacct, read_squeue
from harness.spec import Fault, LaunchRecord
from ledger.record import Answer

HEAD = (
    "JobID|JobIDRaw|JobName|State|ExitCode|DerivedExitCode|Reason|NodeList|NNodes|NTasks|AllocTRES|"
    "Submit|Start|End|Partition|Account|QOS\n"
)
OOM = (
    HEAD
    + """\
3|3|oom|FAILED|1:0|0:125|None|n3|1||billing=1,cpu=1,mem=200M,node=1|1796060264|1796060264|1796060265|main|acc|normal
3.batch|3.batch|batch|FAILED|1:0|||n3|1|1|cpu=1,mem=200M,node=1|1796060264|1796060264|1796060265||acc|
3.0|3.0|python3|OUT_OF_MEMORY|0:125|||n3|1|1|cpu=1,mem=200M,node=1|1796060264|1796060264|1796060265||acc|
"""
)
ARRAY = (
    HEAD
    + """\
4_0|9|arr|COMPLETED|0:0|0:0|None|n4|1||billing=1,cpu=1,node=1|1796060264|1796060264|1796060266|main|acc|normal
4_0.batch|9.batch|batch|COMPLETED|0:0|||n4|1|1|cpu=1,node=1|1796060264|1796060264|1796060266||acc|
4_2|11|arr|RUNNING|0:0|0:0|JobArrayTaskLimit|n3|1||cpu=1,node=1|1796060264|1796060267|Unknown|main|acc|normal
4_[3-4%2]|4|arr|PENDING|0:0|0:0|JobArrayTaskLimit|None assigned|1|||1796060264|Unknown|Unknown|main|acc|normal
"""
)
REQUEUED = (
    HEAD
    + """\
5|5|j|NODE_FAIL|0:0|0:0|None|n4|1||cpu=1,node=1|1796061147|1796061147|1796061186|main|acc|normal
5.batch|5.batch|batch|CANCELLED|||||1|1|cpu=1,node=1|1796061147|1796061147|1796061186||acc|
5|5|j|COMPLETED|0:0|0:0|BeginTime|n4|1||cpu=1,node=1|1796061186|1796061195|1796061201|main|acc|normal
5.0|5.0|python|COMPLETED|0:0|||n4|1|1|cpu=1,node=1|1796061195|1796061195|1796061201||acc|
"""
)


def squeue(*rows: str):
    """A squeue answer with these rows."""
    return read_squeue("|".join(SQUEUE_FIELDS) + "\n" + "\n".join(rows))


def report(**fields) -> LaunchRecord:
    """A launcher's report that ended well unless told otherwise."""
    known = {"run": "r", "nonce": "n", "job": "j", "attempt": 0, "node": "n1", "pid": 1, "started_at": 1.0}
    return LaunchRecord(**{**known, "ended_at": 2.0, "exit_code": 0, **fields})


def one(text: str, job: str = "7", index: int = 0):
    """One row of a sacct answer."""
    return read_sacct(text)[job][index]


def row(state: str, codes: str = "0:0", derived: str = "0:0"):
    """A row in this state."""
    line = f"7|7|j|{state}|{codes}|{derived}|None|n1|1||cpu=1,node=1|1796060264|1796060264|1796060265|main|acc|normal\n"
    return one(HEAD + line)


def test_steps_belong_to_their_attempt():
    """Of two attempts of one job each keeps its own steps, and the tasks are those of its numbered step."""
    first, second = read_sacct(REQUEUED)["5"]
    assert ([step.name for step in first.steps], [step.name for step in second.steps]) == (["batch"], ["0"])
    assert (first.state, second.state, second.tasks) == ("NODE_FAIL", "COMPLETED", 1)
    assert first.ended_at == second.submitted_at == 1796061186


def test_array_rows():
    """Waiting tasks that share one line are told apart, and what is not known yet is None."""
    rows = read_sacct(ARRAY)
    assert set(rows) == {"4_0", "4_2", "4_3", "4_4"}
    assert (rows["4_4"][0].state, rows["4_4"][0].started_at, rows["4_0"][0].raw_id) == ("PENDING", None, "9")


@pytest.mark.parametrize(
    "text, ids",
    [
        ("12", ["12"]),
        ("4_7", ["4_7"]),
        ("4_[1,3-5%2]", ["4_1", "4_3", "4_4", "4_5"]),
        ("4_[4-10:2,20]", ["4_4", "4_6", "4_8", "4_10", "4_20"]),
        ("4_[1-2,...%1]", ["4_1", "4_2"]),
    ],
)
def test_expand_ids(text, ids):
    """Ranges, steps, limits and a list that was cut short."""
    assert expand_ids(text) == ids


def test_expand_nodes():
    """Ranges keep their leading zeros, and a name may have several."""
    assert expand_nodes("n[1-2,07-08],gpu3") == ("n1", "n2", "n07", "n08", "gpu3")
    assert expand_nodes("r[1-2]c[1-2]x") == ("r1c1x", "r1c2x", "r2c1x", "r2c2x")
    assert expand_nodes("") == ()


def test_memory_of_a_step():
    """A job that the scheduler calls FAILED is out of memory when one of its steps was."""
    word = classify(one(OOM, "3"), (report(exit_code=1),))
    assert (word.state, word.machine_fault) == ("out_of_memory", True)
    assert "step 0" in word.reason and "FAILED" in word.reason


def test_memory_without_cgroups():
    """Where Slurm's sampling kills for memory only the log tells: the row says 9:0."""
    log = "slurmstepd: error: Step 7.0 exceeded memory limit (401 > 200), being killed\n"
    assert classify(row("FAILED", "9:0", "0:9"), (report(ended_at=None),), log).state == "out_of_memory"


@pytest.mark.parametrize(
    "state, codes, reports, word, fault",
    [
        ("COMPLETED", "0:0", (report(),), "completed", False),
        ("COMPLETED", "0:0", (), "completed", True),  # e.g. the working folder was gone and it ran elsewhere
        ("COMPLETED", "0:0", (report(ended_at=None),), "completed", True),
        ("FAILED", "1:0", (report(exit_code=1),), "failed", False),
        ("FAILED", "0:53", (), "launch_failed", True),
        ("FAILED", "2:0", (), "launch_failed", True),
        ("FAILED", "9:0", (report(ended_at=None),), "failed", True),
        ("FAILED", "12:0", (), "timeout", True),
        ("TIMEOUT", "0:0", (), "timeout", True),
        ("CANCELLED by 1000", "0:0", (), "cancelled", True),
        ("BOOT_FAIL", "0:0", (), "node_fail", True),
        ("SUSPENDED", "0:0", (), "suspended", False),
        ("CONFIGURING", "0:0", (), "running", False),
        ("NEWFANGLED", "0:0", (), "unknown", False),
    ],
)
def test_words(state, codes, reports, word, fault):
    """Each state of the scheduler, joined with what our launcher said, has one meaning."""
    found = classify(row(state, codes), reports)
    assert (found.state, found.machine_fault) == (word, fault)


def test_full_spool_blames_the_machine():
    """A rank that could not write its record is a fault of the spool, not of the test."""
    fault = Fault(
        kind="exit", rank=0, text="rank 0 exited with code 1: OSError: [Errno 28] No space left on device", time=1
    )
    word = classify(row("FAILED", "3:0"), (report(exit_code=3, fault=fault, faults=(fault,)),))
    assert (word.state, word.machine_fault) == ("failed", True)
    assert word.reason.startswith("the spool is full")


def test_own_time_limit():
    """A job that our launcher ended at its time limit is a time-out, as it is under the local executor."""
    fault = Fault(kind="timeout", rank=-1, text="exceeded 600 s", time=1)
    word = classify(row("FAILED", "3:0"), (report(exit_code=3, fault=fault, faults=(fault,)),))
    assert (word.state, word.machine_fault) == ("timeout", True)


def test_completing_is_running():
    """A cancelled job is not over while the controller says COMPLETING: its processes may still hold the GPU."""
    live = squeue("7|7|j|COMPLETING|None|0|0|n1|1|1|cpu=1|1796060264|1796060264|1796060265|main|")["7"]
    assert classify(merge([row("CANCELLED by 0")], live)[-1]).state == "running"


def test_begun_again():
    """A job that waits again after a node failed has an attempt more than the accounting has rows."""
    first = one(REQUEUED, "5", 0)
    live = squeue("5|5|j|PENDING|BeginTime|0|1||1|1|cpu=1|1796061186|N/A|N/A|main|")["5"]
    merged = merge([first], live)
    assert [classify(found).state for found in merged] == ["node_fail", "pending"]


def test_accounting_lags():
    """While the accounting still says RUNNING its row stands, whatever the controller says."""
    live = squeue("7|7|j|COMPLETED|None|0|0|n1|1|1|cpu=1|1796060264|1796060264|1796060265|main|")["7"]
    assert [classify(found).state for found in merge([row("RUNNING")], live)] == ["running"]


def test_squeue_codes():
    """squeue tells a wait status: 256 is exit code 1, 9 is a signal."""
    rows = squeue(
        "1|1|a|FAILED|NonZeroExitCode|256|0|n1|1|1|cpu=1|1796060264|1796060264|1796060265|main|",
        "2|2|b|FAILED|None|9|0|n1|1|1|cpu=1|1796060264|1796060264|1796060265|main|",
    )
    assert [(found.exit_code, found.signal) for found in rows.values()] == [(1, 0), (0, 9)]


def test_no_answer_is_kept():
    """A command that is missing or too slow is an answer with its own code; nothing is raised."""
    assert ask(["/no/such/sacct"]).exit_code == 127
    slow = ask(["sleep", "5"], timeout_s=0.1)
    assert (slow.exit_code, slow.error) == (124, "no answer within 0.1 s")


def test_silence_is_not_off():
    """Accounting that is down is waited for; accounting that does not exist is not."""
    down = Answer(command=("sacct",), asked_at=0, exit_code=1, output="", error="sacct: error: Connection refused")
    off = Answer(command=("sacct",), asked_at=0, exit_code=1, output="", error="Slurm accounting storage is disabled")
    assert (Poll(accounting=down).accounting_is_off, Poll(accounting=off).accounting_is_off) == (False, True)


def test_stored_lines_are_verbatim():
    """Of one answer about many jobs a job's record keeps the heading and its own lines, to the letter."""
    answer = Answer(command=("sacct",), asked_at=0, exit_code=0, output=ARRAY)
    kept = Poll(accounting=answer).lines(answer, ["4_0"]).output.splitlines()
    assert kept == [HEAD.strip(), *ARRAY.splitlines()[1:3]]
    assert len(Poll().lines(answer, ["4_4"]).output.splitlines()) == 2
