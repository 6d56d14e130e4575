"""From what the scheduler says and what our launcher reported to one word per attempt; never a test verdict.

The scheduler's word alone misleads: an out-of-memory step makes a FAILED job, a warning signal before anyone listens
makes FAILED instead of TIMEOUT, a job whose log folder vanished never ran at all. Each is told apart here.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from harness.scheduler import Row, expand_nodes
from harness.spec import LaunchRecord
from ledger.record import Attempt

PENDING = {"PENDING", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT", "RESV_DEL_HOLD"}
RUNNING = {"RUNNING", "COMPLETING", "CONFIGURING", "STAGE_OUT", "SIGNALING", "STOPPED", "RESIZING"}
PLAIN = {
    "NODE_FAIL": "node_fail", "BOOT_FAIL": "node_fail", "PREEMPTED": "preempted", "TIMEOUT": "timeout",
    "DEADLINE": "timeout", "OUT_OF_MEMORY": "out_of_memory", "CANCELLED": "cancelled", "REVOKED": "cancelled",
    "REQUEUED": "requeued", "SUSPENDED": "suspended",
}  # fmt: skip
FINAL = {"completed", "failed", "node_fail", "preempted", "timeout", "out_of_memory", "cancelled", "requeued",
         "launch_failed", "rejected"}  # fmt: skip
# The same orders would meet the same end, or somebody wanted this end: a new attempt is no remedy.
NOT_RETRIED = {"rejected", "cancelled", "unknown"}
# A pending job with one of these reasons will never start by itself.
NEVER = {
    "DependencyNeverSatisfied", "PartitionTimeLimit", "PartitionNodeLimit", "InvalidAccount", "InvalidQOS",
    "BadConstraints", "AccountNotAllowed", "QOSNotAllowed", "QOSMaxWallDurationPerJobLimit",
    "AssocMaxWallDurationPerJobLimit", "QOSMaxNodePerJobLimit", "QOSMaxGRESPerJob", "QOSMaxCpuPerJobLimit",
}  # fmt: skip
WARNING_SIGNALS = (10, 12)  # SIGUSR1, SIGUSR2
LAUNCH_FAILED_SIGNAL = 53  # slurmd could not start the script, e.g. its log folder is gone
OOM_SIGNAL = 125
OOM_WORDS = ("oom-kill", "oom_kill", "exceeded job memory limit", "exceeded memory limit", "exceeded step memory")
FULL_WORDS = ("no space left on device", "disk quota exceeded")


@dataclass(frozen=True, kw_only=True)
class Word:
    """The verdict on an attempt's life: its state, whether a machine is to blame, and why in plain words."""

    state: str
    machine_fault: bool = False
    reason: str = ""


def classify(row: Row, reports: tuple[LaunchRecord, ...] = (), log: str = "") -> Word:
    """One attempt's word. `reports` are our launchers' own (one a node), `log` the end of the batch script's log."""
    if row.state in PENDING:
        return Word(state="pending", reason=row.reason)
    if row.state in RUNNING:
        return Word(state="running", reason=row.reason if row.state == "COMPLETING" else "")
    if _out_of_memory(row, log):
        return Word(state="out_of_memory", machine_fault=True, reason=_memory_reason(row))
    if row.state in PLAIN:
        state = PLAIN[row.state]
        return Word(state=state, machine_fault=state != "suspended", reason=_plain_reason(row))
    if row.state == "FAILED":
        return _failed(row, reports, log)
    if row.state == "COMPLETED":
        return _completed(row, reports)
    return Word(state="unknown", reason=f"the scheduler's state {row.state!r} is not known to this version")


def _out_of_memory(row: Row, log: str) -> bool:
    steps = any(step.state == "OUT_OF_MEMORY" or step.signal == OOM_SIGNAL for step in row.steps)
    # Of a job that was started again the derived code is still the first attempt's: its own steps tell.
    derived = not row.steps and row.derived[1] == OOM_SIGNAL
    words = row.state == "FAILED" and any(word in log.lower() for word in OOM_WORDS)
    return row.state == "OUT_OF_MEMORY" or steps or derived or words


def _memory_reason(row: Row) -> str:
    step = next((step.name for step in row.steps if step.state == "OUT_OF_MEMORY"), "")
    where = f"step {step}" if step else "the job"
    return f"{where} was killed for memory (allocated {row.alloc_tres or 'unknown'}); the scheduler says {row.state}"


def _plain_reason(row: Row) -> str:
    nodes = f" on {row.nodes}" if row.nodes else ""
    if row.state == "CANCELLED":
        when = "while running" if row.started_at and row.nodes else "while pending"
        return f"cancelled {when}{f' by user {row.by}' if row.by else ''}{nodes}"
    texts = {"NODE_FAIL": "a node failed", "PREEMPTED": "preempted", "TIMEOUT": "reached the scheduler's time limit",
             "REQUEUED": "put back into the queue", "SUSPENDED": "suspended"}  # fmt: skip
    return texts.get(row.state, row.state.lower()) + nodes


