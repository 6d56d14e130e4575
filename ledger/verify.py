"""Looks for lies: in the ledger file, in published evidence, and in the run directories that are still here.

Each check yields what is wrong, by name, in the order in which it was looked for; the command prints the first.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import sqlite3
import time
from collections.abc import Iterator
from pathlib import Path

from ledger import chain, evidence, export, signing
from ledger.chain import attempt_row
from ledger.db import LedgerError, assert_guards, connect_read
from ledger.judge import facts
from ledger.load import load_run
from ledger.memory import Memory
from ledger.record import JobRecord, RunRecord, SchemaError, decode, digest, encode
from ledger.schema import MIGRATIONS

CLOCK_SKEW_S = 600.0


def lies(root: Path, ledger: Path | None, runs: Path | None = None, memory: Memory | None = None) -> Iterator[str]:
    """Everything found wrong, first lie first. `ledger` may be None: then only published evidence is looked at.

    What `memory` found clean before, byte for byte, is not looked at again.
    """
    memory = memory or Memory(root)
    yield from published(root, memory)
    if ledger is not None:
        try:
            connection = connect_read(ledger)
        except LedgerError as error:
            yield f"ledger: {error}"
            return
        with contextlib.closing(connection):
            yield from memory.unless_verified("ledger", lambda: memory.of_ledger(ledger), lambda: in_ledger(connection))
            if runs is not None:
                yield from in_directories(connection, runs, memory)


# --- published evidence ---------------------------------------------------------------------------------------


def published(root: Path, memory: Memory | None = None) -> Iterator[str]:
    """Keys, every file's chain, seal and consistency, duplicates between files, and files that are missing."""
    memory, folder = memory or Memory(root), root / "ledger" / "evidence"
    yield from memory.unless_verified("published", lambda: memory.of_folder(folder), lambda: _published(root))


def _published(root: Path) -> Iterator[str]:
    folder = root / "ledger" / "evidence"
    try:
        keys = signing.allowed_keys(root / "ledger" / "keys")
    except signing.SealError as error:
        yield str(error)
        return
    nonces: dict[str, str] = {}
    sealed: dict[str, list[signing.AllowedKey]] = {}
    for path in sorted(folder.glob(f"*{evidence.SUFFIX}")):
        try:
            file = evidence.read(path, keys)
        except (evidence.EvidenceError, SchemaError) as error:
            yield str(error)
            continue
        sealed[file.name] = file.keys
        yield from _of_file(file, nonces)
    yield from _of_indexes(folder, keys, sealed)


def _of_file(file: evidence.File, nonces: dict[str, str]) -> Iterator[str]:
    name, head = file.name, file.run.record
    for keyid in file.unknown:
        yield f"{name}: signed by {keyid[:12]}, a key that ledger/keys/ does not list"
    if head.created_at > time.time() + CLOCK_SKEW_S:
        yield f"{name}: a run of the future"
    if (twin := nonces.setdefault(head.nonce, name)) != name:
        yield f"{name}: has the nonce of {twin}: a replay under another name"
    yield from (f"{name}: {fault}" for fault in file.run.faults)
    for fact in facts(file.run):
        if fact.outcome == "unproven" and fact.reason.startswith("scheduler disagrees"):
            yield f"{name}: {fact.claim} on {fact.topology}: {fact.reason}"


def _of_indexes(
    folder: Path, keys: dict[str, signing.AllowedKey], sealed: dict[str, list[signing.AllowedKey]]
) -> Iterator[str]:
    """Every index is of the key in its name, lists what is there, and what a key sealed is listed by that key."""
    listed: dict[str, set[str]] = {}  # name of an index -> files
    for path in sorted(folder.glob("index-*.json")):
        try:
            found = export.read_index(path)
            envelope = json.loads(path.read_bytes())["envelope"]
            good, unknown = signing.sealed_by(envelope, keys)
        except (evidence.EvidenceError, signing.SealError, ValueError) as error:
            yield f"{path.name}: {error}"
            continue
        if unknown:
            yield f"{path.name}: signed by {unknown[0][:12]}, a key that ledger/keys/ does not list"
        owners = {export.index_name(keyid) for keyid in [*(key.keyid for key in good), *unknown]}
        if path.name not in (owners or {export.index_name("")}):
            yield f"{path.name}: not signed by the key it is named after"
        for name, value in found.items():
            yield from _of_listed(folder / name, value, path.name)
        listed[path.name] = set(found)
    for path in sorted(folder.glob(f"*{evidence.SUFFIX}")):
        if not any(path.name in names for names in listed.values()):
            yield f"{path.name}: no index lists it; publish with `k3-ledger export`"
        for key in sealed.get(path.name, ()):
            if path.name not in listed.get(export.index_name(key.keyid), ()):
                yield f"{path.name}: sealed by {key.label}, and no index of that key lists it"


