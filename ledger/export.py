"""Publishes runs as evidence files, and takes others' files into the ledger.

Export is deterministic and idempotent; import is idempotent and commutative: a file is its digest.
"""

from __future__ import annotations

import contextlib
import getpass
import hashlib
import os
import re
import socket
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

from ledger import evidence
from ledger.chain import Content, append_entry, insert, insert_facts
from ledger.claims import open_judge
from ledger.db import connect_read
from ledger.ingest import writing
from ledger.judge import facts
from ledger.load import load_run
from ledger.record import Record, encode
from ledger.scrub import Scrubber
from ledger.signing import own_secret, own_signer, seal, statement

INDEX_TYPE = "https://k3-proving-ground.dev/index/v1"
HOME = re.compile(r"(?<![\w.<>])/(?:home|root|Users|tmp|scratch|mnt|work|var|opt|data|gpfs|lustre|nfs)/[\w.]")


class ExportError(ValueError):
    """What was to be published must not be; the message says what it would have given away."""


class Exported(Record, kw_only=True):
    """The files of the chosen runs, those of them that changed, those that another key sealed, and what was removed."""

    files: tuple[str, ...]
    changed: tuple[str, ...]
    foreign: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()
    keyid: str = ""


def export(
    root: Path, ledger: Path | None, runs: Iterable[str] = (), folder: Path | None = None, *,
    signed: bool = True, prune: bool = False,
) -> Exported:  # fmt: skip
    """Write one file per run into `folder` (default: the published evidence); of the deciding runs if none is named.

    A file that another key sealed stays as it is. With `prune`, files of this key that decide nothing are removed.
    """
    folder = folder or root / "ledger" / "evidence"
    folder.mkdir(parents=True, exist_ok=True)
    signer = own_signer() if signed else None
    keyid = signer.public_key.keyid if signer else ""
    files: dict[str, bool] = {}
    foreign = []
    with contextlib.closing(connect_read(ledger)) as connection:
        for run in tuple(runs) or deciding_runs(root, ledger):
            name, data = publishable(load_run(connection, run), signer)
            if _sealed_by_another(folder / name, keyid):
                foreign.append(name)
            else:
                files[name] = _write(folder / name, data)
    removed = _write_index(folder, signer, list(files), prune)
    changed = tuple(name for name, is_new in files.items() if is_new)
    return Exported(files=tuple(files), changed=changed, foreign=tuple(foreign), removed=removed, keyid=keyid)


def _sealed_by_another(path: Path, keyid: str) -> bool:
    """Whether a file is there and carries a signature that is not by this key."""
    if not path.exists():
        return False
    last = msgspec.json.decode(path.read_bytes().rstrip(b"\n").split(b"\n")[-1])
    return bool({signature["keyid"] for signature in last["envelope"]["signatures"]} - {keyid})


def deciding_runs(root: Path, ledger: Path | None) -> tuple[str, ...]:
    """The runs that the present statuses rest on: of every cell, failures that stand and the best pass; sabotages."""
    judge = open_judge(root, ledger)
    found: set[str] = set()
    for claim, topology in judge.claims.cells():
        found.add(judge.status(claim, topology).run)
        decided = [one.fact for one in judge.decided(claim, topology)]
        found |= {fact.run for fact in decided if fact.outcome == "failed"}
        found |= {fact.run for fact in decided if fact.outcome == "passed" and fact is decided[-1]}
        found |= {fact.run for fact in judge.counted(claim)}
    with contextlib.closing(connect_read(ledger)) as connection:
        local = {run for (run,) in connection.execute("SELECT run FROM run")}
    return tuple(sorted(found & local))


def publishable(run, signer=None, secret: bytes | None = None) -> tuple[str, bytes]:
    """The scrubbed file of a run. Raises ExportError if it still names a person, a machine or a path."""
    users = {getpass.getuser(), Path.home().name, os.environ.get("USER", "")} - {"root", ""}
    hosts = {socket.gethostname(), socket.gethostname().split(".")[0]}
    data = evidence.dump(Scrubber(run, secret or own_secret(), users).run(run), signer)
    text = data.decode()
    leaks = [
        name for name in users | hosts if len(name) > 3 and re.search(rf"(?<![\w-]){re.escape(name)}(?![\w-])", text)
    ]
    leaks += [match[0] for match in [HOME.search(text)] if match]
    if leaks:
        raise ExportError(f"run {run.record.run} would publish {leaks[0]!r}; report which field holds it")
    return evidence.file_name(run), data