def _failed(row: Row, reports: tuple[LaunchRecord, ...], log: str) -> Word:
    faults = [report.fault for report in reports if report.fault is not None]
    texts = [fault.text for fault in faults]
    if any("SIGUSR2" in fault.text for fault in faults if fault.kind == "terminated"):
        return Word(state="timeout", machine_fault=True, reason="warned of the time limit, and ended by our launcher")
    if over := next((fault.text for fault in faults if fault.kind == "timeout"), ""):
        return Word(state="timeout", machine_fault=True, reason=f"ended by our launcher: {over}")
    if not reports and (row.signal in WARNING_SIGNALS or row.exit_code - 128 in WARNING_SIGNALS or row.exit_code == 12):
        return Word(state="timeout", machine_fault=True, reason="warned of the time limit before the launcher listened")
    if row.signal == LAUNCH_FAILED_SIGNAL or "LaunchFail" in row.reason:
        return Word(state="launch_failed", machine_fault=True, reason=f"the node could not start the job{_on(row)}")
    if full := next((text for text in (*texts, log) if any(word in text.lower() for word in FULL_WORDS)), ""):
        return Word(state="failed", machine_fault=True, reason=f"the spool is full: {_last(full)}")
    if any(fault.kind == "terminated" for fault in faults):
        return Word(state="cancelled", machine_fault=True, reason=texts[0] + _on(row))
    if not reports:
        reason = f"nothing of ours started{_on(row)}: exit {row.exit_code}:{row.signal}; last words: {_last(log)}"
        return Word(state="launch_failed", machine_fault=True, reason=reason)
    if any(report.ended_at is None for report in reports):
        cut = f"the launcher ended before it could report{_on(row)}: exit {row.exit_code}:{row.signal}; {_last(log)}"
        return Word(state="failed", machine_fault=True, reason=cut)
    return Word(state="failed", reason="; ".join(dict.fromkeys(texts)) or "not every test passed")


def _completed(row: Row, reports: tuple[LaunchRecord, ...]) -> Word:
    if not reports:
        reason = f"ended well{_on(row)}, but our launcher left no report"
        return Word(state="completed", machine_fault=True, reason=reason)
    if any(report.ended_at is None for report in reports):
        return Word(state="completed", machine_fault=True, reason="ended well, but our launcher's report is unfinished")
    return Word(state="completed")


def attempt_of(number: int, row: Row, word: Word, reports: tuple[LaunchRecord, ...] = ()) -> Attempt:
    """The record of one attempt: the scheduler's facts, our word, and each rank's true exit code."""
    live = word.state in ("pending", "running", "suspended", "unknown")
    codes = {rank: code for report in reports for rank, code in report.exit_codes.items()}
    return Attempt(
        number=number, state=word.state, machine_fault=word.machine_fault, reason=word.reason, scheduler_id=row.id,
        nodes=expand_nodes(row.nodes), tasks=row.tasks, alloc_tres=row.alloc_tres,
        exit_code=None if live else row.exit_code, signal=None if live else row.signal,
        submitted_at=row.submitted_at, started_at=row.started_at, ended_at=None if live else row.ended_at,
        rank_exit_codes=codes,
    )  # fmt: skip


def merge(rows: list[Row], live: Row | None) -> list[Row]:
    """The accounting's rows, oldest first, with the controller's word on the newest attempt where that is fresher."""
    if live is None:
        return rows
    if not rows:
        return [live]
    last = rows[-1]
    ended = last.state not in PENDING | RUNNING | {"SUSPENDED"}
    begun_again = ended and live.state in PENDING | RUNNING | {"SUSPENDED"} and live.state != "COMPLETING"
    if begun_again and (live.submitted_at or 0) >= (last.submitted_at or 0) and live.restarts >= len(rows):
        return [*rows, live]
    if live.state == "COMPLETING" or not ended:
        state = live.state if live.state in PENDING | RUNNING | {"SUSPENDED"} else last.state
        return [*rows[:-1], replace(last, state=state, reason=live.reason)]
    return [*rows[:-1], replace(last, reason=live.reason or last.reason if last.state == "FAILED" else "")]


def _on(row: Row) -> str:
    return f" on {row.nodes}" if row.nodes else ""


def _last(text: str) -> str:
    """The line that says most: the first that speaks of an error, else the last one."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    telling = [line for line in lines if "error" in line.lower() and "task 0: Exited" not in line]
    return (telling[0] if telling else lines[-1])[:300] if lines else "none"
