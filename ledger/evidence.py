"""Evidence files: one run as chained lines under one envelope, written by export and read by everyone.

A line is {"entry": ..., "link": ...}; a link is the digest of the previous link and the entry's own bytes, so that no
line can be edited, dropped or moved. The last line is a DSSE envelope whose statement names the last link.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from ledger.chain import GENESIS, head_of
from ledger.judge import facts
from ledger.load import Head
from ledger.record import SCHEMA, JobRecord, RunRecord, SchemaError, check_schema, digest, encode
from ledger.runs import Run, Stream, TestRow
from ledger.signing import AllowedKey, SealError, allowed_keys, opened, seal, sealed_by, statement
from ledger.source import Facts, Sourced

PREDICATE_TYPE = "https://k3-proving-ground.dev/evidence/v1"
SUFFIX = ".jsonl"


class EvidenceError(ValueError):
    """An evidence file that is damaged or forged; the message names the file, the line and the lie."""


class Line(msgspec.Struct):
    entry: msgspec.Raw
    link: str


class File(msgspec.Struct, kw_only=True):
    """One evidence file as read and checked."""

    name: str
    run: Run
    head_link: str
    envelope: dict[str, Any]
    keys: list[AllowedKey] = []
    unknown: list[str] = []


# --- writing --------------------------------------------------------------------------------------------------


def dump(run: Run, signer=None) -> bytes:
    """The file of a (scrubbed) run: the same bytes for the same run and key."""
    link, lines = GENESIS, []
    for entry in _entries(run):
        raw = encode(entry)
        link = _link(link, raw)
        lines.append(b'{"entry":' + raw + b',"link":"' + link.encode() + b'"}')
    predicate = {"schema": SCHEMA, "recorder": run.record.recorder, "entries": len(lines)}
    subjects = {f"run/{run.record.run}": link, "snapshot": run.record.snapshot}
    lines.append(encode({"envelope": seal(statement(subjects, predicate, PREDICATE_TYPE), signer)}))
    return b"\n".join(lines) + b"\n"


def _link(previous: str, raw: bytes) -> str:
    return hashlib.sha256(previous.encode() + raw).hexdigest()


def _entries(run: Run) -> Iterator[dict]:
    yield {"kind": "run", "schema": SCHEMA, "record": run.record, "faults": run.faults}
    for file, names in _by_file(run.tree).items():
        yield {"kind": "tree", "file": file, "pieces": names}
    for job in sorted(run.jobs.values(), key=lambda job: job.job):
        yield {"kind": "job", "record": job}
    rows = [row for stream in run.streams for _, row, _ in stream.tests]
    for name in sorted({run.closure_of(row) for row in rows}):
        closure = run.closures[name]
        same = {key for key, value in closure.items() if run.tree.get(key) == value}
        yield {
            "kind": "closure",
            "digest": name,
            "same": {file: list(names) for file, names in _by_file(dict.fromkeys(same)).items()},
            "other": {key: value for key, value in closure.items() if key not in same},
        }
    for stream in sorted(run.streams, key=lambda s: (s.job, s.attempt, s.rank)):
        yield {"kind": "stream", "job": stream.job, "attempt": stream.attempt, "rank": stream.rank,
               "size_bytes": stream.size_bytes, "digest": stream.digest, "head": head_of(stream)}  # fmt: skip
        for line, row, begun in stream.tests:
            fields = {name: getattr(row, name) for name in row.__struct_fields__ if name != "closure"}
            yield {"kind": "record", "line": line, "begun": begun, "closure": run.closure_of(row), "row": fields}


def _by_file(pieces: dict[str, Any]) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for key in sorted(pieces):
        file, _, name = key.partition("::")
        found.setdefault(file, {})[name] = pieces[key]
    return found


# --- reading --------------------------------------------------------------------------------------------------


def read(path: Path, keys: dict[str, AllowedKey]) -> File:
    """Read and check one file: chain, envelope, signatures, contents. Raises EvidenceError naming the first lie."""
    return parse(path.name, path.read_bytes(), keys)


def parse(name: str, data: bytes, keys: dict[str, AllowedKey]) -> File:
    """The same, of a file's bytes."""
    lines = data.split(b"\n")
    if len(lines) < 3 or lines[-1]:
        raise EvidenceError(f"{name}: it is cut short; restore the file")
    link, entries = GENESIS, []
    for number, text in enumerate(lines[:-2], start=1):
        try:
            line = msgspec.json.decode(text, type=Line)
        except msgspec.MsgspecError as error:
            raise EvidenceError(f"{name} line {number}: not an entry: {error}") from error
        link = _link(link, bytes(line.entry))
        if link != line.link:
            raise EvidenceError(f"{name} line {number}: the chain is broken: this line or one before it was edited")
        entries.append(line.entry)
    envelope = _envelope(name, lines[-2], link, len(entries))
    try:
        good, unknown = sealed_by(envelope, keys)
    except (SealError, ValueError, KeyError) as error:
        raise EvidenceError(f"{name}: {error}") from error
    run = _rebuild(name, entries)
    if name != file_name(run):
        raise EvidenceError(f"{name}: it holds run {run.record.run}; a file is named after its run")
    _check_statement(name, envelope, run)
    return File(name=name, run=run, head_link=link, envelope=envelope, keys=good, unknown=unknown)


