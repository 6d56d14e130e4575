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
from ledger.source import Sourced

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
    """The run in order; a closure is written as places in the tree's sorted keys, a row as what is not empty."""
    yield {"kind": "run", "schema": SCHEMA, "record": run.record, "faults": run.faults}
    names = sorted({run.closure_of(row) for stream in run.streams for _, row, _ in stream.tests})
    tree = _needed(run, names)
    for file, found in _by_file(tree).items():
        yield {"kind": "tree", "file": file, "pieces": found}
    for job in sorted(run.jobs.values(), key=lambda job: job.job):
        yield {"kind": "job", "record": job}
    place_of = {key: place for place, key in enumerate(sorted(tree))}
    for name in names:
        closure = run.closures[name]
        other = {key: value for key, value in closure.items() if tree.get(key) != value}
        same = sorted(place_of[key] for key in closure if key not in other)
        yield {"kind": "closure", "digest": name, "same": spans(same), "other": other}
    numbers = {name: number for number, name in enumerate(names)}
    for stream in sorted(run.streams, key=lambda s: (s.job, s.attempt, s.rank)):
        yield {"kind": "stream", "job": stream.job, "attempt": stream.attempt, "rank": stream.rank,
               "size_bytes": stream.size_bytes, "digest": stream.digest, "head": head_of(stream)}  # fmt: skip
        for line, row, begun in stream.tests:
            fields = {
                name: value for name in row.__struct_fields__ if name != "closure" and (value := getattr(row, name))
            }
            yield {
                "kind": "record",
                "line": line,
                "begun": begun,
                "closure": numbers[run.closure_of(row)],
                "row": fields,
            }


def _needed(run: Run, names: list[str]) -> dict[str, str]:
    """The part of the tree that verdicts need: what closures name, and what a crash is charged to if there was one."""
    used = set().union(*(run.closures[name] for name in names)) if names else set()
    planned = sum(len(e.tests) * e.topology.ranks for e in run.record.expected if e.job in run.jobs)
    attempts = {(stream.job, stream.attempt) for stream in run.streams}
    rows = sum(len(stream.tests) for stream in run.streams)
    if rows < planned or len(attempts) > len(run.jobs) or not all(run.closures[name] for name in names):
        files = {test.split("::")[0] for e in run.record.expected for test in e.tests}
        crash = {key for key in run.tree if key.split("::")[0] in files or not run.record.sabotage}
        used |= crash
    return {key: value for key, value in run.tree.items() if key in used}


def spans(places: list[int]) -> str:
    """[0, 1, 2, 5] -> '0-2,5'."""
    found: list[list[int]] = []
    for place in places:
        if found and found[-1][1] == place - 1:
            found[-1][1] = place
        else:
            found.append([place, place])
    return ",".join(f"{low}-{high}" if high > low else f"{low}" for low, high in found)


def places(text: str) -> list[int]:
    """'0-2,5' -> [0, 1, 2, 5]."""
    pairs = (part.partition("-") for part in text.split(",") if part)
    return [place for low, _, high in pairs for place in range(int(low), int(high or low) + 1)]


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


def content(data: bytes) -> Run:
    """The run in a file that was checked when it was taken in."""
    lines = data.rstrip(b"\n").split(b"\n")[:-1]
    return _Builder().build([msgspec.json.decode(text, type=Line).entry for text in lines])


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
    except (msgspec.MsgspecError, AttributeError, KeyError, TypeError, IndexError, ValueError) as error:
        raise EvidenceError(f"{name}: an entry does not hold what its kind says: {error}") from error


class _Builder:
    """Puts a run together from its entries."""

    def __init__(self) -> None:
        self.tree: dict[str, str] = {}
        self.jobs: dict[str, JobRecord] = {}
        self.streams: list[Stream] = []
        self.closures: dict[str, dict[str, str]] = {}
        self.texts: list[msgspec.Raw] = []
        self.keys: list[str] = []

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
        if len(self.keys) != len(self.tree):
            self.keys = sorted(self.tree)
        closure = {key: self.tree[key] for key in (self.keys[place] for place in places(entry["same"]))}
        closure |= entry["other"]
        if digest(closure) != entry["digest"]:
            raise SchemaError(f"closure {entry['digest'][:12]} does not hash to its name")
        self.closures[entry["digest"]] = closure
        self.texts.append(msgspec.Raw(encode(closure)))

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


def judge_folder(folder: Path) -> tuple[list[Sourced], dict[str, dict[str, str]]]:
    """Judge every run of a folder, oldest first; returns facts and the closures they name."""
    found: list[Sourced] = []
    closures: dict[str, dict[str, str]] = {}
    known: dict[tuple[str, str], frozenset[str]] = {}
    for file in sorted(read_folder(folder), key=lambda file: (file.run.record.created_at, file.name)):
        labels = tuple(key.label for key in file.keys)
        clusters = tuple(key.cluster for key in file.keys)
        judged = facts(file.run, known)
        found += [Sourced(fact=fact, keys=labels, clusters=clusters) for fact in judged]
        closures |= file.run.closures
        known |= {(f.claim, f.topology): frozenset(closures[f.closure]) for f in judged if f.outcome == "passed"}
    return found, closures
