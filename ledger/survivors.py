"""Sabotages that a claim's tests did not notice, each with the reason that the registry beside the suites gives."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from ledger.claims import Judge

HEAD = "| claim | sabotage | why its tests do not notice it |\n|---|---|---|"
UNEXPLAINED = "no reason is given: a test is missing"
DROPPED = "no longer in the registry"


def survivors(judge: Judge, root: Path) -> list[tuple[str, str, str]]:
    """(claim, sabotage, reason) of every survivor, in the order of claims.toml."""
    found = [
        (claim.id, name)
        for claim in judge.claims.claims.values()
        for name, noticed in judge.sabotages(claim).items()
        if not noticed
    ]
    registry = _registry(root, judge.claims.sabotages) if found else {}
    return [(claim, name, _reason(registry.get(name))) for claim, name in found]


def lines(found: Iterable[tuple[str, str, str]]) -> list[str]:
    """A table of Markdown; [] if nothing survived."""
    rows = [f"| `{claim}` | `{name}` | {reason} |" for claim, name, reason in found]
    return [*HEAD.splitlines(), *rows] if rows else []


def _reason(entry: dict | None) -> str:
    if entry is None:
        return DROPPED
    text = f"{entry.get('text', '')}: {entry.get('survives') or UNEXPLAINED}"
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")


def _registry(root: Path, name: str) -> dict[str, dict]:
    """The registry's entries by id; it is the harness that checks them."""
    import tomllib

    main = root / (name or "suites/sabotages.toml")
    if not main.is_file():
        return {}
    raw = tomllib.loads(main.read_text(encoding="utf-8"))
    parts = [raw, *(tomllib.loads((main.parent / other).read_text(encoding="utf-8")) for other in raw.get("more", []))]
    return {entry.get("id", ""): entry for part in parts for entry in part.get("sabotages", [])}
