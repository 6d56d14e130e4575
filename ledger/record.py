"""The evidence types every package shares: what was claimed, planned, observed, and decided.

All are frozen, JSON in and out. A file that holds them carries `schema`; readers ignore unknown keys and
refuse an unknown major version. Nothing here imports torch, pytest, a scheduler or a database.
"""

from __future__ import annotations

import hashlib
import math
from typing import Any, Literal

import msgspec

SCHEMA = "1.0"
# Raised only when a record or a verdict changes its meaning; evidence of another recorder version expires.
RECORDER_VERSION = 1

Outcome = Literal["passed", "failed", "error", "skipped", "xfailed", "xpassed", "lost"]
OUTCOMES: tuple[str, ...] = ("lost", "error", "failed", "xpassed", "xfailed", "skipped", "passed")  # worst first
State = Literal["proven", "expired", "unproven", "refuted", "flaky", "needs"]


class SchemaError(ValueError):
    """A record that this version cannot read; the message names what was found and what is required."""


class Record(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=False):
    """Base of all evidence types: frozen, keyword-only, JSON in and out."""


class Topology(Record, kw_only=True):
    """Where a job runs. `ranks` is the world size over all nodes; `backend` is the collective transport."""

    name: str
    device: Literal["cpu", "cuda"] = "cpu"
    ranks: int = 1
    nodes: int = 1
    backend: Literal["none", "gloo", "nccl"] = "none"
    gpus_per_node: int = 0
    timeout_min: int = 10
    stall_s: float = 300.0  # a rank that reports nothing for so long is hung


class Input(Record, kw_only=True):
    """An external input a claim needs: resolved when planning from `env`, then from `paths`; checked by SHA-256."""

    name: str
    env: str = ""
    paths: tuple[str, ...] = ()
    files: dict[str, str] = {}  # file name below the folder -> SHA-256


class Claim(Record, kw_only=True):
    """One sentence the product may make, and everything that must hold for it. Data, from suites/claims.toml."""

    id: str
    text: str
    tests: tuple[str, ...]  # node ids; one without parameters selects all its parameters
    topologies: tuple[str, ...]
    suites: tuple[str, ...] = ()  # named groups such as quick, cpu, gpu
    paths: tuple[str, ...] = ()  # k3.announce names that every rank must have announced
    inputs: tuple[str, ...] = ()
    scope: Literal["proxy", "full"] = "proxy"
    kill_rate: float = 0.95
    kill_reason: str = ""  # why a lower rate is declared


class Measure(Record, kw_only=True):
    """A measured quantity with raw samples; numpy scalars are coerced, NaN and infinity refused by name."""

    name: str
    unit: str
    direction: Literal["lower", "higher"]
    samples: tuple[float, ...]
    shape: str = ""
    dtype: str = ""
    context: dict[str, Any] = {}  # peer, floor, autotune choice, clocks ...

    @classmethod
    def of(cls, name: str, unit: str, direction: str, samples, **rest) -> Measure:
        """Build from any iterable of real numbers. Raises ValueError naming the measure and the bad sample."""
        values = tuple(finite(name, sample) for sample in samples)
        if not values:
            raise ValueError(f"measure {name!r} has no samples; a declared measure without a number is a failure")
        return cls(name=name, unit=unit, direction=direction, samples=values, **rest)


def finite(name: str, value: Any) -> float:
    """Return `value` as a finite Python float, or raise ValueError naming the measure."""
    try:
        number = float(value)
    except (TypeError, ValueError) as error:
        raise ValueError(f"measure {name!r}: {value!r} is not a number") from error
    if not math.isfinite(number):
        raise ValueError(f"measure {name!r}: {number} is not finite; NaN and infinity are refused")
    return number


