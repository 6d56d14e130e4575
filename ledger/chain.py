"""What the ledger's chain links: the exact content of rows, and the entries that bind generations in order.

Shared by the writer and by `verify`, so that both mean the same bytes.
"""

from __future__ import annotations

import hashlib
import json
import sqlite3
import time
from collections.abc import Iterable

from ledger.facts import Fact
from ledger.record import Attempt, digest, encode
from ledger.runs import Stream

GENESIS = "0" * 64


def head_of(stream: Stream) -> dict:
    """Everything a stream says besides its tests."""
    names = ("starts", "environments", "ends", "faults", "unfinished", "last_time", "log")
    return {name: getattr(stream, name) for name in names}


def attempt_row(a: Attempt) -> tuple:
    """The columns of an attempt."""
    return (a.number, a.state, int(a.machine_fault), a.scheduler_id, ",".join(a.nodes), a.exit_code, a.submitted_at,
            a.started_at, a.ended_at)  # fmt: skip


def digest_rows(rows: Iterable[tuple]) -> str:
    """Digest of (line, test, outcome, duration_s, time, begun, message, closure digest, detail digest) rows."""
    found = hashlib.sha256()
    for row in rows:
        found.update(repr(row).encode())
    return found.hexdigest()


class Content:
    """Accumulates the digest of one generation of one run."""

    def __init__(self) -> None:
        self.hash = hashlib.sha256()

    def add(self, *parts: object) -> None:
        self.hash.update(encode(parts) + b"\n")

    def digest(self) -> str:
        return self.hash.hexdigest()


def insert(connection: sqlite3.Connection, table: str, row: tuple) -> sqlite3.Cursor:
    return connection.execute(f"INSERT INTO {table} VALUES ({','.join('?' * len(row))})", row)


def append_entry(
    connection: sqlite3.Connection, run: str, source: str, generation: int, faults: list[str], content: str
) -> None:
    """Bind one generation to everything before it."""
    last = connection.execute("SELECT seq, link FROM entry ORDER BY seq DESC LIMIT 1").fetchone() or (0, GENESIS)
    row = (last[0] + 1, run, source, generation, time.time(), json.dumps(faults), content)
    insert(connection, "entry", (*row, link(last[1], row)))


def link(previous: str, row: tuple) -> str:
    """The link of an entry: its predecessor's link and its own columns."""
    return digest([previous, *row])


def insert_facts(connection: sqlite3.Connection, found: Iterable[Fact], source: str, generation: int, blob) -> None:
    """Write derived facts; `blob` maps a closure digest to its row."""
    for f in found:
        insert(connection, "fact", (source, f.run, generation, f.claim, f.topology, f.outcome, f.created_at,
                                    f.claim_digest, blob(f.closure), f.toolchain, f.witness, f.sabotage,
                                    encode(f).decode()))  # fmt: skip


def last_known(connection: sqlite3.Connection) -> dict[tuple[str, str], frozenset[str]]:
    """The pieces each cell used when it last passed: what a crash, which leaves no closure, is charged to."""
    query = """SELECT claim, topology, blob.body, max(created_at) FROM fact JOIN blob ON blob.id = fact.closure
               WHERE outcome = 'passed' GROUP BY claim, topology"""
    return {row[:2]: frozenset(json.loads(row[2])) for row in connection.execute(query)}
