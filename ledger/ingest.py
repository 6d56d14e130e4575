"""Writes one run into the ledger: idempotent, in one transaction, one writer at a time, rebuildable at any time.

A run may be ingested while jobs are still out; each ingest that finds something new is a *generation* of the run, and
the latest counts. What a node wrote may grow between generations; what was ingested once may never change.
"""

from __future__ import annotations

import hashlib
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from ledger.chain import Content, append_entry, attempt_row, digest_rows, head_of, insert, insert_facts, last_known
from ledger.db import LedgerError, open_ledger, translated
from ledger.facts import Fact
from ledger.judge import facts
from ledger.record import JobRecord, Record, digest, encode
from ledger.runs import IngestError, Run, Stream, TestRow, detail_of, read_run
from ledger.state import ledger_path

LOCK_TIMEOUT_S = 600.0


class Ingested(Record, kw_only=True):
    """What an ingest did. Zero counts mean that everything was known already."""

    run: str
    generation: int
    jobs: int = 0
    streams: int = 0
    records: int = 0
    waiting: tuple[str, ...] = ()  # planned jobs that are not collected yet
    faults: tuple[str, ...] = ()  # damage found while reading, each named
    facts: tuple[Fact, ...] = ()


def ingest(run_dir: Path | str, path: Path | str | None = None) -> Ingested:
    """Ingest a run directory. Raises IngestError or LedgerError, and then nothing was written."""
    run = read_run(run_dir)
    with writing(path) as connection:
        return _Writer(connection, run, Path(run_dir)).write()


