"""External inputs a claim needs: found by environment variable, then by path, and believed only by SHA-256."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from harness.revision import sha256
from ledger.record import Input


@dataclass(frozen=True, kw_only=True)
class Resolved:
    """Where an input is (None: nowhere) and, if nowhere, why in words."""

    folder: Path | None = None
    reason: str = ""


def resolve(wanted: Input, root: Path) -> Resolved:
    """Find `wanted` on this host. The first folder that has all of its files wins; their contents must agree."""
    named = os.environ.get(wanted.env, "") if wanted.env else ""
    folders = [Path(named).expanduser()] if named else [(root / path).resolve() for path in wanted.paths]
    reasons = [_fault(wanted, folder) for folder in folders]
    for folder, reason in zip(folders, reasons, strict=True):
        if not reason:
            return Resolved(folder=folder)
    remedy = f"set {wanted.env} to a folder with {', '.join(sorted(wanted.files))}" if wanted.env else "provide it"
    return Resolved(reason="; ".join([*reasons, remedy]))


def _fault(wanted: Input, folder: Path) -> str:
    missing = [name for name in sorted(wanted.files) if not (folder / name).is_file()]
    if missing:
        return f"{wanted.name}: no {missing[0]} in {folder.name or folder}"
    other = [name for name, known in sorted(wanted.files.items()) if sha256(folder / name) != known]
    return f"{wanted.name}: {other[0]} in {folder.name} has another SHA-256 than claims.toml declares" if other else ""
