"""One run as the ledger holds it: head, jobs with every attempt, outcomes per test, measures, what the chain says."""

from __future__ import annotations

import json
import sqlite3

import msgspec

from ledger.db import LedgerError
from ledger.output import table


def latest(connection: sqlite3.Connection, count: int = 30) -> list[dict]:
    """The latest runs, newest first; `imported` is the beginning of the digest of the evidence file it came in."""
    return _dicts(connection, LATEST, count)


def one_run(connection: sqlite3.Connection, prefix: str) -> dict:
    """Everything about one run, of this ledger or imported. Raises LedgerError if the prefix names none or several."""
    rows = connection.execute(NAMED, (prefix,)).fetchall()
    names = sorted({row[0] for row in rows})
    if len(names) != 1:
        text = ", ".join(names[:5]) or "none"
        raise LedgerError(f"{prefix!r} names {len(names)} runs ({text}); give more of the id, see `k3-ledger show`")
    run, source, text = rows[0]
    return imported(connection, source, text) if source else _own(connection, run, json.loads(text))


def _own(connection: sqlite3.Connection, run: str, head: dict) -> dict:
    return _head(head) | {
        "attempts": _dicts(connection, JOBS, run),
        "outcomes": _dicts(connection, OUTCOMES, run),
        "measures": _dicts(connection, MEASURES, run),
        "facts": _dicts(connection, FACTS, run, ""),
        "faults": _faults(connection, run),
    }


def _head(head: dict) -> dict:
    names = ("run", "created_at", "commit", "dirty_files", "snapshot", "sabotage")
    return {name: head[name] for name in names} | {"planned_jobs": len(head["expected"])}


def imported(connection: sqlite3.Connection, source: str, body: str) -> dict:
    """The same of a run that came in an evidence file: read from the file's own lines."""
    from ledger.evidence import content

    run = content(body.encode())
    rows = [(stream, row) for stream in run.streams for _, row, _ in stream.tests]
    return _head(msgspec.to_builtins(run.record)) | {
        "imported": source,
        "attempts": [_attempt(job.job, attempt) for job in run.jobs.values() for attempt in job.attempts],
        "outcomes": _outcomes(rows),
        "measures": [_measure(stream, row, measure) for stream, row in rows for measure in row.measures],
        "facts": _dicts(connection, FACTS, run.record.run, source),
        "faults": run.faults,
    }


def _attempt(job: str, a) -> dict:
    return {"job": job, "attempt": a.number, "state": a.state, "machine_fault": int(a.machine_fault),
            "scheduler_id": a.scheduler_id, "nodes": ",".join(a.nodes), "exit_code": a.exit_code,
            "started_at": a.started_at, "ended_at": a.ended_at, "reason": a.reason}  # fmt: skip


def _outcomes(rows: list) -> list[dict]:
    """One line per job, attempt, test and outcome, with the ranks that agree."""
    found: dict[tuple, list] = {}
    for stream, row in rows:
        found.setdefault((stream.job, stream.attempt, row.test, row.outcome), []).append((stream.rank, row))
    return [{"job": job, "attempt": attempt, "test": test, "outcome": outcome,
             "ranks": ",".join(str(rank) for rank, _ in same), "duration_s": max(row.duration_s for _, row in same),
             "message": max(row.message for _, row in same)}
            for (job, attempt, test, outcome), same in sorted(found.items())]  # fmt: skip


def _measure(stream, row, m) -> dict:
    return {"job": stream.job, "attempt": stream.attempt, "rank": stream.rank, "test": row.test,
            "outcome": row.outcome, "measure": m.name, "unit": m.unit, "direction": m.direction, "shape": m.shape,
            "dtype": m.dtype, "samples": json.dumps(m.samples)}  # fmt: skip


def _faults(connection: sqlite3.Connection, run: str) -> list[str]:
    rows = connection.execute("SELECT faults FROM entry WHERE run = ?", (run,)).fetchall()
    return sorted({fault for (text,) in rows for fault in json.loads(text)})


JOBS = """
    SELECT job, number AS attempt, state, machine_fault, scheduler_id, nodes, exit_code, started_at, ended_at,
           json_extract(job.record, '$.attempts[' || number || '].reason') AS reason
    FROM attempt JOIN job USING (run, job, generation)
    WHERE run = ? AND generation = (SELECT max(generation) FROM job AS j WHERE j.run = job.run AND j.job = job.job)
    ORDER BY job, number"""
CURRENT = """
    FROM record JOIN test ON test.id = record.test JOIN stream ON stream.id = record.stream
    WHERE stream.id IN (SELECT max(id) FROM stream WHERE run = ? GROUP BY job, attempt, rank)"""
OUTCOMES = f"""
    SELECT job, attempt, test.name AS test, outcome, group_concat(rank) AS ranks, max(duration_s) AS duration_s,
           max(message) AS message
    {CURRENT} GROUP BY job, attempt, test.name, outcome ORDER BY job, attempt, test.name"""