@contextmanager
def writing(path: Path | str | None = None) -> Iterator[sqlite3.Connection]:
    """One writer under the file lock, one transaction: all of it, or nothing."""
    from filelock import FileLock, Timeout

    path = ledger_path(path)
    with translated(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with FileLock(f"{path}.lock", timeout=LOCK_TIMEOUT_S):
                db = open_ledger(path)
                with closing(db.conn), db.atomic():
                    yield db.conn
        except Timeout as error:
            raise LedgerError(f"another ingest has held {path}.lock for {LOCK_TIMEOUT_S:.0f} s; wait for it") from error


class _Writer:
    """One run on its way into the ledger."""

    def __init__(self, connection: sqlite3.Connection, run: Run, folder: Path):
        self.db, self.run, self.folder = connection, run, folder
        self.id = run.record.run
        self.content = Content()
        self.blobs: dict[str, int] = {}  # digest -> row
        self.tests: dict[str, int] = {}  # name -> row

    def write(self) -> Ingested:
        known = self.db.execute("SELECT digest FROM run WHERE run = ?", (self.id,)).fetchone()
        self.check_identity(known)
        last = self.db.execute("SELECT max(generation) FROM entry WHERE run = ? AND source = ''", (self.id,)).fetchone()
        self.generation = 0 if last[0] is None else last[0] + 1
        jobs, streams = self.new_jobs(), self.new_streams()
        judged = facts(self.run, last_known(self.db))
        if known and not jobs and not streams and not self.is_judged_anew(judged):
            return self.report((), 0, 0)
        if not known:
            self.insert_run()
        for job in jobs:
            self.insert_job(job)
        count = sum(self.insert_stream(stream) for stream in streams)
        insert_facts(self.db, judged, "", self.generation, self.closure)
        self.content.add("facts", judged)
        append_entry(self.db, self.id, "", self.generation, self.run.faults, self.content.digest())
        return self.report(tuple(judged), len(jobs), len(streams), count)

    def is_judged_anew(self, judged: list[Fact]) -> bool:
        """Whether a later version of the judge says what is not stored; failures are charged by what was known then."""
        query = "SELECT body FROM fact WHERE run = ? AND source = '' AND generation = ?"
        stored = {body for (body,) in self.db.execute(query, (self.id, self.generation - 1))}
        return any(fact.outcome != "failed" and encode(fact).decode() not in stored for fact in judged)

    def check_identity(self, known) -> None:
        head = self.run.record
        if known and known[0] != digest(head):
            raise IngestError(f"run {self.id} is in the ledger with another run.json; a run's head never changes")
        twin = self.db.execute("SELECT run FROM run WHERE nonce = ? AND run != ?", (head.nonce, self.id)).fetchone()
        if twin:
            raise IngestError(f"run {self.id} has the nonce of run {twin[0]}: a replay under another name is refused")

    def new_jobs(self) -> list[JobRecord]:
        rows = self.db.execute("SELECT job, digest FROM job WHERE run = ? ORDER BY generation", (self.id,))
        known = dict(rows.fetchall())
        return [job for name, job in self.run.jobs.items() if known.get(name) != digest(job)]

    def new_streams(self) -> list[Stream]:
        query = "SELECT job, attempt, rank, size_bytes, digest FROM stream WHERE run = ? ORDER BY size_bytes"
        known = {row[:3]: row[3:] for row in self.db.execute(query, (self.id,))}
        found = []
        for stream in self.run.streams:
            key = (stream.job, stream.attempt, stream.rank)
            if key not in known:
                found.append(stream)
            elif known.pop(key) != (stream.size_bytes, stream.digest):
                self.check_grown(stream)
                found.append(stream)
            else:
                continue
        self.check_gone({key for key in known if key not in {(s.job, s.attempt, s.rank) for s in self.run.streams}})
        return found

    def check_grown(self, stream: Stream) -> None:
        """The ingested bytes must still be the beginning of the file."""
        name = f"{stream.job} attempt {stream.attempt} rank {stream.rank}"
        file = self.folder / "jobs" / stream.job / "attempts" / str(stream.attempt) / f"rank{stream.rank}.jsonl"
        query = "SELECT size_bytes, digest FROM stream WHERE run = ? AND job = ? AND attempt = ? AND rank = ?"
        data = file.read_bytes()
        for size, known in self.db.execute(query, (self.id, stream.job, stream.attempt, stream.rank)):
            if hashlib.sha256(data[:size]).hexdigest() != known:
                raise IngestError(f"the records of {name} changed after they were ingested; restore the run directory")

    def check_gone(self, gone: set) -> None:
        if gone:
            job, attempt, rank = sorted(gone)[0]
            raise IngestError(f"the records of {job} attempt {attempt} rank {rank} are gone; restore the run directory")

    # --- rows -------------------------------------------------------------------------------------------------

    def insert_run(self) -> None:
        head = self.run.record
        tree = self.blobs[self.blob(encode(self.run.tree))]
        row = (self.id, head.nonce, head.created_at, head.snapshot, head.commit, int(head.dirty), head.sabotage,
               head.recorder, head.cluster, tree, encode(head).decode(), digest(head))  # fmt: skip
        insert(self.db, "run", row)
        self.content.add("run", digest(head), digest(self.run.tree))

    def insert_job(self, job: JobRecord) -> None:
        insert(self.db, "job", (self.id, job.job, self.generation, job.scheduler, job.collected_at,
                                encode(job).decode(), digest(job)))  # fmt: skip
        for attempt in job.attempts:
            insert(self.db, "attempt", (self.id, job.job, self.generation, *attempt_row(attempt)))
        self.content.add("job", job.job, digest(job))

    def insert_stream(self, stream: Stream) -> int:
        rows = [self.row(line, row, begun) for line, row, begun in stream.tests]
        head, rows_digest = encode(head_of(stream)), digest_rows(rows)
        cursor = insert(self.db, "stream", (None, self.id, stream.job, stream.attempt, stream.rank, self.generation,
                                            stream.size_bytes, stream.digest, head.decode(), rows_digest))  # fmt: skip
        number = cursor.lastrowid
        self.db.executemany("INSERT INTO record VALUES (?,?,?,?,?,?,?,?,?,?)",
                            [(number, row[0], self.test(row[1]), *row[2:7], self.closure(row[7]), self.blobs[row[8]])
                             for row in rows])  # fmt: skip
        self.insert_measures(number, stream)
        self.content.add("stream", stream.job, stream.attempt, stream.rank, stream.digest, digest(head), rows_digest)
        return len(rows)

    def row(self, line: int, row: TestRow, begun: float | None) -> tuple:
        closure, detail = self.run.closure_of(row), detail_of(row)
        return (line, row.test, row.outcome, row.duration_s, row.time, begun, row.message, closure, self.blob(detail))

    def insert_measures(self, number: int, stream: Stream) -> None:
        for line, row, _ in stream.tests:
            for place, m in enumerate(row.measures):
                insert(self.db, "measure", (number, line, place, m.name, m.unit, m.direction, m.shape, m.dtype,
                                            encode(m.samples).decode(), encode(m.context).decode()))  # fmt: skip

    def blob(self, body: bytes) -> str:
        """Store a text once; returns its digest, and `blobs` then holds its row."""
        name = hashlib.sha256(body).hexdigest()
        if name not in self.blobs:
            found = self.db.execute("SELECT id FROM blob WHERE digest = ?", (name,)).fetchone()
            self.blobs[name] = found[0] if found else insert(self.db, "blob", (None, name, body.decode())).lastrowid
        return name

    def closure(self, name: str) -> int:
        if name not in self.blobs:
            self.blob(encode(self.run.closures[name]))
        return self.blobs[name]

    def test(self, name: str) -> int:
        if name not in self.tests:
            found = self.db.execute("SELECT id FROM test WHERE name = ?", (name,)).fetchone()
            self.tests[name] = found[0] if found else insert(self.db, "test", (None, name)).lastrowid
        return self.tests[name]

    def report(self, judged: tuple[Fact, ...], jobs: int, streams: int, records: int = 0) -> Ingested:
        faults = [*self.run.faults]
        for s in self.run.streams:
            faults += [f"{s.job} attempt {s.attempt} rank {s.rank}: {fault}" for fault in s.faults]
        return Ingested(run=self.id, generation=self.generation, jobs=jobs, streams=streams, records=records,
                        waiting=tuple(self.run.waiting), faults=tuple(faults), facts=judged)  # fmt: skip
