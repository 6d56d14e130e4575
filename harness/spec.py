"""What the harness hands around: a plan, a job's orders, a launcher's report. Frozen, JSON in and out.

Re-exports the evidence types of `ledger.record`, so that suites and commands import one module. Nothing heavy here.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

from ledger.record import (
    SCHEMA,
    Answer,
    Attempt,
    Claim,
    ClaimStatus,
    Expected,
    Input,
    JobRecord,
    Measure,
    RankRecord,
    Record,
    RunRecord,
    Topology,
    decode,
    encode,
)

__all__ = [
    "SCHEMA", "Answer", "Attempt", "Cell", "Claim", "ClaimStatus", "Expected", "Fault", "HarnessError", "Input",
    "JobRecord", "JobSpec", "LaunchRecord", "Measure", "Plan", "RankRecord", "Record", "RunRecord", "TestItem",
    "Topology", "decode", "encode", "load", "store",
]  # fmt: skip


class HarnessError(ValueError):
    """A mistake of the caller or of the machine, told in one line: value, rule, remedy."""


class TestItem(Record, kw_only=True):
    """One collected test: its node id and the world sizes its `ranks` marker allows (none: any)."""

    __test__ = False
    id: str
    ranks: tuple[int, ...] = ()


class Cell(Record, kw_only=True):
    """What the plan does about one claim on one topology, and why."""

    claim: str
    topology: str
    action: Literal["run", "keep", "needs", "elsewhere", "broken", "over_budget"]
    reason: str
    tests: tuple[str, ...] = ()
    jobs: tuple[str, ...] = ()
    cpu_s: float = 0.0
    gpu_s: float = 0.0
    estimated: bool = False  # no past duration was known for some test


class Plan(Record, kw_only=True):
    """Every (job, test, rank) that is expected, and what is done about each selected cell."""

    schema: str = SCHEMA
    names: tuple[str, ...]
    snapshot: str
    claims: tuple[Claim, ...]
    expected: tuple[Expected, ...]
    cells: tuple[Cell, ...]
    inputs: dict[str, dict[str, str]] = {}  # input -> file -> SHA-256
    env: dict[str, str] = {}  # where this host keeps the inputs, e.g. K3_PUBLIC
    cluster: str = ""
    sabotage: str = ""
    cpu_s: float = 0.0  # from past durations
    gpu_s: float = 0.0


class JobSpec(Record, kw_only=True):
    """A job's orders: all that a node needs besides the snapshot. Lies in jobs/<job>/spec.json."""

    schema: str = SCHEMA
    run: str
    nonce: str
    job: str
    topology: Topology
    tests: tuple[str, ...]
    snapshot: str  # hash of the manifest the job must find
    env: dict[str, str] = {}  # set for every rank, e.g. K3_PUBLIC
    sabotage: str = ""
    until_failure: dict[str, tuple[str, ...]] = {}  # claim -> tests: after a failure its others are left out
    timeout_s: float = 600.0
    stall_s: float = 300.0  # a rank without any event for so long is hung
    stopped_s: float = 3.0  # a rank that the kernel reports stopped for so long is hung
    beat_s: float = 120.0  # a rank whose heartbeat is so old is hung (one long native call may hold it back)
    grace_s: float = 3.0  # between SIGTERM and SIGKILL


class Fault(Record, kw_only=True):
    """What went wrong with one rank (-1: with the job as a whole), as the launcher saw it."""

    kind: Literal[
        "exit", "signal", "early_exit", "stopped", "stalled", "silent", "timeout", "terminated", "refused", "spool",
        "peer_node",
    ]  # fmt: skip
    rank: int
    text: str
    time: float


class LaunchRecord(Record, kw_only=True):
    """The launcher's own report of one attempt on one node; `fault` is the one to blame: the earliest."""

    schema: str = SCHEMA
    run: str
    nonce: str
    job: str
    attempt: int
    node: str
    node_rank: int = 0
    pid: int
    pid_started: int = 0  # the kernel's start time of the launcher, so that a reused pid is not mistaken for it
    started_at: float
    ended_at: float | None = None
    exit_code: int | None = None
    exit_codes: dict[str, int] = {}  # rank -> exit code; negative: the signal that ended it
    fault: Fault | None = None
    faults: tuple[Fault, ...] = ()


def store(path: Path, record: Record) -> None:
    """Write `record` whole or not at all: temporary name, fsync, rename."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with open(partial, "wb") as file:
        file.write(encode(record))
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)


def load(path: Path, kind: type) -> Record:
    """Read one record. Raises FileNotFoundError, or SchemaError naming what was found."""
    return decode(Path(path).read_bytes(), kind)