MEASURES = f"""
    SELECT job, attempt, rank, test.name AS test, outcome, measure.name AS measure, unit, direction, shape, dtype,
           samples
    {CURRENT.replace("FROM record", "FROM measure JOIN record USING (stream, line)")}
    ORDER BY measure.name, job, rank"""
FACTS = """
    SELECT claim, topology, outcome, json_extract(body, '$.reason') AS reason, witness, toolchain FROM fact
    WHERE run = ? AND source = ? AND generation = (
        SELECT max(generation) FROM fact AS f WHERE f.run = fact.run AND f.source = fact.source)
    ORDER BY claim, topology"""
# The first line of an evidence file is the head of its run.
FIRST = "json_extract(substr(body, 1, instr(body, char(10)) - 1), '$.entry.record.{}')"
PASSED = """(SELECT count(*) FROM fact WHERE fact.run = {0}.run AND source = {1} AND outcome = 'passed' AND generation =
    (SELECT max(generation) FROM fact AS f WHERE f.run = fact.run AND f.source = fact.source)) AS cells_passed"""
LATEST = f"""
    SELECT run, datetime(created_at, 'unixepoch') AS created_utc, substr(commit_id, 1, 10) AS "commit", dirty,
           sabotage, (SELECT count(DISTINCT job) FROM job WHERE job.run = run.run) AS jobs,
           {PASSED.format("run", "''")}, '' AS imported
    FROM run
    UNION ALL
    SELECT run, datetime({FIRST.format("created_at")}, 'unixepoch'), substr({FIRST.format("commit")}, 1, 10),
           {FIRST.format("dirty")}, {FIRST.format("sabotage")}, json_array_length({FIRST.format("expected")}),
           {PASSED.format("evidence", "evidence.digest")}, substr(digest, 1, 12)
    FROM evidence
    ORDER BY created_utc DESC, run, imported LIMIT ?"""
NAMED = """
    SELECT run, '' AS source, record FROM run WHERE run LIKE ?1 || '%'
    UNION ALL SELECT run, digest, body FROM evidence WHERE run LIKE ?1 || '%' ORDER BY run, source"""
# Views for `query`: the lines of imported files, and their test records beside the job and rank that wrote them.
VIEWS = """
    CREATE TEMP VIEW imported_line AS
    SELECT digest AS source, run, line.key + 1 AS line, json_extract(line.value, '$.entry.kind') AS kind,
           json_extract(line.value, '$.entry') AS entry
    FROM evidence, json_each('[' || replace(rtrim(body, char(10)), char(10), ',') || ']') AS line
    WHERE kind IS NOT NULL;
    CREATE TEMP VIEW imported_record AS
    WITH placed AS (SELECT *, max(line) FILTER (WHERE kind = 'stream') OVER (PARTITION BY source ORDER BY line) AS owner
                    FROM imported_line WHERE kind IN ('stream', 'record'))
    SELECT r.source, r.run, json_extract(s.entry, '$.job') AS job, json_extract(s.entry, '$.attempt') AS attempt,
           json_extract(s.entry, '$.rank') AS rank, json_extract(r.entry, '$.row.test') AS test,
           json_extract(r.entry, '$.row.outcome') AS outcome, json_extract(r.entry, '$.row.duration_s') AS duration_s,
           json_extract(r.entry, '$.row.time') AS time, coalesce(json_extract(r.entry, '$.row.message'), '') AS message
    FROM placed AS r JOIN placed AS s ON s.source = r.source AND s.line = r.owner WHERE r.kind = 'record';
    PRAGMA query_only = ON"""


def add_views(connection: sqlite3.Connection) -> None:
    """Let SQL see what lies in imported files, and write nothing."""
    connection.executescript(VIEWS)


def print_run(found: dict) -> None:
    """The same as text."""
    dirty = f", {len(found['dirty_files'])} files differ from it" if found["dirty_files"] else ""
    print(f"run {found['run']}  commit {found['commit'] or 'none'}{dirty}  snapshot {found['snapshot'][:16]}")
    if found.get("imported"):
        print(f"imported in evidence file {found['imported'][:16]}")
    if found["sabotage"]:
        print(f"sabotaged by {found['sabotage']}: never a verdict on the real code")
    for name in ("faults", "attempts", "outcomes", "measures", "facts"):
        rows = found[name]
        if rows:
            print(f"\n{name}")
            rows = [{"fault": row} for row in rows] if name == "faults" else rows
            table(tuple(rows[0]), [tuple(row.values()) for row in rows])


def _dicts(connection: sqlite3.Connection, query: str, *arguments) -> list[dict]:
    cursor = connection.execute(query, arguments)
    names = [column[0] for column in cursor.description]
    return [dict(zip(names, row, strict=True)) for row in cursor]