def _of_listed(path: Path, value: str, index: str) -> Iterator[str]:
    if not path.is_file():
        yield f"{path.name}: {index} lists it and it is gone: evidence was deleted"
    elif hashlib.sha256(path.read_bytes()).hexdigest() != value:
        yield f"{path.name}: not the file that {index} lists"


# --- the ledger file ------------------------------------------------------------------------------------------


def in_ledger(connection: sqlite3.Connection) -> Iterator[str]:
    """Guards, file integrity, chain, every row against the record it is a copy of, and every fact derived again."""
    try:
        assert_guards(connection)
    except LedgerError as error:
        yield f"ledger: {error}"
    yield from _integrity(connection)
    yield from _blobs(connection)
    yield from _chain(connection)
    yield from _runs(connection)
    yield from _jobs(connection)
    yield from _derived(connection)


def _integrity(connection: sqlite3.Connection) -> Iterator[str]:
    for (text,) in connection.execute("PRAGMA integrity_check(3)").fetchall():
        if text != "ok":
            yield f"ledger: the file is damaged: {text}"
    for table, row, parent, _ in connection.execute("PRAGMA foreign_key_check").fetchall():
        yield f"ledger: row {row} of {table} refers to a row of {parent} that is gone"
    wanted = _schema()
    found = dict(connection.execute("SELECT name, sql FROM sqlite_master WHERE type = 'table' AND sql NOT NULL"))
    for name in sorted({*wanted, *found} - {"sqlite_sequence"}):
        if found.get(name) != wanted.get(name):
            yield f"ledger: table {name} is not as the schema has it: its checks may be gone"


def _schema() -> dict[str, str]:
    with contextlib.closing(sqlite3.connect(":memory:")) as memory:
        for script in MIGRATIONS:
            memory.executescript(script)
        return dict(memory.execute("SELECT name, sql FROM sqlite_master WHERE type = 'table'"))


def _blobs(connection: sqlite3.Connection) -> Iterator[str]:
    for number, name, body in connection.execute("SELECT id, digest, body FROM blob"):
        if hashlib.sha256(body.encode()).hexdigest() != name:
            yield f"ledger: blob {number} does not hash to its name: a closure was edited"


def _chain(connection: sqlite3.Connection) -> Iterator[str]:
    """Links in order without a gap, and the content that each entry binds."""
    previous = chain.GENESIS
    query = "SELECT seq, run, source, generation, ingested_at, faults, content, link FROM entry ORDER BY seq"
    seen: set[tuple[str, str, int]] = set()
    for place, (*row, link) in enumerate(connection.execute(query).fetchall(), start=1):
        seq, run, source, generation = row[:4]
        if seq != place:
            yield f"ledger: entry {place} is gone: entries were deleted or renumbered"
            return
        if chain.link(previous, tuple(row)) != link:
            yield f"ledger: entry {seq} (run {run}): the chain is broken: it or one before it was edited or moved"
            return
        if row[4] > time.time() + CLOCK_SKEW_S:
            yield f"ledger: entry {seq} (run {run}) was written in the future"
        yield from _content(connection, run, source, generation, row[6])
        seen.add((run, source, generation))
        previous = link
    yield from _unbound(connection, seen)


