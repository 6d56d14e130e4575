"""The ledger file: guarded, migrated, and refused where it must not be written."""

import os
import shutil
import sqlite3
import subprocess

import pytest

from ledger import db, export, schema
from ledger.db import LedgerError, assert_guards, connect_read, file_system, open_ledger, refuse_network
from ledger.ingest import ingest
from tests.ledger import make


def raw(path):
    return sqlite3.connect(path)


@pytest.mark.parametrize("table", sorted(schema.IDENTITIES))
def test_rows_cannot_be_changed_or_deleted(root, spool, ledger, table):
    """Every table refuses UPDATE and DELETE on any connection."""
    made = make.run(root, spool)
    made.lines("test_end")[0]["measures"] = [{"name": "n", "unit": "s", "direction": "lower", "samples": [1.0]}]
    ingest(made.write(), ledger)
    export.export(root, ledger)
    export.import_files(root, [root / "ledger" / "evidence"], ledger)
    connection = raw(ledger)
    column = next(row[1] for row in connection.execute(f"PRAGMA table_info({table})"))
    for sql in (f"UPDATE {table} SET {column} = {column}", f"DELETE FROM {table}"):
        with pytest.raises(sqlite3.IntegrityError, match="append-only"):
            connection.execute(sql)


@pytest.mark.parametrize("recursive", ["ON", "OFF"])
def test_insert_or_replace_is_refused(clean, ledger, recursive):
    """INSERT OR REPLACE cannot rewrite a row, whether or not recursive triggers are on."""
    connection = raw(ledger)
    connection.execute(f"PRAGMA recursive_triggers = {recursive}")
    row = connection.execute("SELECT * FROM run").fetchone()
    with pytest.raises(sqlite3.IntegrityError, match="append-only"):
        connection.execute(f"INSERT OR REPLACE INTO run VALUES ({','.join('?' * len(row))})", row)


def test_every_table_has_its_guards():
    """No table of the schema is without triggers."""
    tables = {line.split()[2] for script in schema.MIGRATIONS for line in script.splitlines() if "CREATE TABLE" in line}
    assert tables == set(schema.IDENTITIES)


def test_missing_trigger_is_named(clean, ledger):
    """A dropped guard keeps the ledger from being opened for writing, by name."""
    raw(ledger).execute("DROP TRIGGER record_no_delete")
    with pytest.raises(LedgerError, match="record_no_delete is missing"):
        open_ledger(ledger)


def test_migration_recreates_triggers(ledger, monkeypatch):
    """A migration that rebuilds a table, and so drops its triggers, ends with all of them in place."""
    open_ledger(ledger).conn.close()
    rebuild = "CREATE TABLE fresh (id INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE) STRICT; DROP TABLE test;" \
              "ALTER TABLE fresh RENAME TO test"  # fmt: skip
    monkeypatch.setattr(db, "MIGRATIONS", (*schema.MIGRATIONS, rebuild))
    connection = open_ledger(ledger).conn
    assert_guards(connection)
    assert connection.execute("PRAGMA user_version").fetchone()[0] == len(schema.MIGRATIONS) + 1


def test_failed_migration_changes_nothing(ledger, monkeypatch):
    """A migration that fails half-way is rolled back whole."""
    open_ledger(ledger).conn.close()
    monkeypatch.setattr(
        db, "MIGRATIONS", (*schema.MIGRATIONS, "CREATE TABLE extra (x INTEGER); CREATE TABLE extra (y)")
    )
    with pytest.raises(sqlite3.OperationalError):
        open_ledger(ledger)
    found = {row[0] for row in raw(ledger).execute("SELECT name FROM sqlite_master")}
    assert "extra" not in found


