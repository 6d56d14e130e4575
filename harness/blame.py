"""Who is at fault: reads what one rank shows (exit, events, heartbeat, kernel state) and names the earliest fault.

A rank that waits in a collective is a victim; one that is stopped, behind the others or elsewhere is the culprit.
"""

from __future__ import annotations

import subprocess
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from harness import beat, process
from harness.spec import Fault, JobSpec
from harness.stream import UNWRITABLE

REFUSED = 97  # harness.job's exit code when it refuses to run
# Of faults seen at the same look, the more telling first.
ORDER = (
    "refused", "spool", "signal", "exit", "early_exit", "stopped", "silent", "stalled", "timeout", "peer_node",
    "terminated",
)  # fmt: skip


@dataclass
class Watched:
    """One local rank and what has been seen of it."""

    number: int
    child: subprocess.Popen
    stream: Path
    beat_path: Path
    code: int | None = None
    ended_by_us: bool = False
    events: int = 0
    last: dict = field(default_factory=dict)
    test: str = ""
    event_at: float = field(default_factory=time.time)
    begun: bool = False  # whether it has come to its first test
    stopped_since: float | None = None
    _offset: int = 0

    def look(self, now: float) -> None:
        """Take in new events and the kernel's word on the process."""
        if self.code is None:
            self.code = process.peek(self.child.pid)
        self._read(now)
        stopped = self.code is None and process.state(self.child.pid) in ("T", "t")
        self.stopped_since = (self.stopped_since or now) if stopped else None

    def forgive(self, gap: float) -> None:
        """Do not count time in which the launcher itself was not running."""
        self.event_at += gap
        self.stopped_since = None

    def _read(self, now: float) -> None:
        if not self.stream.exists():
            return
        with open(self.stream, "rb") as file:
            file.seek(self._offset)
            lines = file.read()
        whole = lines[: lines.rfind(b"\n") + 1]
        for line in whole.splitlines():
            self.last = msgspec.json.decode(line)
            self.events += 1
            self.event_at = now
            kind = self.last.get("kind")
            self.begun = self.begun or kind == "test_start"
            self.test = self.last["test"] if kind == "test_start" else "" if kind in ("test_end", "end") else self.test
        self._offset += len(whole)

    @property
    def where(self) -> str:
        """' in <test>' when one was running."""
        return f" in {self.test}" if self.test else " outside any test"


def find_fault(rank: Watched, spec: JobSpec, now: float) -> Fault | None:
    """This rank's fault, if it shows one."""
    if rank.code is not None:
        return _exit_fault(rank, now)
    if rank.stopped_since is not None and now - rank.stopped_since >= spec.stopped_s:
        return _fault("stopped", rank, f"is stopped by a signal{rank.where}", now)
    seen = beat.read(rank.beat_path)
    if seen is not None and now - max(seen.time, rank.event_at) > spec.beat_s:
        return _fault("silent", rank, f"gave no sign of life for {spec.beat_s:g} s{rank.where}", now)
    if now - rank.event_at > spec.stall_s:
        return _fault("stalled", rank, f"made no progress{rank.where}", now)
    return None


def hung(ranks: list[Watched], kind: str, cause: str, now: float) -> list[Fault]:
    """Of a job that does not move, the faults of the ranks that hold it up, with where each one sits."""
    held_up = [(rank, f"holds the job up{rank.where}, at {_place(rank)} ({cause})") for rank in culprits(ranks)]
    return [_fault(kind, rank, text, now) for rank, text in held_up]


def culprits(ranks: list[Watched]) -> list[Watched]:
    """Of those still running: the stopped; else those behind; else those in no collective; else the odd ones out."""
    running = [rank for rank in ranks if rank.code is None]
    behind = min(rank.events for rank in running)
    groups = (
        [rank for rank in running if rank.stopped_since is not None],
        [rank for rank in running if rank.events == behind] if any(r.events > behind for r in running) else [],
        [rank for rank in running if not _waits(rank)],
    )
    return next((group for group in groups if 0 < len(group) < len(running)), _odd_ones_out(running))


def _odd_ones_out(ranks: list[Watched]) -> list[Watched]:
    """The ranks that are not where most are; all of them where there is no such place."""
    places = {rank.number: seen.function if (seen := beat.read(rank.beat_path)) else "" for rank in ranks}
    common, count = Counter(places.values()).most_common(1)[0]
    return [rank for rank in ranks if places[rank.number] != common] if 2 * count > len(ranks) > count else ranks


def first(faults: list[Fault]) -> Fault | None:
    """The one to blame: the earliest, and of those seen at the same look the more violent."""
    return min(faults, key=lambda fault: (fault.time, ORDER.index(fault.kind), fault.rank), default=None)


def _exit_fault(rank: Watched, now: float) -> Fault | None:
    ended = rank.last.get("kind") == "end"
    if rank.code < 0:
        name = process.signal_name(-rank.code)
        return _fault("signal", rank, f"was killed by {name}{rank.where if not ended else ' after its last test'}", now)
    if rank.code == REFUSED:
        return _fault("refused", rank, f"refused to run: {_last_line(rank)}", now)
    if rank.code == UNWRITABLE:
        return _fault("spool", rank, f"could not write its records: {_full(rank)}", now)
    if ended and rank.code == rank.last["exit_code"]:
        return None
    if rank.code == 0:
        return _fault("early_exit", rank, f"exited with code 0 half-way{rank.where}", now)
    return _fault("exit", rank, f"exited with code {rank.code}{rank.where}: {_last_line(rank)}", now)


def _fault(kind: str, rank: Watched, text: str, now: float) -> Fault:
    return Fault(kind=kind, rank=rank.number, text=f"rank {rank.number} {text}", time=now)


def _waits(rank: Watched) -> bool:
    seen = beat.read(rank.beat_path)
    return seen is not None and seen.waiting


def _place(rank: Watched) -> str:
    seen = beat.read(rank.beat_path)
    return seen.place if seen else "start-up"


def _full(rank: Watched) -> str:
    """Why the folder of a rank's stream cannot be written, asked of the file system itself."""
    try:
        probe = rank.stream.with_suffix(".probe")
        probe.write_bytes(b"0" * 4096)
        probe.unlink()
    except OSError as error:
        return error.strerror
    return _last_line(rank)


def _last_line(rank: Watched) -> str:
    log = rank.stream.with_suffix(".log")
    lines = log.read_text(errors="replace").split("\n") if log.exists() else []
    return next((line.strip() for line in reversed(lines) if line.strip()), "its log is empty")