def _unbound(connection: sqlite3.Connection, seen: set[tuple[str, str, int]]) -> Iterator[str]:
    for table, source in (("job", "''"), ("stream", "''"), ("fact", "source")):
        for found in connection.execute(f"SELECT DISTINCT run, {source}, generation FROM {table}"):
            if found not in seen:
                yield f"ledger: rows of {table} for run {found[0]} that no entry binds: they were inserted by hand"
    for (run,) in connection.execute("SELECT run FROM run").fetchall():
        if (run, "", 0) not in seen:
            yield f"ledger: run {run} that no entry binds: it was inserted by hand"


def _content(connection: sqlite3.Connection, run: str, source: str, generation: int, bound: str) -> Iterator[str]:
    content = chain.Content()
    if source:
        content.add("evidence", source)
    else:
        yield from _add_run(connection, content, run, generation)
    bodies = connection.execute(
        "SELECT body FROM fact WHERE run = ? AND source = ? AND generation = ? ORDER BY rowid",
        (run, source, generation),
    )
    content.add("facts", [json.loads(body) for (body,) in bodies])
    if content.digest() != bound:
        yield f"ledger: run {run} generation {generation}: its rows are not those that were ingested"


def _add_run(connection: sqlite3.Connection, content: chain.Content, run: str, generation: int) -> Iterator[str]:
    where, values = "WHERE run = ? AND generation = ?", (run, generation)
    if generation == 0:
        query = "SELECT record, blob.body FROM run JOIN blob ON blob.id = tree WHERE run = ?"
        for record, tree in connection.execute(query, (run,)):
            content.add("run", digest(record.encode()), digest(tree.encode()))
    for job, record in connection.execute(f"SELECT job, record FROM job {where} ORDER BY rowid", values):
        content.add("job", job, digest(record.encode()))
    query = f"SELECT id, job, attempt, rank, digest, head, rows_digest FROM stream {where} ORDER BY id"
    for number, job, attempt, rank, name, head, rows_digest in connection.execute(query, values).fetchall():
        if _rows_digest(connection, number) != rows_digest:
            yield f"ledger: {run} {job} attempt {attempt} rank {rank}: its records were edited, added or deleted"
        content.add("stream", job, attempt, rank, name, digest(head.encode()), rows_digest)


def _rows_digest(connection: sqlite3.Connection, stream: int) -> str:
    query = """SELECT line, test.name, outcome, duration_s, time, begun, message, c.digest, d.digest FROM record
               JOIN test ON test.id = record.test JOIN blob AS c ON c.id = closure JOIN blob AS d ON d.id = detail
               WHERE stream = ? ORDER BY line"""
    return chain.digest_rows(connection.execute(query, (stream,)))


def _runs(connection: sqlite3.Connection) -> Iterator[str]:
    query = """SELECT run, nonce, created_at, snapshot, commit_id, dirty, sabotage, recorder, cluster, record, digest
               FROM run"""
    for *columns, text, name in connection.execute(query):
        head = decode(text, RunRecord)
        wanted = [head.run, head.nonce, head.created_at, head.snapshot, head.commit, int(head.dirty), head.sabotage,
                  head.recorder, head.cluster]  # fmt: skip
        if columns != wanted or digest(text.encode()) != name:
            yield f"ledger: run {columns[0]}: its columns do not say what its record says"
        if digest(head.manifest) != head.snapshot:
            yield f"ledger: run {head.run}: the manifest does not hash to the snapshot"
        if head.dirty != bool(head.dirty_files):
            said = "dirty" if head.dirty else "clean"
            yield f"ledger: run {head.run}: says {said} and lists {len(head.dirty_files)} dirty files"
        if head.created_at > time.time() + CLOCK_SKEW_S:
            yield f"ledger: run {head.run}: a run of the future"


def _jobs(connection: sqlite3.Connection) -> Iterator[str]:
    for run, job, generation, text, name in connection.execute(
        "SELECT run, job, generation, record, digest FROM job"
    ).fetchall():
        record = decode(text, JobRecord)
        if digest(text.encode()) != name or (record.run, record.job) != (run, job):
            yield f"ledger: job {job} of {run}: its columns do not say what its record says"
        query = """SELECT number, state, machine_fault, scheduler_id, nodes, exit_code, submitted_at, started_at,
                   ended_at FROM attempt WHERE run = ? AND job = ? AND generation = ? ORDER BY number"""
        found = connection.execute(query, (run, job, generation)).fetchall()
        if found != sorted(map(attempt_row, record.attempts)):
            yield f"ledger: job {job} of {run}: its attempts are not those of its record"


