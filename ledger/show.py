"""One run as the ledger holds it: head, jobs with every attempt, outcomes per test, measures, what the chain says."""

from __future__ import annotations

import json
import sqlite3

from ledger.db import LedgerError
from ledger.output import table


def latest(connection: sqlite3.Connection, count: int = 30) -> list[dict]:
    """The latest runs, newest first."""
    query = """
        SELECT run, datetime(created_at, 'unixepoch') AS created_utc, substr(commit_id, 1, 10) AS "commit", dirty,
               sabotage, (SELECT count(DISTINCT job) FROM job WHERE job.run = run.run) AS jobs,
               (SELECT count(*) FROM fact WHERE fact.run = run.run AND source = '' AND outcome = 'passed'
                  AND generation = (SELECT max(generation) FROM fact AS f WHERE f.run = run.run)) AS cells_passed
        FROM run ORDER BY created_at DESC LIMIT ?"""
    return _dicts(connection, query, count)


def one_run(connection: sqlite3.Connection, prefix: str) -> dict:
    """Everything about one run. Raises LedgerError if the prefix names none or several."""
    rows = connection.execute("SELECT run, record FROM run WHERE run LIKE ? || '%' ORDER BY run", (prefix,)).fetchall()
    if len(rows) != 1:
        names = ", ".join(row[0] for row in rows[:5]) or "none"
        raise LedgerError(f"{prefix!r} names {len(rows)} runs ({names}); give more of the id, see `k3-ledger show`")
    run, head = rows[0][0], json.loads(rows[0][1])
    jobs = _dicts(connection, JOBS, run)
    return {
        "run": run,
        "created_at": head["created_at"],
        "commit": head["commit"],
        "dirty_files": head["dirty_files"],
        "snapshot": head["snapshot"],
        "sabotage": head["sabotage"],
        "planned_jobs": len(head["expected"]),
        "attempts": jobs,
        "outcomes": _dicts(connection, OUTCOMES, run),
        "measures": _dicts(connection, MEASURES, run),
        "facts": _dicts(connection, FACTS, run),
        "faults": _faults(connection, run),
    }  # fmt: skip


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
    WHERE run = ? AND source = '' AND generation = (SELECT max(generation) FROM fact AS f WHERE f.run = fact.run)
    ORDER BY claim, topology"""


def print_run(found: dict) -> None:
    """The same as text."""
    dirty = f", {len(found['dirty_files'])} files differ from it" if found["dirty_files"] else ""
    print(f"run {found['run']}  commit {found['commit'] or 'none'}{dirty}  snapshot {found['snapshot'][:16]}")
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
