"""Reads one run, from its directory, into memory: what was planned, what the scheduler said, what each rank wrote.

Damage is not an exception where it can be named: a truncated or corrupt line becomes a fault of its stream, and the
judge decides what it costs. Only a file whose meaning is unknown (another schema, no head) refuses the run.
"""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

import msgspec

from ledger.canonical import pieces
from ledger.closure import is_subject, static_files
from ledger.record import (
    End,
    Environment,
    JobRecord,
    Measure,
    Outcome,
    RunRecord,
    SchemaError,
    Start,
    TestStart,
    check_schema,
    decode,
    digest,
    encode,
)

MAX_DURATION_S, MAX_TIME = 1e9, 1e11
RANK_FILE = re.compile(r"^rank(\d+)\.jsonl$")


class IngestError(ValueError):
    """A run that cannot be read; the message names the file and what to do. Nothing was written."""


class TestRow(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="test_end", gc=False):
    """record.TestEnd with its closure left as text: most closures repeat, and are parsed once."""

    __test__ = False
    test: str
    outcome: Outcome
    duration_s: float
    time: float
    message: str = ""
    paths: tuple[str, ...] = ()
    kernels: tuple[str, ...] = ()
    measures: tuple[Measure, ...] = ()
    closure: msgspec.Raw = msgspec.Raw(b"{}")
    data: dict[str, str] = {}


class Stream(msgspec.Struct, kw_only=True):
    """One rank's records of one attempt, in order; `tests` holds (line, row, start time or None)."""

    job: str
    attempt: int
    rank: int
    size_bytes: int
    digest: str
    starts: list[Start] = []
    environments: list[Environment] = []
    ends: list[End] = []
    tests: list[tuple[int, TestRow, float | None]] = []
    unfinished: str = ""  # the test that started last and never ended
    last_time: float = 0.0
    log: str = ""  # SHA-256 of the rank's log, '' if there is none
    faults: list[str] = []


class Run(msgspec.Struct, kw_only=True):
    """Everything known of one run. `tree` holds the hash of each piece of the snapshot's subject."""

    record: RunRecord
    jobs: dict[str, JobRecord]
    streams: list[Stream]
    tree: dict[str, str]
    closures: dict[str, dict[str, str]]  # digest -> closure
    faults: list[str] = []
    waiting: list[str] = []  # jobs planned and not collected yet

    def closure_of(self, row: TestRow) -> str:
        """Digest of a row's closure, parsed once per distinct text."""
        return _closure_digest(bytes(row.closure), self.closures)


_EVENTS = msgspec.json.Decoder(Start | Environment | TestStart | TestRow | End)
_DIGESTS: dict[bytes, str] = {}  # SHA-256 of a closure's text -> digest of its canonical form


def _closure_digest(raw: bytes, closures: dict[str, dict[str, str]]) -> str:
    key = hashlib.sha256(raw).digest()
    known = _DIGESTS.get(key)
    if known is None or known not in closures:
        closure = msgspec.json.decode(raw, type=dict[str, str])
        known = digest(closure)
        closures[known] = closure
        _DIGESTS[key] = known
    return known


def read_run(folder: Path | str) -> Run:
    """Read a run directory. Raises IngestError for a missing or unreadable head, naming the file."""
    folder = Path(folder)
    record = _read(folder / "run.json", RunRecord)
    jobs, streams, waiting = {}, [], []
    for expected in record.expected:
        place = folder / "jobs" / expected.job
        if (place / "job.json").is_file():
            jobs[expected.job] = _read(place / "job.json", JobRecord)
            streams += read_streams(expected.job, place / "attempts")
        else:
            waiting.append(expected.job)
    run = Run(record=record, jobs=jobs, streams=streams, tree={}, closures={}, waiting=waiting)
    _check_head(run, folder)
    _read_tree(run, folder / "snapshot")
    _check_closures(run, folder / "snapshot")
    return run


def _read(path: Path, kind: type):
    try:
        return decode(path.read_bytes(), kind)
    except OSError as error:
        raise IngestError(f"{path.name}: {error.strerror}; a run directory holds {path.name}") from error
    except SchemaError as error:
        raise IngestError(f"{path.parent.name}/{path.name}: {error}") from error


def _check_head(run: Run, folder: Path) -> None:
    record = run.record
    if digest(record.manifest) != record.snapshot:
        run.faults.append("the manifest in run.json does not hash to its snapshot: run.json was edited")
    planned = {expected.job for expected in record.expected}
    present = {path.name for path in (folder / "jobs").iterdir()} if (folder / "jobs").is_dir() else set()
    run.faults += [f"job {job} is in the run directory and not in the plan" for job in sorted(present - planned)]


def _read_tree(run: Run, snapshot: Path) -> None:
    """Hash the pieces of the snapshot, after checking every subject file against the manifest."""
    if not snapshot.is_dir():
        run.faults.append("the snapshot is gone from the run directory: closures cannot be checked against it")
        return
    for path, expected in sorted(run.record.manifest.items()):
        if is_subject(path) or path == "suites/claims.toml":
            _read_file(run, snapshot / path, path, expected)