def _derived(connection: sqlite3.Connection) -> Iterator[str]:
    """Judge every run again from its rows; stored facts must be what comes out."""
    for (run,) in connection.execute("SELECT run FROM run").fetchall():
        again = facts(load_run(connection, run))
        query = """SELECT body FROM fact WHERE run = ? AND source = ''
                   AND generation = (SELECT max(generation) FROM fact WHERE run = ? AND source = '')"""
        stored = {row[0] for row in connection.execute(query, (run, run))}
        for fact in again:
            if fact.outcome != "failed" and encode(fact).decode() not in stored:
                cell = f"{fact.claim} on {fact.topology}"
                yield f"ledger: run {run}: {cell} is {fact.outcome} by its records, not as stored"
    yield from _imported(connection)


def _imported(connection: sqlite3.Connection) -> Iterator[str]:
    """Judge every imported file again from its bytes."""
    query = "SELECT body FROM fact WHERE source = ?"
    for run, body, source in connection.execute("SELECT run, body, digest FROM evidence").fetchall():
        if hashlib.sha256(body.encode()).hexdigest() != source:
            yield f"ledger: imported evidence {source[:12]} does not hash to its name"
            continue
        try:
            file = evidence.parse(f"{run}{evidence.SUFFIX}", body.encode(), {})
        except (evidence.EvidenceError, SchemaError) as error:
            yield f"ledger: imported evidence {source[:12]}: {error}"
            continue
        again = {encode(fact).decode() for fact in facts(file.run)}
        for stored in sorted({row[0] for row in connection.execute(query, (source,))} ^ again):
            fact = json.loads(stored)
            cell = f"{fact['claim']} on {fact['topology']}"
            yield f"ledger: {cell}, {fact['outcome']} in run {fact['run']}, is not what its imported file says"


# --- run directories ------------------------------------------------------------------------------------------


def in_directories(connection: sqlite3.Connection, runs: Path, memory: Memory) -> Iterator[str]:
    """Records and logs that still lie in their run directory must be those that were ingested."""
    query = """SELECT run, job, attempt, rank, digest, head, size_bytes FROM stream
               WHERE id IN (SELECT max(id) FROM stream GROUP BY run, job, attempt, rank) ORDER BY id"""
    for run, job, attempt, rank, name, head, size in connection.execute(query):
        folder = runs / run / "jobs" / job / "attempts" / str(attempt)
        if not (runs / run).is_dir():
            continue
        where = f"{run} {job} attempt {attempt}"
        yield from _of_artifact(folder / f"rank{rank}.jsonl", name, size, where, memory)
        if log := json.loads(head).get("log"):
            yield from _of_artifact(folder / f"rank{rank}.log", log, None, where, memory)


def _of_artifact(path: Path, wanted: str, size: int | None, where: str, memory: Memory) -> Iterator[str]:
    if not path.is_file():
        yield f"run directory: {where}: {path.name} is gone"
    elif memory.digest(path) != wanted and not _began_as(path, wanted, size):
        yield f"run directory: {where}: {path.name} was edited after it was ingested"


def _began_as(path: Path, wanted: str, size: int | None) -> bool:
    """Whether the first `size` bytes are those that were ingested: records may have been added since."""
    data = path.read_bytes()
    return size is not None and size <= len(data) and hashlib.sha256(data[:size]).hexdigest() == wanted


def looked_at(root: Path, ledger: Path | None) -> str:
    """What was looked at, in one line."""
    text = f"{len(list((root / 'ledger' / 'evidence').glob('*.jsonl')))} published files"
    if ledger is None:
        return f"{text}; there is no ledger here"
    with contextlib.closing(connect_read(ledger)) as connection:
        runs, records = (connection.execute(f"SELECT count(*) FROM {t}").fetchone()[0] for t in ("run", "record"))
    return f"{text}, {runs} runs with {records} records in the ledger"
