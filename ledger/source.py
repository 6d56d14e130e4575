"""Where facts come from: the local ledger, and published evidence files. Reads only.

Gives `claims.py` one shape for both: facts grouped so that a million records cost a few hundred rows.
"""

from __future__ import annotations

import contextlib
import json
import sqlite3
import time
from collections.abc import Iterable
from pathlib import Path

import msgspec

from ledger.db import connect_read
from ledger.facts import Fact
from ledger.memory import Memory
from ledger.record import Record, digest


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
        self.sealed: set[str] = set()  # sabotage runs that an allowed key sealed
        self.closures: dict[str, dict[str, str]] = {}
        self.loaders: list = []

    def add(self, found: Iterable[Sourced]) -> None:
        for one in found:
            if one.fact.sabotage:
                self.sabotage.setdefault(one.fact.claim, []).append(one.fact)
                self.sealed |= {one.fact.run} if one.keys else set()
            else:
                self.real.setdefault((one.fact.claim, one.fact.topology), []).append(one)

    def closure(self, name: str) -> dict[str, str]:
        """A merged closure by digest."""
        if name not in self.closures:
            self.closures[name] = next(found for load in self.loaders if (found := load(name)) is not None)
        return self.closures[name]


# What is dated in the future, or comes from another recorder, says nothing here and must not hide what does.
LATEST = """
    SELECT fact.body, source, max(fact.created_at) FROM fact
    JOIN (SELECT source, run, max(generation) AS generation FROM fact GROUP BY source, run) AS latest
      USING (source, run, generation)
    GROUP BY claim, topology, sabotage, outcome, claim_digest, closure, toolchain, witness, source != '',
             fact.created_at > ?, json_extract(fact.body, '$.recorder')
"""


def from_ledger(path: Path | str | None, keys: Path, memory: Memory) -> Facts:
    """The latest fact of each kind per cell: kinds differ in outcome, closure, toolchain, witness or sabotage.

    A fact that came with an imported evidence file is sealed by the keys of the folder `keys` that signed the file.
    """
    found = Facts()
    decoder = msgspec.json.Decoder(Fact)
    with contextlib.closing(connect_read(path)) as connection:
        rows = connection.execute(LATEST, (time.time(),)).fetchall()
        seals = _seals(connection, sorted({row[1] for row in rows} - {""}), keys, memory)
    found.add(
        Sourced(fact=decoder.decode(body), keys=seals[source][0], clusters=seals[source][1]) for body, source, _ in rows
    )
    found.loaders.append(_Closures(path))
    return found


class _Closures:
    """The ledger's closures, read all at once when the first is asked for and parsed one by one."""

    def __init__(self, path: Path | str | None):
        self.path, self.texts = path, None

    def __call__(self, name: str) -> dict[str, str] | None:
        if self.texts is None:
            with contextlib.closing(connect_read(self.path)) as connection:
                self.texts = dict(connection.execute("""SELECT digest, body FROM blob WHERE id IN (
                    SELECT DISTINCT closure FROM fact)"""))  # fmt: skip
        text = self.texts.get(name)
        return None if text is None else msgspec.json.decode(text)


Seals = dict[str, tuple[tuple[str, ...], tuple[str, ...]]]  # digest of an evidence file -> key labels, clusters


def _seals(connection: sqlite3.Connection, sources: list[str], keys: Path, memory: Memory) -> Seals:
    """Who sealed each imported file, from its bytes in the ledger."""
    if not sources:
        return {"": ((), ())}
    query = "SELECT digest, body FROM evidence WHERE digest IN (SELECT value FROM json_each(?)) ORDER BY digest"
    bodies = dict(connection.execute(query, (json.dumps(sources),)))

    def key() -> str:
        return digest([[name, digest(body.encode())] for name, body in bodies.items()] + [memory.of_folder(keys)])

    def work() -> Seals:
        from ledger.evidence import seals_of
        from ledger.signing import allowed_keys

        allowed = allowed_keys(keys)
        good = {name: seals_of(body.encode(), allowed) for name, body in bodies.items()}
        return {name: (tuple(k.label for k in found), tuple(k.cluster for k in found)) for name, found in good.items()}

    return {"": ((), ()), **memory.derived("seals", Seals, key, work)}


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
    target.sealed |= other.sealed
    target.loaders += other.loaders
    target.closures |= other.closures
    return target


class Published(Record, kw_only=True):
    """What a folder of evidence says; a closure is written as places in the list of all pieces."""

    found: list[Sourced]
    pieces: list[tuple[str, str]]
    closures: dict[str, list[int]]


def from_evidence(folder: Path, memory: Memory) -> Facts:
    """Facts of every published evidence file in `folder`; none where there is no folder."""
    found = Facts()
    if any(folder.glob("*.jsonl")):
        said = memory.derived("evidence", Published, lambda: memory.of_folder(folder), lambda: _judged(folder))
        found.add(said.found)
        found.closures |= {name: dict(map(said.pieces.__getitem__, places)) for name, places in said.closures.items()}
    return found


def _judged(folder: Path) -> Published:
    from ledger.evidence import judge_folder

    found, closures = judge_folder(folder)
    used = {one.fact.closure: closures[one.fact.closure] for one in found}
    pieces = sorted(set().union(*(closure.items() for closure in used.values())))
    place_of = {piece: place for place, piece in enumerate(pieces)}
    places = {name: sorted(map(place_of.__getitem__, closure.items())) for name, closure in used.items()}
    return Published(found=found, pieces=pieces, closures=places)