def test_strict_columns_refuse_wrong_types(clean, ledger):
    """Text in a number's column, a negative duration and an unknown outcome are refused by the schema itself."""
    connection = raw(ledger)
    connection.execute("PRAGMA foreign_keys = ON")
    good = {"stream": 1, "outcome": "'passed'", "duration": 1.0}
    for column, value in (("duration", "'long'"), ("duration", -1.0), ("outcome", "'fine'"), ("stream", 77)):
        row = good | {column: value}
        values = f"{row['stream']}, 99, 1, {row['outcome']}, {row['duration']}, 1.0, NULL, '', 1, 1"
        with pytest.raises(sqlite3.IntegrityError):
            connection.execute(f"INSERT INTO record VALUES ({values})")


def test_ledger_from_the_future_is_refused(clean, ledger):
    """A file of a later schema is neither read nor written, and the message names both versions."""
    raw(ledger).execute("PRAGMA user_version = 99")
    for opening in (open_ledger, connect_read):
        with pytest.raises(LedgerError, match="from the future: schema 99 found"):
            opening(ledger)


def test_foreign_and_broken_files_are_refused(tmp_path):
    """Another program's database and a file that is none are refused, and stay as they are."""
    other = tmp_path / "other.db"
    connection = raw(other)
    connection.execute("CREATE TABLE mine (x)")
    connection.close()
    with pytest.raises(LedgerError, match="not a ledger"):
        open_ledger(other)
    (tmp_path / "text.db").write_text("no database at all, but long enough to be looked at" * 50)
    with pytest.raises(LedgerError, match="NOTADB"):
        open_ledger(tmp_path / "text.db")


def test_network_file_systems_are_refused():
    """The mount that holds the ledger decides: the longest mount point wins, escapes are understood."""
    mounts = "rootfs / ext4 rw 0 0\nsrv:/x /home nfs4 rw 0 0\ntmpfs /home/fast\\040disk tmpfs rw 0 0\n"
    with pytest.raises(LedgerError, match="is on nfs4"):
        refuse_network("/home/me/ledger.db", mounts)
    refuse_network("/home/fast disk/ledger.db", mounts)
    assert file_system("/var/ledger.db", mounts) == "ext4"


@pytest.fixture
def small_disk(tmp_path):
    """A tmpfs of 1 MiB; skipped by name where mounting is not allowed."""
    place = tmp_path / "small"
    place.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", place], capture_output=True, check=False)
    if done.returncode:
        pytest.skip("mounting a tmpfs needs root")
    yield place
    subprocess.run(["umount", "-l", place], check=True)


def test_full_disk_loses_nothing(small_disk, root, spool):
    """A disk that fills during ingest gives a clear error and leaves the ledger as it was."""
    path = small_disk / "ledger.db"
    ingest(make.run(root, spool, number=1).write(), path)
    (small_disk / "ballast").write_bytes(b"x" * (os.statvfs(small_disk).f_bavail * 4096 - 8192))
    with pytest.raises(LedgerError, match="nothing was written"):
        for number in range(2, 60):
            ingest(make.run(root, spool, number=number).write(), path)
    (small_disk / "ballast").unlink()
    kept = raw(path).execute("SELECT count(*) FROM run").fetchone()[0]
    assert kept == raw(path).execute("SELECT count(DISTINCT run) FROM fact").fetchone()[0] >= 1


def test_read_only_disk_still_reads(small_disk, root, spool):
    """On a read-only file system commands read, and an ingest says why it cannot."""
    path = small_disk / "ledger.db"
    ingest(make.run(root, spool).write(), path)
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    assert connect_read(path).execute("SELECT count(*) FROM run").fetchone() == (1,)
    with pytest.raises(LedgerError, match="nothing was written"):
        ingest(make.run(root, spool, number=2).write(), path)


def test_reading_needs_no_writer(clean, ledger, tmp_path):
    """A copy of the file alone, without its write-ahead log, can be read."""
    shutil.copy(ledger, tmp_path / "copy.db")
    assert connect_read(tmp_path / "copy.db").execute("SELECT count(*) FROM record").fetchone() == (2,)