def seals_of(data: bytes, keys: dict[str, AllowedKey]) -> list[AllowedKey]:
    """The allowed keys that sealed a file whose chain was checked before."""
    return sealed_by(msgspec.json.decode(data.rstrip(b"\n").split(b"\n")[-1])["envelope"], keys)[0]


def file_name(run: Run) -> str:
    return run.record.run + SUFFIX


def _envelope(name: str, text: bytes, link: str, count: int) -> dict[str, Any]:
    try:
        envelope = msgspec.json.decode(text)["envelope"]
        found = opened(envelope)
    except (msgspec.MsgspecError, KeyError, TypeError, SealError) as error:
        raise EvidenceError(f"{name}: its last line is no envelope: {error}") from error
    links = [s["digest"]["sha256"] for s in found["subject"] if s["name"].startswith("run/")]
    if found["predicateType"] != PREDICATE_TYPE or found["predicate"].get("entries") != count or links != [link]:
        raise EvidenceError(f"{name}: its envelope is about other content: lines were dropped, added or exchanged")
    return envelope


def _check_statement(name: str, envelope: dict, run: Run) -> None:
    subjects = {s["name"]: s["digest"]["sha256"] for s in opened(envelope)["subject"]}
    if f"run/{run.record.run}" not in subjects or subjects.get("snapshot") != run.record.snapshot:
        raise EvidenceError(f"{name}: its envelope names another run or snapshot")


def _rebuild(name: str, entries: list[msgspec.Raw]) -> Run:
    try:
        return _Builder().build(entries)
    except (msgspec.MsgspecError, KeyError, TypeError, IndexError, SchemaError) as error:
        raise EvidenceError(f"{name}: an entry does not hold what its kind says: {error}") from error


class _Builder:
    """Puts a run together from its entries."""

    def __init__(self) -> None:
        self.tree: dict[str, str] = {}
        self.jobs: dict[str, JobRecord] = {}
        self.streams: list[Stream] = []
        self.closures: dict[str, dict[str, str]] = {}
        self.texts: dict[str, msgspec.Raw] = {}

    def build(self, entries: list[msgspec.Raw]) -> Run:
        head = msgspec.json.decode(entries[0])
        check_schema(head)
        record = msgspec.convert(head["record"], RunRecord)
        for raw in entries[1:]:
            entry = msgspec.json.decode(raw)
            getattr(self, f"add_{entry['kind']}")(entry)
        if digest(record.manifest) != record.snapshot:
            raise SchemaError("the manifest does not hash to the snapshot")
        waiting = [e.job for e in record.expected if e.job not in self.jobs]
        return Run(record=record, jobs=self.jobs, streams=self.streams, tree=self.tree, closures=self.closures,
                   faults=list(head["faults"]), waiting=waiting)  # fmt: skip

    def add_tree(self, entry: dict) -> None:
        self.tree |= {f"{entry['file']}::{name}": value for name, value in entry["pieces"].items()}

    def add_job(self, entry: dict) -> None:
        job = msgspec.convert(entry["record"], JobRecord)
        self.jobs[job.job] = job

    def add_closure(self, entry: dict) -> None:
        keys = [f"{file}::{name}" for file, names in entry["same"].items() for name in names]
        closure = {key: self.tree[key] for key in keys} | entry["other"]
        if digest(closure) != entry["digest"]:
            raise SchemaError(f"closure {entry['digest'][:12]} does not hash to its name")
        self.closures[entry["digest"]] = closure
        self.texts[entry["digest"]] = msgspec.Raw(encode(closure))

    def add_stream(self, entry: dict) -> None:
        head = msgspec.convert(entry["head"], Head)
        fields = {name: getattr(head, name) for name in Head.__struct_fields__}
        self.streams.append(Stream(job=entry["job"], attempt=entry["attempt"], rank=entry["rank"], tests=[],
                                   size_bytes=entry["size_bytes"], digest=entry["digest"], **fields))  # fmt: skip

    def add_record(self, entry: dict) -> None:
        fields = {**entry["row"], "kind": "test_end"}
        row = msgspec.structs.replace(msgspec.convert(fields, TestRow), closure=self.texts[entry["closure"]])
        self.streams[-1].tests.append((entry["line"], row, entry["begun"]))


def read_folder(folder: Path) -> list[File]:
    """Every evidence file of a folder, by name, checked against the keys beside it (`../keys`)."""
    keys = allowed_keys(Path(folder).parent / "keys")
    return [read(path, keys) for path in sorted(Path(folder).glob(f"*{SUFFIX}"))]


def load_folder(folder: Path, into: Facts) -> None:
    """Judge every run of a folder and add what they say."""
    known: dict[tuple[str, str], frozenset[str]] = {}
    for file in sorted(read_folder(folder), key=lambda file: file.run.record.created_at):
        labels = tuple(key.label for key in file.keys)
        clusters = tuple(key.cluster for key in file.keys)
        for fact in facts(file.run, known):
            into.add([Sourced(fact=fact, keys=labels, clusters=clusters)])
            if fact.outcome == "passed":
                known[fact.claim, fact.topology] = frozenset(file.run.closures[fact.closure])
        into.closures |= file.run.closures
