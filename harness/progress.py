"""What people see while jobs run, and at the end: the live table, the local matrix, a sentence per cell not green."""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path

from rich import box
from rich.console import Console
from rich.live import Live
from rich.table import Table

from harness.gather import Progress, View
from harness.spec import Cell, ClaimStatus

_WORDS = {
    "needs": "needs an input", "elsewhere": "not run here", "broken": "cannot be planned", "over_budget": "not run",
}  # fmt: skip
COLOURS = {"proven": "green", "refuted": "red", "flaky": "red", "expired": "yellow", "needs": "cyan"}


class Board:
    """A live table on a terminal; elsewhere one line whenever a job changes its state."""

    def __init__(self, console: Console, run_dir: Path):
        self.console, self.run_dir, self.started = console, run_dir, time.time()
        self.said: dict[str, str] = {}
        self.live = Live(console=console, refresh_per_second=4, transient=True) if console.is_terminal else None

    def __enter__(self) -> Board:
        if self.live:
            self.live.start()
        return self

    def __exit__(self, *_) -> None:
        if self.live:
            self.live.stop()

    def show(self, progress: Progress) -> None:
        """Show the newest look."""
        if self.live:
            self.live.update(self._table(progress))
            return
        for view in progress.views:
            text = view.state if view.attempts else view.note
            if self.said.get(view.spec.job) != text:
                self.said[view.spec.job] = text
                reason = view.attempts[-1].reason if view.attempts else ""
                self.console.print(f"{view.spec.job}: {text}" + (f" ({reason})" if reason else ""), soft_wrap=True)

    def _table(self, progress: Progress) -> Table:
        ended = sum(view.settled for view in progress.views)
        title = f"{ended} of {len(progress.views)} jobs ended, {time.time() - self.started:.0f} s"
        table = Table("job", "state", "ranks", "tests", "", box=box.SIMPLE_HEAD, title=title, title_justify="left")
        order = sorted(progress.views, key=lambda view: (view.settled, not view.attempts))
        for view in order[: self.console.height - 6]:
            reason = view.attempts[-1].reason if view.attempts else view.note
            state = view.state if view.attempts else "waiting"
            table.add_row(view.spec.job, state, str(view.spec.topology.ranks), self._done(view), reason)
        return table

    def _done(self, view: View) -> str:
        """Tests ended on rank 0, of those planned."""
        stream = self.run_dir / "jobs" / view.spec.job / "attempts" / _last(view) / "rank0.jsonl"
        done = stream.read_bytes().count(b'"kind":"test_end"') if stream.exists() else 0
        return f"{done}/{len(view.spec.tests)}"


def matrix(console: Console, statuses: Iterable[ClaimStatus], published: Iterable[ClaimStatus], wanted: set) -> None:
    """The selected cells as this machine knows them, beside what is published in ledger/evidence."""
    elsewhere = {(status.id, status.topology): status for status in published}
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in ("claim", "where", "here", "published", "witness"):
        table.add_column(column, no_wrap=True)
    selected = [status for status in statuses if (status.id, status.topology) in wanted]
    for status in selected:
        other = elsewhere.get((status.id, status.topology))
        state = f"[{COLOURS.get(status.state, 'white')}]{status.state}[/]"
        where = f"{status.device} x{status.ranks} {status.transport}".removesuffix(" none").strip()
        table.add_row(status.id, where, state, other.state if other else "", status.witness)
    console.print(table)
    for toolchain in sorted({status.toolchain for status in selected if status.toolchain}):
        console.print(f"with {toolchain}", soft_wrap=True)


def sentences(statuses: Iterable[ClaimStatus], cells: Iterable[Cell]) -> list[str]:
    """One sentence for each selected cell that is not green."""
    planned = {(cell.claim, cell.topology): cell for cell in cells}
    found = []
    for status in statuses:
        cell = planned.get((status.id, status.topology))
        if cell is not None and status.state != "proven":
            tried = cell.action in ("run", "keep")
            state, reason = (status.state, status.reason) if tried else (_WORDS[cell.action], cell.reason)
            found.append(f"{status.id} on {status.topology}: {state}: {reason or 'no reason recorded'}")
    return found


def _last(view: View) -> str:
    return str(view.attempts[-1].number) if view.attempts else "0"
