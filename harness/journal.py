"""What was submitted, in the order it happened: `submissions.jsonl` of a run directory.

An intent is written before the scheduler is called and its outcome after, so that whoever finds the run directory
later, in another shell or after a crash, knows which jobs may exist. Lines are only ever added.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

import msgspec
from filelock import FileLock

NAME = "submissions.jsonl"


class Order(msgspec.Struct, frozen=True):
    """One task of a submission: this attempt at this job."""

    job: str
    attempt: int


class Intent(msgspec.Struct, frozen=True, kw_only=True, tag="intent"):
    """These orders are about to be handed to the scheduler under this name, as one job or one array."""

    group: str
    name: str
    orders: tuple[Order, ...]
    time: float


class Placed(msgspec.Struct, frozen=True, kw_only=True, tag="placed"):
    """The scheduler took the group and gave this id."""

    group: str
    scheduler_id: str
    time: float


class Refused(msgspec.Struct, frozen=True, kw_only=True, tag="refused"):
    """The scheduler refused the group, in its own words."""

    group: str
    text: str
    time: float


class Cancelled(msgspec.Struct, frozen=True, kw_only=True, tag="cancelled"):
    """Someone asked for these jobs to be cancelled, for this reason: no attempt follows."""

    jobs: tuple[str, ...]
    reason: str
    time: float


Line = Intent | Placed | Refused | Cancelled


@dataclass
class Group:
    """An intent and what became of it."""

    intent: Intent
    scheduler_id: str = ""
    refused: str = ""

    @property
    def open(self) -> bool:
        """Neither taken nor refused: the submitter died in between, or the scheduler did not answer."""
        return not self.scheduler_id and not self.refused

    def task_id(self, order: Order) -> str:
        """The scheduler's id of one order; '' while there is none."""
        if not self.scheduler_id or len(self.intent.orders) == 1:
            return self.scheduler_id
        return f"{self.scheduler_id}_{self.intent.orders.index(order)}"


def lock(run_dir: Path) -> FileLock:
    """Held by whoever submits or collects; a killed process lets go of it."""
    return FileLock(run_dir / ".collect.lock")


def append(run_dir: Path, line: Line) -> None:
    """Add one line and force it to the disk."""
    with open(run_dir / NAME, "ab") as file:
        if file.tell() and not (run_dir / NAME).read_bytes().endswith(b"\n"):
            file.write(b"\n")  # a line that was cut short by a crash stays a line of its own
        file.write(msgspec.json.encode(line) + b"\n")
        file.flush()
        os.fsync(file.fileno())


def read(run_dir: Path) -> list[Line]:
    """Every whole line. One cut short by a crash is left out: its act is looked for at the scheduler by name."""
    path = run_dir / NAME
    found: list[Line] = []
    for text in path.read_bytes().splitlines() if path.exists() else []:
        try:
            found.append(msgspec.json.decode(text, type=Line))
        except msgspec.DecodeError:
            continue
    return found


def groups(lines: list[Line]) -> dict[str, Group]:
    """Every submission by its group's name, in order."""
    found: dict[str, Group] = {}
    for line in lines:
        if isinstance(line, Intent):
            found[line.group] = Group(line)
        elif isinstance(line, Placed):
            found[line.group].scheduler_id = line.scheduler_id
        elif isinstance(line, Refused):
            found[line.group].refused = line.text
    return found


def cancelled(lines: list[Line]) -> dict[str, str]:
    """Jobs that were cancelled on purpose, and why."""
    return {job: line.reason for line in lines if isinstance(line, Cancelled) for job in line.jobs}


def cancel(run_dir: Path, jobs: tuple[str, ...], reason: str) -> None:
    """Note that these jobs are to end."""
    append(run_dir, Cancelled(jobs=jobs, reason=reason, time=time.time()))
