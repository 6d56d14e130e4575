"""What earlier commands read and worked out, so that reading is fast: a cache in the user's state folder, no evidence.

A file's digest is remembered by its stamp, as git's index does: device, inode, size, mtime and ctime. A file touched
in the two seconds before it was read is read again next time: an edit in the same tick would leave its stamp alone.
All else is remembered under the digests of what it follows from, this package's own code included, and only if it was
good: a lie is found again each time. Every cache file carries a MAC under the user's secret, so that one written by
anybody else is not believed; and none is kept inside the project, where it could be committed: a fresh clone reads
every byte.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from ledger.record import Record, digest
from ledger.state import state_dir

RACY_NS = 2_000_000_000
MOST_ENTRIES = 20_000
VERIFIED = ("published", "ledger", "evidence")  # what is remembered because every byte of it was checked
CODE = Path(__file__).parent
T = TypeVar("T")


class Kept(Record, kw_only=True):
    """One remembered value: what it follows from, when it was worked out, and itself."""

    key: str
    at: float
    value: msgspec.Raw


class Memory:
    """One command's view of the cache of a project; with `read=False` everything is worked out again."""

    def __init__(self, root: Path | str, read: bool = True):
        self.read = read
        self.since: dict[str, float] = {}  # what was answered from memory -> when it was worked out
        self.unchanged: set[str] = set()  # files that were not read again
        self.tables: dict[str, dict[str, Any]] = {}
        self.changed: set[str] = set()
        self.folder, self.secret = _place(Path(root))

    # --- digests of files -------------------------------------------------------------------------------------

    def digest(self, path: Path | str) -> str:
        """SHA-256 of a file's bytes; '' if it cannot be read."""
        name = os.path.abspath(path)
        known = self.table("digests").get(name)
        try:
            if known is not None and known[:-1] == _stamp(os.stat(name)):
                self.unchanged.add(name)
                return known[-1]
            return self._digest(name)
        except OSError:
            return ""

    def _digest(self, name: str) -> str:
        now = time.time_ns()
        with open(name, "rb") as file:
            before = os.fstat(file.fileno())
            value = hashlib.file_digest(file, "sha256").hexdigest()
            after = os.fstat(file.fileno())
        still = _stamp(before) == _stamp(after)
        if still and max(before.st_mtime_ns, before.st_ctime_ns) + RACY_NS < now:
            self.add("digests", name, [*_stamp(before), value])
        return value

    def of_folder(self, folder: Path) -> str:
        """What an evidence folder and the keys beside it hold, to the byte, and the code that reads them."""
        paths = [*sorted(folder.glob("*")), *sorted((folder.parent / "keys").glob("*"))]
        return digest([[path.parent.name, path.name, self.digest(path)] for path in paths] + [self.code()])

    def of_ledger(self, ledger: Path) -> str:
        """What a ledger file holds, to the byte, with what is still in its log, and the code that reads it."""
        empty = hashlib.sha256().hexdigest()
        parts = [self.digest(f"{ledger}{suffix}") or empty for suffix in ("", "-wal", "-journal")]
        return digest([*parts, self.code()])

    def code(self) -> str:
        """The code and data of this package, and the Python that runs it."""
        found = self.table("code")
        if "" not in found:
            paths = sorted([*CODE.glob("*.py"), *CODE.glob("*.toml")])
            found[""] = digest([[path.name, self.digest(path)] for path in paths] + [sys.version])
        return found[""]

    # --- what follows from them -------------------------------------------------------------------------------

    def derived(self, name: str, kind: type[T], key: Callable[[], str], work: Callable[[], T]) -> T:
        """`work()`, or what it gave under the same key; not remembered if the key changed in the meantime."""
        before = key()
        if (kept := self.recall(name, before)) is not None:
            with contextlib.suppress(msgspec.MsgspecError):
                found = msgspec.json.decode(kept.value, type=kind)
                self.since[name] = kept.at
                return found
        found = work()
        if key() == before:
            self.keep(name, before, found)
        return found

    def unless_verified(self, name: str, key: Callable[[], str], check: Callable[[], Iterator[str]]) -> Iterator[str]:
        """The lies that `check` finds; it is not asked again about what it found clean."""
        before, clean = key(), True
        if (kept := self.recall(name, before)) is not None:
            self.since[name] = kept.at
            return
        for lie in check():
            clean = False
            yield lie
        if clean and key() == before:
            self.keep(name, before, True)

    def note(self) -> str:
        """In words, what was answered from memory; '' if nothing was."""
        times = [at for name, at in self.since.items() if name in VERIFIED]
        if not times:
            return ""
        at = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(min(times)))
        return f"{len(self.unchanged)} files unchanged since they were verified at {at}; --full reads them again"

    # --- files ------------------------------------------------------------------------------------------------

    def table(self, name: str) -> dict[str, Any]:
        """A remembered mapping; empty at first."""
        if name not in self.tables:
            key = "" if name == "digests" else self.code() if name == "pieces" else None
            kept = self.recall(name, key) if key is not None else None
            self.tables[name] = msgspec.json.decode(kept.value) if kept else {}
        return self.tables[name]

    def add(self, name: str, key: str, value: Any) -> None:
        """Add to a table; written by `save`."""
        self.table(name)[key] = value
        self.changed.add(name)

    def save(self) -> None:
        """Write the tables that grew."""
        for name in sorted(self.changed):
            entries = self.table(name)
            kept = dict(list(entries.items())[-MOST_ENTRIES:])
            self.keep(name, self.code() if name == "pieces" else "", kept)
        self.changed.clear()

    def recall(self, name: str, key: str) -> Kept | None:
        """What was kept under this name and key, if the user's own hand wrote it."""
        if not self.read or self.folder is None:
            return None
        try:
            mac, _, body = (self.folder / f"{name}.json").read_bytes().partition(b"\n")
            kept = msgspec.json.decode(body, type=Kept) if hmac.compare_digest(mac, self._mac(name, body)) else None
        except (OSError, msgspec.MsgspecError):
            return None
        return kept if kept is not None and kept.key == key else None

    def keep(self, name: str, key: str, value: Any) -> None:
        """Write a value. A cache that cannot be written costs time, never truth."""
        if self.folder is None:
            return
        body = msgspec.json.encode(Kept(key=key, at=time.time(), value=msgspec.Raw(msgspec.json.encode(value))))
        path = self.folder / f"{name}.json"
        temporary = path.with_suffix(f".{os.getpid()}.tmp")
        with contextlib.suppress(OSError):
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            temporary.write_bytes(self._mac(name, body) + b"\n" + body)
            temporary.replace(path)

    def _mac(self, name: str, body: bytes) -> bytes:
        return hmac.digest(self.secret, name.encode() + b"\0" + body, "sha256").hex().encode()


def _place(root: Path) -> tuple[Path | None, bytes]:
    """The cache's folder and secret; no folder where there must or can be none."""
    from ledger.signing import key_folder, own_secret

    folder = state_dir() / "cache"
    if folder.resolve().is_relative_to(root.resolve()):
        return None, b""
    try:
        secret, seen = own_secret(), os.stat(key_folder() / "secret")
    except OSError:
        return None, b""
    if seen.st_mode & 0o077 or seen.st_uid != os.geteuid():
        return None, b""  # who else knows it could have written the cache
    return folder, hmac.digest(secret, b"cache", "sha256")


def _stamp(found: os.stat_result) -> list[int]:
    return [found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns]