def _check_closures(run: Run, snapshot: Path) -> None:
    """A passed test depends at least on the module level of all that its file imports: a thinner closure is a lie."""
    reached: dict[str, set[str]] = {}
    seen: set[tuple[str, str]] = set()
    for row in (row for stream in run.streams for _, row, _ in stream.tests if row.outcome == "passed" and run.tree):
        file, name = row.test.split("::")[0], run.closure_of(row)
        if (file, name) in seen or not run.closures[name]:  # an empty one is named by the judge
            continue
        seen.add((file, name))
        if file not in reached:
            reached[file] = {f"{path}::<module>" for path in static_files(snapshot, [file], {})}
        missing = [key.split("::")[0] for key in sorted(reached[file] - run.closures[name].keys())]
        run.faults += [f"{row.test} recorded nothing of {path}, which it imports" for path in missing[:1]]


def _read_file(run: Run, file: Path, path: str, expected: str) -> None:
    if not file.is_file():
        run.faults.append(f"snapshot file {path} is missing")
        return
    data = file.read_bytes()
    if hashlib.sha256(data).hexdigest() != expected:
        run.faults.append(f"snapshot file {path} was edited after planning")
    elif path.endswith(".py"):
        run.tree |= {f"{path}::{name}": value for name, value in file_pieces(data).items()}


_PIECES: dict[bytes, dict[str, str]] = {}


def file_pieces(data: bytes) -> dict[str, str]:
    """Pieces of one file's bytes, remembered; a file that does not parse is one piece of its own."""
    key = hashlib.sha256(data).digest()
    if key not in _PIECES:
        try:
            _PIECES[key] = pieces(data.decode("utf-8"))
        except (SyntaxError, UnicodeDecodeError):
            _PIECES[key] = {"<module>": "unparsable:" + key.hex()[:32]}
    return _PIECES[key]


def read_streams(job: str, attempts: Path) -> list[Stream]:
    """Every rank file of every attempt, in order of attempt and rank."""
    found = []
    folders = [path for path in attempts.iterdir() if path.name.isdigit()] if attempts.is_dir() else []
    for folder in sorted(folders, key=lambda path: int(path.name)):
        for path in folder.iterdir():
            if match := RANK_FILE.match(path.name):
                stream = read_stream(job, int(folder.name), int(match[1]), path.read_bytes())
                log = path.with_suffix(".log")
                stream.log = hashlib.sha256(log.read_bytes()).hexdigest() if log.is_file() else ""
                found.append(stream)
    return sorted(found, key=lambda stream: (stream.attempt, stream.rank))


def read_stream(job: str, attempt: int, rank: int, data: bytes) -> Stream:
    """Parse one rank's lines. A line that is no record becomes a fault that names its number."""
    stream = Stream(
        job=job, attempt=attempt, rank=rank, size_bytes=len(data), digest=hashlib.sha256(data).hexdigest(),
        starts=[], environments=[], ends=[], tests=[], faults=[],
    )  # fmt: skip
    lines = data.split(b"\n")
    if lines[-1]:
        stream.faults.append(f"line {len(lines)} is truncated")
    begun: dict[str, float] = {}
    for number, line in enumerate(lines[:-1], start=1):
        try:
            event = _EVENTS.decode(line)
        except (msgspec.ValidationError, msgspec.DecodeError) as error:
            check_line_schema(line, job, rank, number)
            stream.faults.append(f"line {number} is not a record: {error}")
            continue
        add_event(stream, number, event, begun)
    if stream.starts:
        _check_version(stream)
    stream.unfinished = next(reversed(begun), "")
    return stream


def _check_version(stream: Stream) -> None:
    try:
        check_schema({"schema": stream.starts[0].schema})
    except SchemaError as error:
        raise IngestError(f"{stream.job} rank {stream.rank}: {error}") from error


def check_line_schema(line: bytes, job: str, rank: int, number: int) -> None:
    """Refuse a line of another major version: its meaning is unknown, so the run cannot be judged."""
    try:
        check_schema(msgspec.json.decode(line))
    except SchemaError as error:
        raise IngestError(f"{job} rank {rank} line {number}: {error}") from error
    except msgspec.DecodeError:
        return


def add_event(stream: Stream, number: int, event, begun: dict[str, float]) -> None:
    """File one event of a stream; `begun` holds the tests that have started and not ended."""
    if isinstance(event, TestRow):
        if not (0 <= event.duration_s < MAX_DURATION_S and 0 < event.time < MAX_TIME):
            stream.faults.append(f"line {number}: duration {event.duration_s} s at {event.time} is not a time")
            return
        stream.tests.append((number, event, begun.pop(event.test, None)))
    elif isinstance(event, TestStart):
        begun[event.test] = event.time
    elif isinstance(event, Start):
        stream.starts.append(event)
        if number != 1:
            stream.faults.append(f"line {number} is a start line; it must be the first")
    elif isinstance(event, Environment):
        stream.environments.append(event)
        return
    else:
        stream.ends.append(event)
    if event.time < stream.last_time - 0.001:
        stream.faults.append(f"line {number} goes back in time: lines were reordered or edited")
    stream.last_time = event.time


def detail_of(row: TestRow) -> bytes:
    """What a row says besides outcome and closure, as canonical JSON: few distinct values per run."""
    return encode({"paths": row.paths, "kernels": row.kernels, "data": row.data})
