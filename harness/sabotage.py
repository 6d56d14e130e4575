"""Sabotages: named wrong edits to the product that the tests of a claim must notice. Read, checked and applied here.

The registry is data beside the suites; an edit is applied to a copied tree only. `harness.mutate` runs them.
"""

from __future__ import annotations

import ast
import fnmatch
import tomllib
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import msgspec

from harness.spec import HarnessError, Record
from ledger.record import check_schema

MINIMUM = 3  # applicable sabotages that every claim needs


class Sabotage(Record, kw_only=True):
    """One wrong edit: `old` becomes `new` in `file`, once, inside the function or class `within` where one is named."""

    id: str
    text: str
    file: str
    old: str
    new: str
    claims: tuple[str, ...]
    within: str = ""
    survives: str = ""  # why the tests cannot notice it, where that is known and accepted


def read(root: Path, name: str = "suites/sabotages.toml") -> dict[str, Sabotage]:
    """The registry by id: `name`, and the files beside it that it lists. Raises HarnessError naming repeated ids."""
    raw, found = _parsed(root, name)
    for other in raw.get("more", []):
        found += _parsed(root, str(Path(name).with_name(other)))[1]
    twice = [key for key, count in Counter(sabotage.id for sabotage in found).items() if count > 1]
    if twice:
        raise HarnessError(f"{name}: {', '.join(twice)} named more than once; an id names one edit")
    return {sabotage.id: sabotage for sabotage in found}


def _parsed(root: Path, name: str) -> tuple[dict, list[Sabotage]]:
    try:
        raw = tomllib.loads((root / name).read_text(encoding="utf-8"))
        check_schema(raw)
        return raw, msgspec.convert(raw.get("sabotages", []), list[Sabotage])
    except (OSError, tomllib.TOMLDecodeError, msgspec.ValidationError) as error:
        raise HarnessError(f"{name}: {error}; each entry needs id, text, file, old, new and claims") from error


def applicable(sabotage: Sabotage, claims: Iterable[str]) -> tuple[str, ...]:
    """Those of `claims` that the entry names; `ckpt.load.*` means all that begin so."""
    return tuple(name for name in claims if any(fnmatch.fnmatchcase(name, pattern) for pattern in sabotage.claims))


def edited(sabotage: Sabotage, source: str) -> str:
    """`source` with the edit made. Raises HarnessError unless it applies exactly once, changes the code and parses."""
    start, end = _span(sabotage, source)
    count = source.count(sabotage.old, start, end)
    if count != 1:
        where = f"{sabotage.file}:{sabotage.within}" if sabotage.within else sabotage.file
        raise HarnessError(f"sabotage {sabotage.id}: `old` occurs {count} times in {where}, not once; renew the edit")
    at = source.index(sabotage.old, start, end)
    result = source[:at] + sabotage.new + source[at + len(sabotage.old) :]
    try:
        same = ast.dump(ast.parse(result)) == ast.dump(ast.parse(source))
    except SyntaxError as error:
        raise HarnessError(f"sabotage {sabotage.id}: line {error.lineno} does not parse: {error.msg}") from error
    if same:
        raise HarnessError(f"sabotage {sabotage.id}: the edit changes no code; a comment is not a fault")
    return result


def apply(sabotage: Sabotage, tree: Path) -> None:
    """Make the edit in a copied tree, whose files are read-only and stay so."""
    path = tree / sabotage.file
    result = edited(sabotage, path.read_text(encoding="utf-8"))
    mode = path.stat().st_mode
    path.unlink()  # a hard link would carry the edit into the original
    path.write_text(result, encoding="utf-8")
    path.chmod(mode)


def faults(sabotages: dict[str, Sabotage], root: Path, claims: list[str]) -> list[str]:
    """Everything wrong with a registry: edits that do not apply, unknown claims, claims with too few edits."""
    found = []
    for sabotage in sabotages.values():
        unknown = [pattern for pattern in sabotage.claims if not fnmatch.filter(claims, pattern)]
        found += [f"sabotage {sabotage.id}: unknown claim {name!r}" for name in unknown]
        found += [] if sabotage.claims else [f"sabotage {sabotage.id}: names no claim"]
        try:
            edited(sabotage, (root / sabotage.file).read_text(encoding="utf-8"))
        except (OSError, HarnessError) as error:
            found.append(str(error))
    counts = Counter(name for sabotage in sabotages.values() for name in applicable(sabotage, claims))
    short = [name for name in claims if counts[name] < MINIMUM]
    return found + [f"claim {name}: {counts[name]} sabotages apply, {MINIMUM} needed" for name in short]


def _span(sabotage: Sabotage, source: str) -> tuple[int, int]:
    """Offsets of the function or class the edit is anchored in, or of the whole file."""
    if not sabotage.within:
        return 0, len(source)
    nodes: list[ast.AST] = [ast.parse(source)]
    for name in sabotage.within.split("."):
        scopes = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
        nodes = [
            n for node in nodes for n in ast.walk(node) if isinstance(n, scopes) and n.name == name and n is not node
        ]
    if len(nodes) != 1:
        raise HarnessError(
            f"sabotage {sabotage.id}: {sabotage.within} is defined {len(nodes)} times in {sabotage.file}"
        )
    lines = source.splitlines(keepends=True)
    return sum(map(len, lines[: nodes[0].lineno - 1])), sum(map(len, lines[: nodes[0].end_lineno]))
