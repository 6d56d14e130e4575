"""What one run says of one cell, before any tree or other run is considered.

A fact is derived from records alone and can be derived again at any time; `verify` does so.
"""

from __future__ import annotations

from collections.abc import Set
from typing import Literal

from ledger.record import Claim, Record, digest


class Fact(Record, kw_only=True):
    """One run's word on one (claim, topology). `failed` is a verdict on the code, `unproven` is none."""

    run: str
    claim: str
    topology: str
    outcome: Literal["passed", "failed", "unproven"]
    reason: str = ""
    created_at: float
    claim_digest: str
    closure: str = ""  # digest of the merged closure
    recorder: int = 0
    toolchain: str = ""
    device: str = ""
    ranks: int = 0
    transport: str = ""
    scope: str = ""
    witness: Literal["", "T0", "T1"] = ""
    witness_note: str = ""
    sabotage: str = ""
    snapshot: str = ""
    paths: tuple[str, ...] = ()
    jobs: tuple[str, ...] = ()
    nodes: tuple[str, ...] = ()
    tests: int = 0
    duration_s: float = 0.0


def claim_digest(claim: Claim) -> str:
    """Identity of what is claimed: its sentence, tests, paths and scope. Evidence for other words proves nothing."""
    return digest({"text": claim.text, "tests": claim.tests, "paths": claim.paths, "scope": claim.scope})


def selected_by(patterns: Set[str], test: str) -> str:
    """The one of a claim's test ids that selects a planned test, or ''."""
    if test in patterns:
        return test
    base = test.partition("[")[0]
    while base:
        if base in patterns:
            return base
        base = base.rpartition("::")[0]
    return ""


def selects(pattern: str, test: str) -> bool:
    """Whether a claim's test id selects a planned test: itself, or every parameter of it."""
    return test == pattern or test.startswith((pattern + "[", pattern + "::"))
