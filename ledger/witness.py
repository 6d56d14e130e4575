"""Who confirms a run: T0 the run itself, T1 the scheduler whose raw answers agree with the ranks.

T2, a second cluster under another key, needs several runs and is decided in `claims.py`. The answers are read again
here, from the raw text, so that a collector's mistake or a forged summary cannot stand in for them.
"""

from __future__ import annotations

import re
from typing import Literal

from ledger.attempts import Examined
from ledger.record import JobRecord, Record
from ledger.runs import Run, Stream

CLOCK_SKEW_S = 3.0
PLANNING_SKEW_S = 60.0
STATES = {
    "completed": ("COMPLETED",),
    "failed": ("FAILED", "NODE_FAIL", "CANCELLED"),
}


class Word(Record, kw_only=True):
    """The witness of one attempt: its level, why no higher, and every disagreement (each blocks the claim)."""

    level: Literal["T0", "T1"]
    note: str = ""
    disagreements: tuple[str, ...] = ()


def question(run: Run, job: JobRecord, one: Examined) -> Word:
    """Compare the stored answers of the scheduler with what the collector and the ranks wrote."""
    if job.scheduler == "local":
        return Word(level="T0", note="run by the local executor: there is no scheduler to ask")
    answers = [a for a in job.answers if a.command and a.command[0].endswith("sacct") and a.exit_code == 0]
    rows = [row for answer in answers for row in read_sacct(answer.command, answer.output)]
    mine = _rows_of(rows, one.attempt.scheduler_id)
    if not mine:
        return Word(level="T0", note=job.note or "the scheduler's accounting said nothing of this job: T0 at most")
    index, row = _attempt_row(mine, one)
    if row is None:
        return Word(
            level="T0", disagreements=(f"no row of job {one.attempt.scheduler_id} was submitted when this was",)
        )
    faults = [*_of_attempt(run, job, one, row, index), *_of_ranks(one, row, index), *_of_devices(one, row)]
    if faults:
        return Word(level="T0", disagreements=tuple(faults))
    return Word(level="T1", note=f"sacct: job {row['JobID']} {row['State']} {row['ExitCode']} on {row['NodeList']}")


def read_sacct(command: tuple[str, ...], output: str) -> list[dict[str, str]]:
    """Rows of a `sacct -P` answer, named by the -o list of its own command; steps under 'steps' of their job."""
    names = _columns(command)
    rows: list[dict] = []
    for line in output.splitlines():
        cells = line.split("|")
        if len(cells) < len(names) or cells[: len(names)] == names:
            continue
        row: dict = dict(zip(names, cells, strict=False))
        if "." not in row.get("JobID", "."):
            rows.append({**row, "steps": []})
        elif rows and rows[-1]["JobID"] == row["JobID"].split(".")[0]:
            rows[-1]["steps"].append(row)
    return rows


def _columns(command: tuple[str, ...]) -> list[str]:
    for flag, value in zip(command, [*command[1:], ""], strict=True):
        if flag in ("-o", "--format"):
            return value.split(",")
        if flag.startswith("--format="):
            return flag.removeprefix("--format=").split(",")
    return []


def _rows_of(rows: list[dict], job_id: str) -> list[dict]:
    """Every attempt's row of one job, oldest first; the same row told twice counts once."""
    mine = {(row.get("JobIDRaw"), row.get("Submit")): row for row in rows if job_id and job_id in
            (row.get("JobID"), row.get("JobIDRaw"))}  # fmt: skip
    return sorted(mine.values(), key=lambda row: _time(row.get("Submit")) or 0)


def _attempt_row(rows: list[dict], one: Examined) -> tuple[int, dict | None]:
    """The row of this attempt: attempts of one job differ in when they were submitted."""
    wanted = one.attempt.submitted_at
    for index, row in enumerate(rows):
        told = _time(row.get("Submit"))
        if wanted is not None and told is not None and abs(told - wanted) <= 1:
            return index, row
    return 0, None


