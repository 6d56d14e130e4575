"""Reads a run back from the ledger's rows: the same value that reading its directory gave.

Export and `verify` start here, so that neither needs the run directory.
"""

from __future__ import annotations

import json
import sqlite3

import msgspec

from ledger.db import LedgerError
from ledger.record import End, Environment, JobRecord, Measure, Record, RunRecord, Start, decode
from ledger.runs import Run, Stream, TestRow


class Head(Record, kw_only=True):
    """What a stream says besides its tests."""

    starts: list[Start]
    environments: list[Environment]
    ends: list[End]
    faults: list[str]
    unfinished: str
    last_time: float
    log: str = ""


def load_run(connection: sqlite3.Connection, run: str) -> Run:
    """The latest generation of a run. Raises LedgerError if the ledger has no such run."""
    row = connection.execute("SELECT record, blob.body FROM run JOIN blob ON blob.id = tree WHERE run = ?", (run,))
    if (found := row.fetchone()) is None:
        raise LedgerError(f"no run {run} in this ledger; `k3-ledger show` lists what there is")
    record = decode(found[0], RunRecord)
    query = "SELECT record FROM job WHERE run = ? ORDER BY generation"
    jobs = {job.job: job for (text,) in connection.execute(query, (run,)) if (job := decode(text, JobRecord))}
    closures: dict[str, dict[str, str]] = {}
    query = """SELECT id, job, attempt, rank, size_bytes, digest, head FROM stream
               WHERE id IN (SELECT max(id) FROM stream WHERE run = ? GROUP BY job, attempt, rank)
               ORDER BY job, attempt, rank"""
    streams = [_stream(connection, row) for row in connection.execute(query, (run,)).fetchall()]
    return Run(record=record, jobs={e.job: jobs[e.job] for e in record.expected if e.job in jobs}, streams=streams,
               tree=json.loads(found[1]), closures=closures, faults=run_faults(connection, run),
               waiting=[e.job for e in record.expected if e.job not in jobs])  # fmt: skip


def run_faults(connection: sqlite3.Connection, run: str) -> list[str]:
    """What was wrong with the run as a whole when it was last ingested."""
    query = "SELECT faults FROM entry WHERE run = ? AND source = '' ORDER BY seq DESC LIMIT 1"
    row = connection.execute(query, (run,)).fetchone()
    return json.loads(row[0]) if row else []


def _stream(connection: sqlite3.Connection, row: tuple) -> Stream:
    number, job, attempt, rank, size, digest, text = row
    head = msgspec.json.decode(text, type=Head)
    fields = {name: getattr(head, name) for name in Head.__struct_fields__}
    return Stream(job=job, attempt=attempt, rank=rank, size_bytes=size, digest=digest,
                  tests=_tests(connection, number), **fields)  # fmt: skip


def _tests(connection: sqlite3.Connection, stream: int) -> list[tuple[int, TestRow, float | None]]:
    query = """SELECT line, test.name, outcome, duration_s, time, begun, message, c.body, d.body FROM record
               JOIN test ON test.id = record.test JOIN blob AS c ON c.id = closure JOIN blob AS d ON d.id = detail
               WHERE stream = ? ORDER BY line"""
    measures = _measures(connection, stream)
    return [(line, TestRow(test=test, outcome=outcome, duration_s=duration, time=time, message=message,
                           closure=msgspec.Raw(closure.encode()), measures=tuple(measures.get(line, ())),
                           **msgspec.json.decode(detail)), begun)
            for line, test, outcome, duration, time, begun, message, closure, detail
            in connection.execute(query, (stream,))]  # fmt: skip


def _measures(connection: sqlite3.Connection, stream: int) -> dict[int, list[Measure]]:
    found: dict[int, list[Measure]] = {}
    query = """SELECT line, name, unit, direction, shape, dtype, samples, context FROM measure
               WHERE stream = ? ORDER BY line, number"""
    for line, name, unit, direction, shape, dtype, samples, context in connection.execute(query, (stream,)):
        measure = Measure(name=name, unit=unit, direction=direction, shape=shape, dtype=dtype,
                          samples=tuple(json.loads(samples)), context=json.loads(context))  # fmt: skip
        found.setdefault(line, []).append(measure)
    return found
