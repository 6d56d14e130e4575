"""Opens the ledger file: creates and migrates it, guards it with triggers, and refuses files it must not touch.

Writers get a sqlite-utils database, readers a plain read-only sqlite3 connection. What is written is ingest's.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ledger.schema import APPLICATION_ID, MIGRATIONS, triggers
from ledger.state import ledger_path

NETWORK_FILE_SYSTEMS = frozenset(
    ["nfs", "nfs4", "lustre", "gpfs", "cifs", "smb3", "smbfs", "afs", "beegfs", "ceph", "glusterfs", "panfs"]
    + ["orangefs", "pvfs2", "wekafs", "fuse.sshfs", "fuse.glusterfs", "fuse.ceph"]
)
BUSY_TIMEOUT_S = 30.0


class LedgerError(RuntimeError):
    """The ledger cannot be used as asked; the message says what was found, the rule, and what to do."""


def open_ledger(path: Path | str | None = None):
    """Open for writing, creating and migrating as needed; returns a `sqlite_utils.Database`.

    Raises LedgerError for a network file system, a file from the future, a foreign file, or missing guards.
    """
    from sqlite_utils import Database

    path = ledger_path(path)
    refuse_network(path)
    with translated(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        connection = sqlite3.connect(path, timeout=BUSY_TIMEOUT_S)
        connection.execute("PRAGMA foreign_keys = ON")
        connection.execute("PRAGMA recursive_triggers = ON")
        try:
            check_version(connection, path)
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute("PRAGMA synchronous = FULL")
            migrate(connection)
            assert_guards(connection)
        except BaseException:
            connection.close()
            raise
    return Database(connection)


def connect_read(path: Path | str | None = None) -> sqlite3.Connection:
    """Open read-only with the standard library alone. Raises LedgerError if there is no ledger to read."""
    path = ledger_path(path)
    if not path.is_file():
        raise LedgerError(f"{path} does not exist; run a suite or `k3-ledger import` first, or pass --ledger PATH")
    frozen = "" if os.access(path.parent, os.W_OK) else "&immutable=1"  # WAL needs a writable folder
    with translated(path):
        connection = sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro{frozen}", uri=True, timeout=BUSY_TIMEOUT_S)
        try:
            check_version(connection, path)
        except BaseException:
            connection.close()
            raise
    return connection


def check_version(connection: sqlite3.Connection, path: Path) -> None:
    """Refuse a file that is not a ledger, or one that a later version wrote."""
    version = connection.execute("PRAGMA user_version").fetchone()[0]
    application = connection.execute("PRAGMA application_id").fetchone()[0]
    empty = not connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
    if application != APPLICATION_ID and not empty:
        raise LedgerError(f"{path} is an SQLite file but not a ledger; pass the right one with --ledger PATH")
    if version > len(MIGRATIONS):
        raise LedgerError(
            f"{path} is a ledger from the future: schema {version} found, {len(MIGRATIONS)} known; upgrade this package"
        )


def migrate(connection: sqlite3.Connection) -> None:
    """Apply what is missing in one transaction, then re-create every trigger (some tools drop them silently)."""
    version = connection.execute("PRAGMA user_version").fetchone()[0]
    if version == len(MIGRATIONS):
        return
    connection.execute("BEGIN IMMEDIATE")
    try:
        version = connection.execute("PRAGMA user_version").fetchone()[0]  # another process may have been first
        for script in MIGRATIONS[version:]:
            for statement in filter(str.strip, script.split(";")):
                connection.execute(statement)
        for name, sql in triggers().items():
            connection.execute(f"DROP TRIGGER IF EXISTS {name}")
            connection.execute(sql)
        connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
        connection.execute(f"PRAGMA user_version = {len(MIGRATIONS)}")
        connection.execute("COMMIT")
    except BaseException:
        connection.execute("ROLLBACK")
        raise


def assert_guards(connection: sqlite3.Connection) -> None:
    """Raise LedgerError naming the first trigger that is missing, altered or unknown."""
    found = dict(connection.execute("SELECT name, sql FROM sqlite_master WHERE type = 'trigger'"))
    wanted = triggers()
    for name in sorted({*wanted, *found}):
        if found.get(name) != wanted.get(name):
            what = "missing" if name not in found else "unknown" if name not in wanted else "altered"
            raise LedgerError(f"trigger {name} is {what}: the ledger was open to edits; rebuild it from its runs")


OUTSIDE_CAUSES = ("FULL", "IOERR", "READONLY", "BUSY", "LOCKED", "CANTOPEN", "CORRUPT", "NOTADB", "PERM", "AUTH")


@contextmanager
def translated(path: Path) -> Iterator[None]:
    """Turn what disks, permissions and constraints do into LedgerError; a fault of our own SQL stays as it is."""
    try:
        yield
    except sqlite3.IntegrityError as error:
        raise LedgerError(f"{path}: {error}; nothing was written") from error
    except sqlite3.DatabaseError as error:
        name = (getattr(error, "sqlite_errorname", "") or "").removeprefix("SQLITE_")
        if not name.startswith(OUTSIDE_CAUSES):
            raise
        raise LedgerError(f"{path}: {error} ({name}); nothing was written. Mend the disk, or pass --ledger") from error
    except OSError as error:
        raise LedgerError(f"{path}: {error.strerror}; nothing was written. Mend the disk, or pass --ledger") from error


def refuse_network(path: Path, mounts: str | None = None) -> None:
    """Refuse to write on a network file system: SQLite's locks and WAL are not safe there."""
    kind = file_system(path, mounts)
    if kind in NETWORK_FILE_SYSTEMS:
        raise LedgerError(f"{path} is on {kind}; a ledger is written on a local disk only: pass --ledger PATH")


def file_system(path: Path, mounts: str | None = None) -> str:
    """The type of the file system that holds `path`, from the mount table; '' where there is none to read."""
    if mounts is None:
        table = Path("/proc/self/mounts")
        mounts = table.read_text() if table.exists() else ""
    place, best, kind = Path(path).absolute(), "", ""
    for line in mounts.splitlines():
        _, point, found, *_ = line.split(" ")
        point = point.replace("\\040", " ")
        if len(point) >= len(best) and place.is_relative_to(point):
            best, kind = point, found
    return kind
