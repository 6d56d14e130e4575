"""Where facts come from: the local ledger, and published evidence files. Reads only.

Gives `claims.py` one shape for both: facts grouped so that a million records cost a few hundred rows.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sqlite3
from collections.abc import Iterable
from pathlib import Path

import msgspec

from ledger.db import connect_read
from ledger.facts import Fact
from ledger.record import Record
from ledger.state import state_dir


class Sourced(Record, kw_only=True):
    """A fact, its merged closure's digest resolvable in `Facts.closures`, and the keys that seal it."""

    fact: Fact
    keys: tuple[str, ...] = ()  # labels of allowed keys whose signature covers the run
    clusters: tuple[str, ...] = ()  # the cluster each key is declared for


class Facts:
    """All facts at hand, by cell; closures are loaded when asked for."""

    def __init__(self) -> None:
        self.real: dict[tuple[str, str], list[Sourced]] = {}
        self.sabotage: dict[str, list[Fact]] = {}  # claim -> facts of sabotage runs
        self.closures: dict[str, dict[str, str]] = {}
        self.loaders: list = []

    def add(self, found: Iterable[Sourced]) -> None:
        for one in found:
            if one.fact.sabotage:
                self.sabotage.setdefault(one.fact.claim, []).append(one.fact)
            else:
                self.real.setdefault((one.fact.claim, one.fact.topology), []).append(one)

    def closure(self, name: str) -> dict[str, str]:
        """A merged closure by digest."""
        if name not in self.closures:
            self.closures[name] = next(found for load in self.loaders if (found := load(name)) is not None)
        return self.closures[name]


LATEST = """
    SELECT fact.body, source, max(fact.created_at) FROM fact
    JOIN (SELECT source, run, max(generation) AS generation FROM fact GROUP BY source, run) AS latest
      USING (source, run, generation)
    GROUP BY claim, topology, sabotage, outcome, claim_digest, closure, toolchain, witness, source != ''
"""


def from_ledger(path: Path | str | None, keys: Path) -> Facts:
    """The latest fact of each kind per cell: kinds differ in outcome, closure, toolchain, witness or sabotage.

    A fact that came with an imported evidence file is sealed by the keys of the folder `keys` that signed the file.
    """
    found = Facts()
    decoder = msgspec.json.Decoder(Fact)
    with contextlib.closing(connect_read(path)) as connection:
        rows = connection.execute(LATEST).fetchall()
        seals = {source: _seals(connection, source, keys) for source in {row[1] for row in rows}}
    found.add(
        Sourced(fact=decoder.decode(body), keys=seals[source][0], clusters=seals[source][1]) for body, source, _ in rows
    )

    def load(name: str) -> dict[str, str] | None:
        with contextlib.closing(connect_read(path)) as connection:
            row = connection.execute("SELECT body FROM blob WHERE digest = ?", (name,)).fetchone()
        return json.loads(row[0]) if row else None

    found.loaders.append(load)
    return found


def _seals(connection: sqlite3.Connection, source: str, keys: Path) -> tuple[tuple[str, ...], tuple[str, ...]]:
    if not source:
        return (), ()
    from ledger.evidence import seals_of
    from ledger.signing import allowed_keys

    body = connection.execute("SELECT body FROM evidence WHERE digest = ?", (source,)).fetchone()[0]
    good = seals_of(body.encode(), allowed_keys(keys))
    return tuple(key.label for key in good), tuple(key.cluster for key in good)


def merge(target: Facts, other: Facts) -> Facts:
    """Add other facts; the same run's word on the same cell counts once, sealed before unsealed."""
    for cell, found in other.real.items():
        known = {(one.fact.run, one.fact.outcome): one for one in target.real.get(cell, [])}
        for one in found:
            twin = known.get((one.fact.run, one.fact.outcome))
            if twin is None or (one.keys and not twin.keys):
                known[one.fact.run, one.fact.outcome] = one
        target.real[cell] = list(known.values())
    for claim, found in other.sabotage.items():
        known = {(f.run, f.topology, f.outcome): f for f in [*target.sabotage.get(claim, []), *found]}
        target.sabotage[claim] = list(known.values())
    target.loaders += other.loaders
    target.closures |= other.closures
    return target


class Cached(Record, kw_only=True):
    """What a folder of evidence said when it was last read; `key` binds every byte of it and of the keys beside it."""

    key: str
    found: list[Sourced]
    closures: dict[str, dict[str, str]]


def from_evidence(folder: Path, use_cache: bool = True) -> Facts:
    """Facts of every published evidence file in `folder`; none where there is no folder."""
    paths = sorted(Path(folder).glob("*.jsonl"))
    if not paths:
        return Facts()
    key, file = folder_key(Path(folder)), state_dir() / "evidence-1.json"
    cached = read_cache(file, Cached) if use_cache else None
    if cached is None or cached.key != key:
        cached = _judged(Path(folder), key)
        if use_cache:
            write_cache(file, cached)
    found = Facts()
    found.add(cached.found)
    found.closures |= cached.closures
    return found


def folder_key(folder: Path) -> str:
    """A digest of every byte of an evidence folder and of the keys beside it."""
    paths = [*sorted(folder.glob("*.jsonl")), *sorted((folder.parent / "keys").glob("*.json"))]
    parts = [(path.name, hashlib.sha256(path.read_bytes()).hexdigest()) for path in paths]
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def _judged(folder: Path, key: str) -> Cached:
    from ledger.evidence import judge_folder

    found, closures = judge_folder(folder)
    return Cached(key=key, found=found, closures={one.fact.closure: closures[one.fact.closure] for one in found})


def read_cache(file: Path, kind: type):
    """What an earlier command worked out; None if there is nothing readable."""
    try:
        return msgspec.json.decode(file.read_bytes(), type=kind)
    except (OSError, msgspec.MsgspecError):
        return None


def write_cache(file: Path, cached: Record) -> None:
    """A cache that cannot be written costs time, never truth."""
    temporary = file.with_suffix(f".{os.getpid()}.tmp")
    with contextlib.suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_bytes(msgspec.json.encode(cached))
        temporary.replace(file)