def _write(path: Path, data: bytes) -> bool:
    """Write through a temporary file; False if the file already holds these bytes."""
    if path.exists() and path.read_bytes() == data:
        return False
    temporary = path.with_suffix(".tmp")
    with open(temporary, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    return True


# --- the index: which files a key has published, so that a deleted one is missed -------------------------------


def index_name(keyid: str) -> str:
    return f"index-{keyid[:12] or 'unsigned'}.json"


def _write_index(folder: Path, signer, names: list[str], prune: bool) -> tuple[str, ...]:
    """List every file this key has published here; a file stays listed until its own key prunes it."""
    path = folder / index_name(signer.public_key.keyid if signer else "")
    known = read_index(path) if path.exists() else {}
    removed = tuple(sorted(set(known) - set(names))) if prune else ()
    for name in removed:
        (folder / name).unlink(missing_ok=True)
    kept = {name: known[name] for name in known if name not in removed}
    kept |= {name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in names}
    _write_listing(path, signer, kept)
    unsigned = folder / index_name("")
    if signer is not None and unsigned.exists():  # what is sealed now is no longer listed as unsealed
        _write_listing(unsigned, None, {n: v for n, v in read_index(unsigned).items() if n not in names})
    return removed


def _write_listing(path: Path, signer, files: dict[str, str]) -> None:
    _write(path, encode({"envelope": seal(statement(files, {"files": len(files)}, INDEX_TYPE), signer)}) + b"\n")


def read_index(path: Path) -> dict[str, str]:
    """File name -> digest, as the index says; its signature is `verify`'s business."""
    from ledger.signing import SealError, opened

    try:
        found = opened(msgspec.json.decode(path.read_bytes())["envelope"])
        return {item["name"]: item["digest"]["sha256"] for item in found["subject"]}
    except (msgspec.MsgspecError, SealError, KeyError, TypeError) as error:
        raise evidence.EvidenceError(f"{path.name} is no index: {error}") from error


# --- import ---------------------------------------------------------------------------------------------------


class Imported(Record, kw_only=True):
    """Files taken into the ledger now, and those it already had."""

    new: tuple[str, ...]
    known: tuple[str, ...]


def import_files(root: Path, paths: Iterable[Path], ledger: Path | None = None) -> Imported:
    """Check each evidence file and take it into the ledger, all or none."""
    from ledger.signing import allowed_keys

    keys = allowed_keys(root / "ledger" / "keys")
    files = [(path, path.read_bytes()) for path in _listed(paths)]
    read = [(evidence.parse(path.name, data, keys), data) for path, data in files]
    new, known = [], []
    with writing(ledger) as connection:
        for file, data in sorted(read, key=lambda pair: (pair[0].run.record.created_at, pair[0].name, pair[1])):
            (new if _import_one(connection, file, data) else known).append(file.name)
    return Imported(new=tuple(new), known=tuple(known))


def _listed(paths: Iterable[Path]) -> list[Path]:
    found: list[Path] = []
    for path in map(Path, paths):
        found += sorted(path.glob(f"*{evidence.SUFFIX}")) if path.is_dir() else [path]
    missing = [path for path in found if not path.is_file()]
    if missing:
        raise evidence.EvidenceError(f"{missing[0]} is not a file; import takes evidence files or folders of them")
    return found


def _import_one(connection: Any, file: evidence.File, data: bytes) -> bool:
    digest = hashlib.sha256(data).hexdigest()
    if connection.execute("SELECT 1 FROM evidence WHERE digest = ?", (digest,)).fetchone():
        return False
    run = file.run
    insert(connection, "evidence", (digest, run.record.run, data.decode()))
    judged = facts(run)  # without what is known already: import must not depend on order

    def blob(name: str) -> int:
        found = connection.execute("SELECT id FROM blob WHERE digest = ?", (name,)).fetchone()
        return (
            found[0]
            if found
            else insert(connection, "blob", (None, name, encode(run.closures[name]).decode())).lastrowid
        )

    insert_facts(connection, judged, digest, 0, blob)
    content = Content()
    content.add("evidence", digest)
    content.add("facts", judged)
    append_entry(connection, run.record.run, digest, 0, [], content.digest())
    return True