def _of_attempt(run: Run, job: JobRecord, one: Examined, row: dict, index: int) -> list[str]:
    """The collector's summary and the plan against the raw row."""
    attempt, topology = one.attempt, job.topology
    nodes, steps = expand_nodes(row.get("NodeList", "")), [_int(s.get("NTasks")) for s in row["steps"]]
    tasks, code = max(steps, default=0), row.get("ExitCode", "").split(":")[0]
    state = row.get("State", "").split()[0] if row.get("State") else "no state"
    faults = []
    if state not in STATES.get(attempt.state, (state,)):
        faults.append(f"it says {state}, the record says {attempt.state}")
    if attempt.exit_code is not None and _int(code) != attempt.exit_code & 0x7F:
        faults.append(f"it says exit code {code}, the record says {attempt.exit_code}")
    # Of a job that was started again the derived code is still an earlier attempt's: only its own steps tell.
    ends = [step.get("ExitCode", "") for step in row["steps"]] + ([] if index else [row.get("DerivedExitCode", "")])
    if attempt.state == "completed" and (bad := [end for end in ends if end not in ("0:0", "")]):
        faults.append(f"a step ended with {bad[0]}, the record says completed")
    if sorted(nodes) != sorted(attempt.nodes):
        faults.append(f"it says nodes {','.join(nodes) or 'none'}, the record says {','.join(attempt.nodes) or 'none'}")
    if len(nodes) != topology.nodes:
        faults.append(f"it gave {len(nodes)} nodes, the topology asks for {topology.nodes}")
    if tasks not in (0, topology.nodes, topology.ranks):
        faults.append(f"its step had {tasks} tasks; {topology.nodes} launchers or {topology.ranks} ranks were due")
    for name, told, kept in (
        ("start", row.get("Start"), attempt.started_at),
        ("end", row.get("End"), attempt.ended_at),
    ):
        if _time(told) is None or kept is None or abs(_time(told) - kept) > 1:
            faults.append(f"it says {name} {told}, the record says {kept}")
    if (_time(row.get("Submit")) or 0) < run.record.created_at - PLANNING_SKEW_S:
        faults.append("it was submitted before the run was planned: a job id was used again")
    return faults


def _of_ranks(one: Examined, row: dict, index: int) -> list[str]:
    """What the ranks saw of the scheduler and of time, against the raw row."""
    faults, nodes = [], set(expand_nodes(row.get("NodeList", "")))
    begun, ended = _time(row.get("Start")), _time(row.get("End"))
    for rank, stream in sorted(one.streams.items()):
        if not stream.starts:
            continue
        env, node = stream.starts[0].scheduler_env, _node(stream)
        if env.get("SLURM_JOB_ID", "") not in (row.get("JobIDRaw"), row.get("JobID")):
            faults.append(f"rank {rank} ran in job {env.get('SLURM_JOB_ID') or 'none'}, not in {row.get('JobIDRaw')}")
        if node not in nodes:
            faults.append(f"rank {rank} ran on {node or 'an unknown node'}, the job had {','.join(sorted(nodes))}")
        if (restarts := env.get("SLURM_RESTART_COUNT", "")).isdigit() and int(restarts) < index:
            faults.append(f"rank {rank} ran in restart {restarts}, its row is number {index}")
        if begun is not None and stream.starts[0].time < begun - CLOCK_SKEW_S:
            faults.append(f"rank {rank} started before its job did")
        if ended is not None and stream.last_time > ended + CLOCK_SKEW_S:
            faults.append(f"rank {rank} wrote after its job had ended")
    if used := nodes - {_node(stream) for stream in one.streams.values()}:
        faults.append(f"no rank ran on {','.join(sorted(used))}")
    return faults


def _node(stream: Stream) -> str:
    told = stream.starts[0].scheduler_env.get("SLURMD_NODENAME", "") if stream.starts else ""
    return told or (stream.environments[0].fingerprint.node if stream.environments else "")


def _of_devices(one: Examined, row: dict) -> list[str]:
    seen = [(_node(s), s.environments[0]) for s in one.streams.values() if s.environments]
    if not any(env.device.startswith("cuda") for _, env in seen):
        return []
    gpus = {(node, gpu.get("uuid", "")) for node, env in seen for gpu in env.fingerprint.gpus}
    granted = allocated(row.get("AllocTRES", ""), "gres/gpu")
    return [] if len(gpus) <= granted else [f"the ranks saw {len(gpus)} GPUs, the scheduler gave {granted}"]


def allocated(tres: str, name: str) -> int:
    """'cpu=2,gres/gpu=8,node=1', 'gres/gpu' -> 8; 0 if it is not there."""
    pairs = dict(part.split("=", 1) for part in tres.split(",") if "=" in part)
    return _int(pairs.get(name, ""))


def expand_nodes(text: str) -> list[str]:
    """'n[1-2,07-08],gpu3' -> n1 n2 n07 n08 gpu3; the scheduler's ways to say nothing give nothing."""
    if text in ("", "None", "None assigned", "N/A", "(null)", "Unknown"):
        return []
    groups = re.findall(r"[^,\[\]]+(?:\[[^\]]*\][^,\[\]]*)*", text)
    return [name for group in groups for name in _expand(group)]


def _expand(group: str) -> list[str]:
    head, bracket, rest = group.partition("[")
    if not bracket:
        return [group]
    inside, _, tail = rest.partition("]")
    found: list[str] = []
    for part in inside.split(","):
        low, _, high = part.partition("-")
        for number in range(int(low), int(high or low) + 1):
            found += [f"{head}{number:0{len(low)}}{end}" for end in _expand(tail)]
    return found


def _int(text: str | None) -> int:
    return int(text) if text and text.strip().lstrip("-").isdigit() else 0


def _time(text: str | None) -> float | None:
    return float(text) if text and text.isdigit() else None