class Fingerprint(Record, kw_only=True):
    """Where a rank ran: machine, accelerator, toolchain, and the environment that matters. Unknown is ''."""

    host: str = ""
    node: str = ""  # the scheduler's name for the node (SLURMD_NODENAME), else host
    os: str = ""
    cpu: str = ""
    cpu_count: int = 0
    gpus: tuple[dict[str, Any], ...] = ()  # visible devices: index, name, uuid, memory_bytes
    driver: str = ""
    cuda: str = ""
    nccl: str = ""
    torch: str = ""
    triton: str = ""
    ptxas: str = ""
    fla: str = ""
    python: str = ""
    env: dict[str, str] = {}

    @property
    def toolchain(self) -> str:
        """The part of a grade that says with what: e.g. 'torch 2.13.0+cpu, python 3.11'."""
        parts = [f"torch {self.torch}"] if self.torch else []
        parts += [f"{name} {value}" for name in ("triton", "fla", "cuda", "nccl") if (value := getattr(self, name))]
        parts += ["python " + ".".join(self.python.split(".")[:2])] if self.python else []
        return ", ".join(parts)


# --- the per-rank stream: attempts/<n>/rank<r>.jsonl, one object a line, `kind` says which ---------------------


class Start(Record, kw_only=True, tag_field="kind", tag="start"):
    """First line of a rank's stream, written before anything is imported that could fail."""

    schema: str = SCHEMA
    recorder: int = RECORDER_VERSION
    run: str
    nonce: str
    job: str
    attempt: int
    rank: int
    world_size: int
    snapshot: str  # hash of the snapshot's manifest, recomputed on the node
    pid: int
    time: float  # seconds since the epoch
    scheduler_env: dict[str, str] = {}  # SLURM_JOB_ID, SLURM_RESTART_COUNT, SLURMD_NODENAME, SLURM_PROCID ...


class Environment(Record, kw_only=True, tag_field="kind", tag="environment"):
    """Second line: what the rank found once torch was imported; `backend` is asked of the process group."""

    fingerprint: Fingerprint
    device: str
    backend: str
    modules: dict[str, str] = {}  # k3, harness, suites -> path relative to the snapshot


class TestStart(Record, kw_only=True, tag_field="kind", tag="test_start"):
    __test__ = False
    test: str
    time: float


class TestEnd(Record, kw_only=True, tag_field="kind", tag="test_end"):
    """A test's outcome on this rank; `closure` maps 'file::qualname' to the canonical hash of each piece it used."""

    __test__ = False
    test: str
    outcome: Outcome
    duration_s: float
    time: float
    message: str = ""
    paths: tuple[str, ...] = ()  # announced while the test ran
    kernels: tuple[str, ...] = ()  # observed by the profiler, GPU only
    measures: tuple[Measure, ...] = ()
    closure: dict[str, str] = {}
    data: dict[str, str] = {}  # data file -> SHA-256


class End(Record, kw_only=True, tag_field="kind", tag="end"):
    """Last line of a rank that finished by itself."""

    time: float
    exit_code: int
    collected: tuple[str, ...] = ()


Event = Start | Environment | TestStart | TestEnd | End


class RankRecord(Record, kw_only=True):
    """One test on one rank of one attempt, as ingested."""

    run: str
    job: str
    attempt: int
    rank: int
    test: str
    outcome: Outcome
    duration_s: float = 0.0
    message: str = ""


class Attempt(Record, kw_only=True):
    """One scheduler attempt at a job. `state` is the scheduler's word, normalised; never a test verdict."""

    number: int
    state: Literal[
        "pending", "running", "suspended", "completed", "failed", "node_fail", "preempted", "timeout",
        "out_of_memory", "cancelled", "requeued", "launch_failed", "rejected", "unknown",
    ]  # fmt: skip
    machine_fault: bool = False
    reason: str = ""
    scheduler_id: str = ""
    nodes: tuple[str, ...] = ()
    tasks: int = 0
    alloc_tres: str = ""
    exit_code: int | None = None
    signal: int | None = None
    submitted_at: float | None = None
    started_at: float | None = None
    ended_at: float | None = None
    rank_exit_codes: dict[str, int] = {}  # rank -> exit code (negative: signal), from our launcher


