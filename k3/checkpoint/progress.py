"""Progress of long reads and writes: a callback, a bar on a terminal, or nothing. Imports rich only to draw."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Progress:
    """Counts bytes and tells whoever listens."""

    def __init__(self, total: int, listener: Callable[[int, int], object] | None = None):
        self.done, self.total, self.listener = 0, total, listener

    def advance(self, size: int) -> None:
        self.done += size
        if self.listener is not None:
            self.listener(self.done, self.total)


@contextmanager
def show(progress: bool | Callable[[int, int], object] | None, total: int, label: str) -> Iterator[Progress]:
    """Yield a counter: `progress` is its callback, or whether to draw a bar; None draws one on a terminal."""
    if callable(progress):
        yield Progress(total, progress)
    elif progress or (progress is None and sys.stderr.isatty()):
        with _bar(total, label) as listener:
            yield Progress(total, listener)
    else:
        yield Progress(total)


@contextmanager
def _bar(total: int, label: str) -> Iterator[Callable[[int, int], object]]:
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (TextColumn(label), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(label, total=total)
        yield lambda done, _: bar.update(task, completed=done)
