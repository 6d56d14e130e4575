"""Reads suites/claims.toml: every claim the product may make, as data. All faults are reported at once.

Nothing here imports a suite; whether a test exists is the planner's question.
"""

from __future__ import annotations

import difflib
import re
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec

from ledger.memory import Memory
from ledger.record import Claim, Input, Record, Topology, check_schema, digest

CLAIM_FILE = "suites/claims.toml"
TOP_LEVEL = ("schema", "topologies", "inputs", "claims", "suites", "sabotages")
CLAIM_ID = re.compile(r"^[a-z0-9]+([._-][a-z0-9]+)*$")
NODE_ID = re.compile(r"^suites/[\w/]+\.py::\w+(::\w+)*(\[.*\])?$")


class ClaimFileError(ValueError):
    """A claim file with faults; the message lists every one of them."""


class ClaimFile(Record, kw_only=True):
    """A parsed claim file. `suites` maps a group's name to its claim ids, in file order."""

    path: str
    claims: dict[str, Claim]
    topologies: dict[str, Topology]
    inputs: dict[str, Input]
    suites: dict[str, tuple[str, ...]]
    suite_texts: dict[str, str] = {}
    sabotages: str = ""  # root-relative path of the sabotage registry

    def cells(self) -> list[tuple[Claim, Topology]]:
        """Every (claim, topology), in file order."""
        return [(claim, self.topologies[name]) for claim in self.claims.values() for name in claim.topologies]


def load(path: Path | str) -> ClaimFile:
    """Read a claim file, or a project root that holds one. Raises ClaimFileError listing all faults."""
    path = Path(path)
    path = path / CLAIM_FILE if path.is_dir() else path
    try:
        return _parsed(path.read_text(encoding="utf-8"), path.name)
    except OSError as error:
        raise ClaimFileError(f"{path.name}: {error.strerror}; a project states its claims in {CLAIM_FILE}") from error


@lru_cache(maxsize=8)
def _parsed(text: str, name: str) -> ClaimFile:
    import tomllib  # not needed where the file was read before

    try:
        raw = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ClaimFileError(f"{name} is not TOML: {error}") from error
    check_schema(raw)
    return _Reader(raw, name).read()


def remembered(root: Path, memory: Memory) -> ClaimFile:
    """`load` of a project root, parsed again only when the file changed."""
    path = root / CLAIM_FILE
    return memory.derived("claims", ClaimFile, lambda: digest([memory.digest(path), memory.code()]), lambda: load(path))


class _Reader:
    """Collects faults while turning the raw table into records."""

    def __init__(self, raw: dict[str, Any], name: str):
        self.raw, self.name, self.faults = raw, name, []

    def read(self) -> ClaimFile:
        self.check_keys("top level", self.raw, TOP_LEVEL)
        topologies = {name: self.record(Topology, f"topologies.{name}", {"name": name, **table})
                      for name, table in self.raw.get("topologies", {}).items()}  # fmt: skip
        inputs = {name: self.record(Input, f"inputs.{name}", {"name": name, **table})
                  for name, table in self.raw.get("inputs", {}).items()}  # fmt: skip
        claims = self.claims(topologies, inputs)
        for topology in topologies.values():
            self.check_topology(topology)
        if self.faults:
            lines = "\n".join(f"  - {fault}" for fault in self.faults)
            raise ClaimFileError(f"{self.name} has {len(self.faults)} faults:\n{lines}")
        return ClaimFile(
            path=self.name,
            claims=claims,
            topologies=topologies,
            inputs=inputs,
            suites=_groups(claims),
            suite_texts={name: table.get("text", "") for name, table in self.raw.get("suites", {}).items()},
            sabotages=self.raw.get("sabotages", ""),
        )

    def claims(self, topologies: dict, inputs: dict) -> dict[str, Claim]:
        found: dict[str, Claim] = {}
        for number, table in enumerate(self.raw.get("claims", []), start=1):
            where = f"claim {table.get('id', f'number {number}')!r}"
            claim = self.record(Claim, where, table)
            if claim is None:
                continue
            if claim.id in found:
                self.faults.append(f"{where} appears twice; an id names one claim")
            found[claim.id] = claim
            self.check_claim(where, claim, topologies, inputs)
        return found

    def record(self, kind: type, where: str, table: dict[str, Any]):
        self.check_keys(where, table, kind.__struct_fields__)
        try:
            return msgspec.convert(table, kind)
        except msgspec.ValidationError as error:
            self.faults.append(f"{where}: {error}")
            return None

    def check_keys(self, where: str, table: dict[str, Any], allowed) -> None:
        for key in table:
            if key not in allowed:
                close = difflib.get_close_matches(key, allowed, 1)
                hint = f"did you mean {close[0]!r}?" if close else f"known keys are {', '.join(allowed)}"
                self.faults.append(f"{where}: unknown key {key!r}; {hint}")

    def check_claim(self, where: str, claim: Claim, topologies: dict, inputs: dict) -> None:
        self.check_names(where, "topology", claim.topologies, topologies)
        self.check_names(where, "input", claim.inputs, inputs)
        rules = [
            (CLAIM_ID.match(claim.id), "an id is lower-case words joined by . _ or -"),
            (claim.text.strip(), "text is empty; a claim is one sentence"),
            (claim.tests, "no tests; a claim without a test proves nothing"),
            (claim.topologies, "no topologies; name at least one"),
            (len(set(claim.tests)) == len(claim.tests), "a test is listed twice"),
            (len(set(claim.topologies)) == len(claim.topologies), "a topology is listed twice"),
            (0 <= claim.kill_rate <= 1, f"kill_rate={claim.kill_rate} is not between 0 and 1"),
            (claim.kill_rate >= 0.95 or claim.kill_reason, f"kill_rate={claim.kill_rate}: say why in kill_reason"),
        ]  # fmt: skip
        self.faults += [f"{where}: {rule}" for held, rule in rules if not held]
        bad = [test for test in claim.tests if not NODE_ID.match(test)]
        self.faults += [f"{where}: test {test!r} is not of the form suites/file.py::test" for test in bad]

    def check_names(self, where: str, what: str, names, known: dict) -> None:
        for name in names:
            if name not in known:
                self.faults.append(f"{where}: unknown {what} {name!r}; declared are {', '.join(known) or 'none'}")

    def check_topology(self, topology: Topology | None) -> None:
        if topology is None:
            return
        t = topology
        rules = [
            (t.ranks >= 1 and t.nodes >= 1, f"ranks={t.ranks}, nodes={t.nodes}; both are at least 1"),
            (t.nodes < 1 or t.ranks % t.nodes == 0, f"ranks={t.ranks} is not divisible by nodes={t.nodes}"),
            (t.ranks == 1 or t.backend != "none", f"ranks={t.ranks} need a backend; use gloo or nccl"),
            (t.backend != "nccl" or t.device == "cuda", "backend nccl needs device cuda"),
            (t.timeout_min >= 1, f"timeout_min={t.timeout_min} is below 1"),
        ]
        self.faults += [f"topology {t.name!r}: {rule}" for held, rule in rules if not held]


def _groups(claims: dict[str, Claim]) -> dict[str, tuple[str, ...]]:
    names = dict.fromkeys(name for claim in claims.values() for name in claim.suites)
    return {name: tuple(c.id for c in claims.values() if name in c.suites) for name in names}