class Answer(Record, kw_only=True):
    """A scheduler's raw answer, kept as it came."""

    command: tuple[str, ...]
    asked_at: float
    exit_code: int
    output: str
    error: str = ""


class JobRecord(Record, kw_only=True):
    """What the collector learned of one job, beside the records: jobs/<job>/job.json."""

    schema: str = SCHEMA
    run: str
    nonce: str
    job: str
    scheduler: Literal["local", "slurm"]
    cluster: str = ""
    topology: Topology
    tests: tuple[str, ...]
    attempts: tuple[Attempt, ...] = ()
    answers: tuple[Answer, ...] = ()
    collected_at: float = 0.0
    note: str = ""  # e.g. why only a lower witness is possible


class Expected(Record, kw_only=True):
    """The plan's promise for one job: these tests on these ranks, for these claims."""

    job: str
    topology: Topology
    tests: tuple[str, ...]
    claims: tuple[str, ...]
    timeout_min: int = 10


class RunRecord(Record, kw_only=True):
    """Head of a run directory (run.json): what was planned, from which tree, before anything ran."""

    schema: str = SCHEMA
    recorder: int = RECORDER_VERSION
    run: str
    nonce: str
    created_at: float
    commit: str = ""  # '' where there is no git
    dirty: bool = False
    dirty_files: tuple[str, ...] = ()
    snapshot: str  # SHA-256 of the canonical manifest
    manifest: dict[str, str]  # path -> SHA-256 of every file in the snapshot
    claims: tuple[Claim, ...]
    expected: tuple[Expected, ...]
    inputs: dict[str, dict[str, str]] = {}  # input -> file -> SHA-256 as resolved
    cluster: str = ""
    sabotage: str = ""  # '' for the real code, else the sabotage's id: never a verdict on the real code
    sabotage_claims: tuple[str, ...] = ()


class ClaimStatus(Record, kw_only=True):
    """What the ledger says of one claim on one topology at one tree: one cell of the matrix."""

    id: str
    text: str
    topology: str
    state: State
    reason: str = ""
    device: str = ""
    ranks: int = 0
    transport: str = ""
    scope: str = ""
    witness: Literal["", "T0", "T1", "T2"] = ""
    sealed: bool = False
    kill_rate: float | None = None
    kills_sealed: bool = True  # whether a listed key signed all that the rate is made of
    toolchain: str = ""
    run: str = ""
    expired_by: str = ""


def encode(value: Any) -> bytes:
    """Canonical JSON: sorted keys, no spaces beyond msgspec's, one line."""
    return msgspec.json.encode(value, order="sorted")


def decode(data: bytes | str, kind: type) -> Any:
    """Read one record of `kind`. Raises SchemaError for an unknown major version or a malformed record."""
    raw = _loads(data)
    check_schema(raw)
    try:
        return msgspec.convert(raw, kind)
    except msgspec.ValidationError as error:
        raise SchemaError(f"not a {getattr(kind, '__name__', kind)}: {error}") from error


def _loads(data: bytes | str) -> Any:
    try:
        return msgspec.json.decode(data)
    except msgspec.DecodeError as error:
        raise SchemaError(f"not JSON: {error}") from error


def check_schema(raw: Any) -> None:
    """Refuse another major version, naming found and required."""
    found = raw.get("schema", SCHEMA) if isinstance(raw, dict) else SCHEMA
    if str(found).split(".")[0] != SCHEMA.split(".")[0]:
        raise SchemaError(f"schema {found} found, {SCHEMA.split('.')[0]}.x required; upgrade or re-export")


def digest(value: Any) -> str:
    """SHA-256 (hex) of a record's canonical JSON, or of bytes as they are."""
    return hashlib.sha256(value if isinstance(value, bytes) else encode(value)).hexdigest()


def worst(outcomes) -> str:
    """Worst outcome wins; nothing at all is 'lost'."""
    found = set(outcomes)
    return next((outcome for outcome in OUTCOMES if outcome in found), "lost")
