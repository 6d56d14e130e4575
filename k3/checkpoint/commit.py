"""Replace a checkpoint as a whole: everything is written to a staging folder, then a journal guards the renames.

Killed before the journal: the folder holds what it held. Killed after it: the loader refuses the folder by name until
`recover` (or the next save) replays the journal, which needs nothing that is not on disk already. The index is the
last file to be renamed.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

from filelock import FileLock, Timeout

from k3.checkpoint.errors import CheckpointError
from k3.checkpoint.index import INDEX_FILE
from k3.checkpoint.source import JOURNAL, SINGLE_FILE
from k3.checkpoint.writer import sync_folder, write_durably

STAGING = ".k3-save"
LOCK = ".k3-save.lock"


def begin(folder: Path) -> FileLock:
    """Take the folder for one save and give it an empty staging folder; finishes an interrupted save first."""
    folder.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder / LOCK)
    try:
        lock.acquire(timeout=0)
    except Timeout as error:
        raise CheckpointError(f"another save is writing to {folder}; wait for it or use another folder") from error
    if (folder / JOURNAL).exists():
        _replay(folder)
    shutil.rmtree(folder / STAGING, ignore_errors=True)
    (folder / STAGING).mkdir()
    return lock


def commit(folder: Path, files: list[str]) -> None:
    """Publish the staged `files` (the index is renamed last) and remove every shard that is not among them."""
    sync_folder(folder / STAGING)
    old = [path.name for path in folder.glob("model*.safetensors") if path.name not in files]
    stale = [SINGLE_FILE] if (folder / SINGLE_FILE).exists() and SINGLE_FILE not in files else []
    journal = {"files": sorted(files, key=lambda name: name == INDEX_FILE), "remove": sorted({*old, *stale})}
    write_durably(folder / JOURNAL, json.dumps(journal))
    sync_folder(folder)
    _replay(folder)


def abandon(folder: Path) -> None:
    """Drop what was staged, and what the folder held stays; once a journal is there, only `recover` goes on."""
    if not (folder / JOURNAL).exists():
        shutil.rmtree(folder / STAGING, ignore_errors=True)


def release(folder: Path, lock: FileLock) -> None:
    """Give the folder back."""
    lock.release()
    (folder / LOCK).unlink(missing_ok=True)


def recover(folder: str | Path) -> bool:
    """Finish a save that was interrupted while it replaced files; return whether there was one."""
    folder = Path(folder)
    if not (folder / JOURNAL).exists():
        return False
    _replay(folder)
    return True


def _replay(folder: Path) -> None:
    """Do what the journal says and was not done yet; safe to repeat from any point."""
    journal = json.loads((folder / JOURNAL).read_text())
    for name in journal["files"]:
        staged = folder / STAGING / name
        if staged.exists():
            os.replace(staged, folder / name)
        elif not (folder / name).exists():
            raise CheckpointError(f"{folder}: {JOURNAL} names {name}, which is neither staged nor there; save again")
    for name in journal["remove"]:
        (folder / name).unlink(missing_ok=True)
    sync_folder(folder)
    (folder / JOURNAL).unlink()
    shutil.rmtree(folder / STAGING, ignore_errors=True)
    sync_folder(folder)
