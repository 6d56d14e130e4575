"""A rank's heartbeat: once a second, where its main thread is. The launcher reads it to tell the hung from the waiting.

Beats lie in a node-local folder, not in the spool: they are advice for blame, never evidence.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

EVERY_S = 1.0
DEPTH = 4
WAITING = ("/torch/distributed/", "/torch/_ops.py")


@dataclass(frozen=True)
class Beat:
    """The last beat of a rank: its time, and the innermost frames of its main thread ('file:line function')."""

    time: float
    frames: tuple[str, ...] = ()

    @property
    def waiting(self) -> bool:
        """Whether the rank sits in a collective, so that it waits for another rank."""
        return any(place in frame for frame in self.frames for place in WAITING)

    @property
    def function(self) -> str:
        """File and function of the innermost frame."""
        where, _, name = self.frames[0].rpartition(" ") if self.frames else ("", "", "")
        return f"{where.rpartition(':')[0]} {name}"

    @property
    def place(self) -> str:
        """The innermost frame, short enough for a sentence."""
        return self.frames[0].rsplit("/", 1)[-1] if self.frames else "an unknown place"


def start(path: Path) -> None:
    """Beat into `path` until the process ends."""
    threading.Thread(target=_beat, args=(path, threading.main_thread().ident), daemon=True, name="beat").start()


def read(path: Path) -> Beat | None:
    """The last beat, or None when the rank has not come that far."""
    try:
        raw = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    return Beat(raw["time"], tuple(raw["frames"]))


def _beat(path: Path, main: int) -> None:
    partial = path.with_suffix(".tmp")
    while True:
        partial.write_text(json.dumps({"time": time.time(), "frames": _frames(main)}))
        os.replace(partial, path)
        time.sleep(EVERY_S)


def _frames(thread: int) -> list[str]:
    frame, found = sys._current_frames().get(thread), []
    while frame is not None and len(found) < DEPTH:
        found.append(f"{frame.f_code.co_filename}:{frame.f_lineno} {frame.f_code.co_name}")
        frame = frame.f_back
    return found
