"""What Slurm says: asks it, keeps its answers as they came, and reads them. Decides nothing; see `classify`.

One poll is two commands whatever the number of jobs: `sacct -D` for every row the accounting has, steps and requeues
included, and `squeue -t all` for the live state and reason. An answer that did not come is kept as such.
"""

from __future__ import annotations

import os
import re
import subprocess
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from ledger.record import Answer

SACCT_FIELDS = (
    "JobID", "JobIDRaw", "JobName", "State", "ExitCode", "DerivedExitCode", "Reason", "NodeList", "NNodes", "NTasks",
    "AllocTRES", "Submit", "Start", "End", "Partition", "Account", "QOS",
)  # fmt: skip
SQUEUE_FIELDS = (
    "JobArrayID", "JobID", "Name", "State", "Reason", "exit_code", "RestartCnt", "NodeList", "NumNodes", "NumTasks",
    "tres-alloc", "SubmitTime", "StartTime", "EndTime", "Partition",
)  # fmt: skip
NO_ANSWER = (124, 127)  # timed out, not installed
TIMEOUT_S = 30.0


@dataclass(frozen=True, kw_only=True)
class Step:
    """One step of an attempt: its name ("batch", "0"), state, exit code and signal, number of tasks."""

    name: str
    state: str
    exit_code: int
    signal: int
    tasks: int
    nodes: str = ""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One attempt as the scheduler tells it. Times are seconds since the epoch, None while unknown."""

    id: str  # "12", or "12_3" for a task of an array
    raw_id: str
    name: str
    state: str  # one word, e.g. CANCELLED
    by: str = ""  # who cancelled
    exit_code: int = 0
    signal: int = 0
    derived: tuple[int, int] = (0, 0)  # the worst step's exit code and signal
    reason: str = ""
    nodes: str = ""
    node_count: int = 0
    tasks: int = 0
    alloc_tres: str = ""
    submitted_at: float | None = None
    started_at: float | None = None
    ended_at: float | None = None
    restarts: int = 0
    source: str = "sacct"
    steps: tuple[Step, ...] = ()


@dataclass
class Poll:
    """Everything learned at one moment: rows and live rows by job id, and the answers they were read from."""

    rows: dict[str, list[Row]] = field(default_factory=dict)
    live: dict[str, Row] = field(default_factory=dict)
    accounting: Answer | None = None
    queue: Answer | None = None

    @property
    def accounting_answers(self) -> bool:
        return self.accounting is not None and self.accounting.exit_code == 0

    @property
    def accounting_is_off(self) -> bool:
        """This cluster keeps no accounting at all: not an outage, so nothing to wait for."""
        return self.accounting is not None and "accounting storage is disabled" in self.accounting.error

    @property
    def queue_answers(self) -> bool:
        """Did the controller answer? That it knows none of the ids is an answer."""
        return self.queue is not None and (self.queue.exit_code == 0 or "Invalid job id" in self.queue.error)

    def lines(self, answer: Answer | None, ids: Iterable[str]) -> Answer | None:
        """`answer` with only the heading and the lines about `ids`, each line as it came."""
        if answer is None:
            return None
        keep = set(ids)
        head, *rest = answer.output.splitlines() or [""]
        mine = [line for line in rest if keep & set(expand_ids(line.split("|", 1)[0].split(".", 1)[0]))]
        return Answer(**{name: getattr(answer, name) for name in ("command", "asked_at", "exit_code", "error")},
                      output="\n".join([head, *mine]))  # fmt: skip


def ask(command: Sequence[str], timeout_s: float = TIMEOUT_S) -> Answer:
    """Run one scheduler command and keep what it said; never raises for what the scheduler does."""
    env = {**os.environ, "SLURM_TIME_FORMAT": "%s", "SLURM_BITSTR_LEN": "0", "LC_ALL": "C"}
    asked_at = time.time()
    try:
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=timeout_s, check=False)
    except subprocess.TimeoutExpired:
        error = f"no answer within {timeout_s:g} s"
        return Answer(command=tuple(command), asked_at=asked_at, exit_code=NO_ANSWER[0], output="", error=error)
    except FileNotFoundError:
        error = f"{command[0]} is not installed here"
        return Answer(command=tuple(command), asked_at=asked_at, exit_code=NO_ANSWER[1], output="", error=error)
    return Answer(command=tuple(command), asked_at=asked_at, exit_code=done.returncode, output=done.stdout,
                  error=done.stderr.strip())  # fmt: skip


def poll(ids: Iterable[str]) -> Poll:
    """Ask for all jobs at once. `ids` are those that sbatch gave (of an array: the array's own)."""
    listed = ",".join(sorted(set(ids), key=_natural))
    if not listed:
        return Poll()
    accounting = ask(["sacct", "-D", "-P", "-j", listed, "-o", ",".join(SACCT_FIELDS)])
    columns = ",".join(f"{name}:|" for name in SQUEUE_FIELDS)
    queue = ask(["squeue", "-r", "-t", "all", "-j", listed, "-O", columns])
    return Poll(rows=read_sacct(accounting.output), live=read_squeue(queue.output), accounting=accounting, queue=queue)


def show(job_id: str) -> Answer:
    """The controller's full description of a job (of an array: of every task) while it still has one."""
    return ask(["scontrol", "-o", "show", "job", job_id])


def _natural(job_id: str) -> tuple:
    return tuple(int(part) if part.isdigit() else part for part in job_id.split("_"))


def read_sacct(text: str) -> dict[str, list[Row]]:
    """Rows by job id, oldest attempt first, each with its steps; pending tasks of an array are listed one by one."""
    rows: dict[str, list[Row]] = {}
    for cells in _table(text, SACCT_FIELDS):
        job_id, _, step = cells["JobID"].partition(".")
        if not step:
            row = _row(cells)
            for one in expand_ids(job_id):
                rows.setdefault(one, []).append(replace(row, id=one))
        elif rows.get(job_id):
            last = rows[job_id][-1]
            rows[job_id][-1] = _with_step(last, step, cells)
    return {job_id: sorted(found, key=lambda row: row.submitted_at or 0) for job_id, found in rows.items()}


def _table(text: str, names: Sequence[str]) -> list[dict[str, str]]:
    """A heading (not needed, its names are not unique) and lines of cells; lines that were cut short are left out."""
    cells = [line.split("|") for line in text.splitlines()[1:]]
    return [dict(zip(names, row, strict=False)) for row in cells if len(row) >= len(names)]


def _row(cells: dict[str, str]) -> Row:
    state, _, by = cells["State"].partition(" by ")
    code, sig = _pair(cells["ExitCode"])
    return Row(
        id=cells["JobID"], raw_id=cells["JobIDRaw"], name=cells["JobName"], state=state.split()[0] if state else "",
        by=by, exit_code=code, signal=sig, derived=_pair(cells["DerivedExitCode"]), reason=_word(cells["Reason"]),
        nodes=_word(cells["NodeList"]), node_count=_int(cells["NNodes"]), alloc_tres=cells["AllocTRES"],
        submitted_at=_time(cells["Submit"]), started_at=_time(cells["Start"]), ended_at=_time(cells["End"]),
    )  # fmt: skip


def _with_step(row: Row, name: str, cells: dict[str, str]) -> Row:
    code, sig = _pair(cells["ExitCode"])
    step = Step(name=name, state=(cells["State"].split() or [""])[0], exit_code=code, signal=sig,
                tasks=_int(cells["NTasks"]), nodes=_word(cells["NodeList"]))  # fmt: skip
    tasks = max(row.tasks, step.tasks) if name.isdigit() else row.tasks
    return replace(row, steps=(*row.steps, step), tasks=tasks)


def read_squeue(text: str) -> dict[str, Row]:
    """The live row of each job the controller still has, finished ones of the last minutes included."""
    found = {}
    for cells in _table(text, SQUEUE_FIELDS):
        status = _int(cells["exit_code"])
        found[cells["JobArrayID"]] = Row(
            id=cells["JobArrayID"], raw_id=cells["JobID"], name=cells["Name"], state=cells["State"],
            exit_code=status >> 8, signal=status & 0x7F, reason=_word(cells["Reason"]),
            nodes=_word(cells["NodeList"]), node_count=_int(cells["NumNodes"]), tasks=_int(cells["NumTasks"]),
            alloc_tres=_word(cells["tres-alloc"]), submitted_at=_time(cells["SubmitTime"]),
            started_at=_time(cells["StartTime"]), ended_at=_time(cells["EndTime"]),
            restarts=_int(cells["RestartCnt"]), source="squeue",
        )  # fmt: skip
    return found


def expand_ids(text: str) -> list[str]:
    """'4_[1,3-5%2]' -> 4_1, 4_3, 4_4, 4_5; a range may have a step ('4-10:2'); other ids are themselves."""
    match = re.fullmatch(r"(\d+)_\[([^\]%]*)(?:%\d+)?\]", text)
    if match is None:
        return [text]
    found: list[str] = []
    for part in match[2].split(","):
        span, _, step = part.partition(":")
        low, _, high = span.partition("-")
        if low.isdigit():
            found += [f"{match[1]}_{i}" for i in range(int(low), int(high or low) + 1, int(step or 1))]
    return found


def expand_nodes(text: str) -> tuple[str, ...]:
    """'n[1-2,07-08],gpu3' -> n1 n2 n07 n08 gpu3."""
    found: list[str] = []
    for group in re.findall(r"[^,\[\]]*(?:\[[^\]]*\][^,\[\]]*)*", text):
        if group:
            found += _expand_group(group)
    return tuple(found)


def _expand_group(group: str) -> list[str]:
    head, bracket, rest = group.partition("[")
    if not bracket:
        return [group]
    inside, _, tail = rest.partition("]")
    names: list[str] = []
    for part in inside.split(","):
        low, _, high = part.partition("-")
        numbers = [f"{i:0{len(low)}}" for i in range(int(low), int(high or low) + 1)]
        names += [head + number + end for number in numbers for end in _expand_group(tail)]
    return names


def _pair(text: str) -> tuple[int, int]:
    """'9:0' -> exit code and signal."""
    code, _, sig = text.partition(":")
    return _int(code), _int(sig)


def _int(text: str) -> int:
    return int(text) if text.strip().lstrip("-").isdigit() else 0


def _time(text: str) -> float | None:
    return float(text) if text.isdigit() else None


def _word(text: str) -> str:
    """The scheduler's several ways to say nothing are ''."""
    return "" if text in ("None", "None assigned", "N/A", "(null)", "Unknown") else text
