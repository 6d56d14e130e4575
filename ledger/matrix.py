"""The README's matrix: a block of Markdown that is a function of the statuses, and of nothing else.

`--check` and `--write` compute it from published evidence and the tree alone, so every clone gets the same text.
"""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from pathlib import Path

from ledger.record import ClaimStatus
from ledger.windows import Window

BEGIN, END = "<!-- matrix:begin -->", "<!-- matrix:end -->"
Cell = tuple[str, str]  # claim, topology
MARKS = {"proven": "🟢", "expired": "🟡", "unproven": "⚪", "needs": "⚪", "refuted": "🔴", "flaky": "🟠"}


class MatrixError(ValueError):
    """A README without a place for the matrix."""


def block(
    statuses: Iterable[ClaimStatus],
    flags: Mapping[Cell, Sequence[Window]] | None = None,
    figures: Sequence[str] = (),
    survivors: Sequence[str] = (),
) -> str:
    """Return the block between the markers, markers included.

    `flags` are the known-bad windows of some cells; `figures` and `survivors` the lines of two more tables: what proven
    cells measured, and which sabotages a claim's tests did not notice.
    """
    found, flags = list(statuses), flags or {}
    parts = [BEGIN, summary(found)]
    for group, members in groupby(found, key=lambda status: status.id.split(".")[0]):
        parts += ["", f"**{group}**", "", "| claim | where | state | grade | kills |", "|---|---|---|---|---|"]
        parts += [_row(status, flags.get((status.id, status.topology), ())) for status in members]
    used = sorted({str(window) for windows in flags.values() for window in windows})
    parts += ["", *(f"⚠ {text}" for text in used)] if used else []
    parts += ["", "**survivors** (sabotages that went unnoticed)", "", *survivors] if survivors else []
    parts += ["", "**figures** (peers: their time over ours)", "", *figures] if figures else []
    parts.append(END)
    return "\n".join(parts) + "\n"


def summary(found: list[ClaimStatus]) -> str:
    """One sentence that counts cells by state."""
    counts = Counter(status.state for status in found)
    told = ", ".join(f"{counts[state]} {state}" for state in MARKS if counts[state]) or "none claimed"
    return f"{len(found)} cell{'' if len(found) == 1 else 's'}: {told}."


def _row(status: ClaimStatus, flags: Sequence[Window]) -> str:
    kills = "" if status.kill_rate is None else f"{status.kill_rate:.0%}{'' if status.kills_sealed else ' unsealed'}"
    cells = [f"`{status.id}` {_plain(status.text)}", where(status), _state(status, flags), grade(status), kills]
    return f"| {' | '.join(cells)} |"


def where(status: ClaimStatus) -> str:
    """Device, ranks and transport, as observed for evidence and as planned otherwise."""
    ranks = "1 rank" if status.ranks == 1 else f"{status.ranks} ranks"
    transport = "" if status.transport in ("", "none") else f", {status.transport}"
    return f"{status.device} {ranks}{transport}"


def grade(status: ClaimStatus) -> str:
    """Scope, witness and seal of a proven or expired cell."""
    if not status.witness:
        return status.scope
    return f"{status.scope}, {status.witness}, {'sealed' if status.sealed else 'unsealed'}"


def _state(status: ClaimStatus, flags: Sequence[Window]) -> str:
    mark = MARKS[status.state]
    if status.state == "proven":
        warning = " ⚠" if flags else ""
        return f"{mark} proven on {status.toolchain}{warning}"
    reason = status.reason.removeprefix("needs ") if status.state == "needs" else status.reason
    return f"{mark} {status.state}{' ' if status.state == 'needs' else ': '}{_plain(reason)}"


def _plain(text: str) -> str:
    """One line that cannot break a table."""
    flat = " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")
    return flat if len(flat) <= 160 else flat[:157] + "..."


def replaced(readme: str, text: str) -> str:
    """The README with its block replaced. Raises MatrixError unless each marker stands there once, in order."""
    if readme.count(BEGIN) != 1 or readme.count(END) != 1 or readme.index(BEGIN) > readme.index(END):
        raise MatrixError(f"README.md needs the line {BEGIN} once, and {END} once after it")
    before, _, rest = readme.partition(BEGIN)
    return before + text.rstrip("\n") + rest.partition(END)[2]


def difference(readme: Path, text: str) -> str:
    """Unified diff from the README as it is to the README as it must be; '' if they agree."""
    now = readme.read_text(encoding="utf-8")
    wanted = replaced(now, text)
    lines = difflib.unified_diff(now.splitlines(True), wanted.splitlines(True), "README.md", "README.md (computed)")
    return "".join(lines)


def write(readme: Path, text: str) -> bool:
    """Replace the block through a temporary file; returns whether anything changed."""
    now = readme.read_text(encoding="utf-8")
    wanted = replaced(now, text)
    if wanted != now:
        temporary = readme.with_suffix(".md.tmp")
        temporary.write_text(wanted, encoding="utf-8")
        temporary.replace(readme)
    return wanted != now
