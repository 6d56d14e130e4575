"""What each k3-ledger command does. Imports what a command needs inside it: listings must start fast."""

from __future__ import annotations

import contextlib
import sys
from argparse import Namespace
from pathlib import Path

import msgspec

from ledger.output import emit, table

EVIDENCE = "ledger/evidence"


def root_of(options: Namespace) -> Path:
    from ledger.cli import find_root

    return find_root(options.root)


def sources(options: Namespace, root: Path, published_only: bool = False) -> dict:
    """Where a command reads facts: the ledger (if there is one) beside published evidence, or evidence alone."""
    from ledger.state import ledger_path

    folder = root / EVIDENCE
    if published_only or (options.ledger is None and not ledger_path().is_file()):
        return {"ledger": None, "evidence": folder}
    return {"ledger": options.ledger or ledger_path(), "evidence": folder}


def claims(options: Namespace) -> int:
    """Print every cell, or those of the named claims and suites."""
    from ledger.claims import here, open_judge

    root = root_of(options)
    judge = open_judge(root, **sources(options, root, options.published))
    wanted = _selected(judge.claims, options.claim)
    found = [(judge.status(c, t), t.name) for c, t in judge.claims.cells() if c.id in wanted]
    judge.memory.save()
    rows = [{**msgspec.to_builtins(status), "expired_by": status.expired_by} for status, _ in found]
    if options.json or options.csv:
        emit(rows, as_csv=options.csv)
        return 0
    machine = here()
    lines = [(row["id"], row["topology"], _state_text(row, machine), row["scope"], row["witness"],
              "sealed" if row["sealed"] else "", _percent(row["kill_rate"])) for row in rows]  # fmt: skip
    table(("claim", "topology", "state", "scope", "witness", "seal", "kills"), lines)
    from ledger.matrix import summary

    print(summary([status for status, _ in found]))
    return 0


def _selected(file, names: list[str]) -> set[str]:
    from ledger.claimfile import ClaimFileError

    unknown = [name for name in names if name not in file.claims and name not in file.suites]
    if unknown:
        known = ", ".join([*file.suites, *file.claims])
        raise ClaimFileError(f"no claim or suite {', '.join(map(repr, unknown))}; there are {known}")
    chosen = {claim for name in names for claim in file.suites.get(name, (name,))}
    return chosen or set(file.claims)


def _state_text(row: dict, machine: dict) -> str:
    if row["state"] == "proven":
        return "proven here" if is_here(row["toolchain"], machine) else f"proven on {row['toolchain']}"
    return row["reason"] if row["state"] == "needs" else f"{row['state']}: {row['reason']}"


def is_here(toolchain: str, machine: dict) -> bool:
    """Whether a recorded toolchain is this machine's, as far as it can be known without importing torch."""
    from ledger.windows import versions

    parts = versions(toolchain)
    return bool(parts) and all(machine.get(name, value) == value for name, value in parts.items())


def _percent(rate: float | None) -> str:
    return "" if rate is None else f"{rate:.0%}"


def verify(options: Namespace) -> int:
    """Print the first lie, or every one with --all; exit 1 if there is any."""
    from ledger import verify as checks
    from ledger.memory import Memory
    from ledger.state import ledger_path, state_dir

    root = root_of(options)
    memory = Memory(root, read=not options.full)
    ledger = options.ledger or (ledger_path() if ledger_path().is_file() else None)
    runs = options.runs or state_dir() / "runs"
    found = checks.lies(root, ledger, runs if runs.is_dir() else None, memory)
    lies = list(found) if options.all else [lie for lie in [next(found, None)] if lie]
    for lie in lies:
        print(lie)
    if not lies:
        print(f"no lie found in {checks.looked_at(root, ledger)}")
    if not lies and (note := memory.note()):
        print(note)
    memory.save()
    return 1 if lies else 0


def export(options: Namespace) -> int:
    """Publish runs, or print the key file that lets this user's seals count."""
    from ledger import export as files
    from ledger.record import encode
    from ledger.signing import allowed_keys, own_signer, public_file

    root = root_of(options)
    if options.public_key:
        print(encode(public_file(own_signer(), options.label, options.cluster)).decode())
        return 0
    done = files.export(
        root, options.ledger, options.run_id, options.out, signed=not options.unsigned, prune=options.prune
    )
    for name in done.files:
        print(f"{'wrote' if name in done.changed else 'kept '} {name}")
    for name in done.foreign:
        print(f"kept  {name}, which another key sealed")
    for name in done.removed:
        print(f"removed {name}, which decides nothing now")
    if done.keyid and done.keyid not in allowed_keys(root / "ledger" / "keys"):
        print(f"key {done.keyid[:12]} is not in ledger/keys/, so these files are not sealed; a reviewed commit of "
              "`k3-ledger export --public-key` makes it count", file=sys.stderr)  # fmt: skip
    return 0


def import_(options: Namespace) -> int:
    """Take evidence files into the ledger."""
    from ledger.export import import_files

    done = import_files(root_of(options), options.path, options.ledger)
    print(f"{len(done.new)} files taken in, {len(done.known)} known already")
    return 0


def show(options: Namespace) -> int:
    """Print the latest runs, or everything about one."""
    from ledger.db import connect_read
    from ledger.show import latest, one_run, print_run

    with contextlib.closing(connect_read(options.ledger)) as connection:
        if options.id is None:
            rows = latest(connection)
            return _listing(options, rows)
        found = one_run(connection, options.id)
    if options.json or options.csv:
        emit(found["outcomes"] if options.csv else found, as_csv=options.csv)
    else:
        print_run(found)
    return 0


def why(options: Namespace) -> int:
    """Print the chain from a claim's sentence to the bytes that bear it."""
    from ledger.why import chain, print_chain

    root = root_of(options)
    found = chain(root, options.claim, **sources(options, root))
    emit(found) if options.json else print_chain(found)
    return 0


def query(options: Namespace) -> int:
    """Run one SELECT on a connection that cannot write."""
    import sqlite3

    from ledger.db import LedgerError, connect_read
    from ledger.show import add_views

    sql = (
        options.sql
        or """SELECT name, sql FROM sqlite_master WHERE type = 'table'
                            UNION ALL SELECT name, sql FROM sqlite_temp_master"""
    )
    with contextlib.closing(connect_read(options.ledger)) as connection:
        add_views(connection)
        connection.row_factory = sqlite3.Row
        try:
            rows = [dict(row) for row in connection.execute(sql)]
        except sqlite3.Error as error:
            raise LedgerError(f"{sql!r}: {error}; one read-only SELECT is expected") from error
    return _listing(options, rows)


def _listing(options: Namespace, rows: list[dict]) -> int:
    if options.json or options.csv:
        emit(rows, as_csv=options.csv)
    elif rows:
        table(tuple(rows[0]), [tuple(row.values()) for row in rows])
    return 0


def bench(options: Namespace) -> int:
    """List values with their peers and floors, or compare two sides."""
    from ledger import bench as numbers
    from ledger.db import connect_read

    with contextlib.closing(connect_read(options.ledger)) as connection:

        def side(name: str):
            return numbers.samples(connection, numbers.runs_named(connection, name))

        if options.new is None:
            old = side(options.old) if options.old else numbers.samples(connection, numbers.latest_runs(connection))
            rows = numbers.listing(old, numbers.against_peers(old))
        else:
            confirm = tuple(map(side, options.confirm)) if options.confirm else None
            rows = [numbers.as_row(c) for c in numbers.compare(side(options.old), side(options.new), confirm)]
    return _listing(options, rows)


def _block(root: Path, read_cache: bool = True, **sources) -> tuple[str, str]:
    """The block, and in words what of it came from memory."""
    from ledger.claims import open_judge
    from ledger.figures import remembered
    from ledger.matrix import block
    from ledger.survivors import lines, survivors
    from ledger.windows import flags

    judge = open_judge(root, use_cache=read_cache, **sources)
    found = [judge.status(claim, topology) for claim, topology in judge.claims.cells()]
    claims, published = judge.claims.claims, sources.get("evidence")
    measured = remembered(published, found, claims, judge.memory) if published else ()
    judge.memory.save()
    windows = {(s.id, s.topology): flags(s, claims[s.id]) for s in found}
    return block(found, windows, measured, lines(survivors(judge, root))), judge.memory.note()


def matrix(options: Namespace) -> int:
    """Print, write or check the README's block."""
    from ledger import matrix as blocks

    root = root_of(options)
    if options.local:
        print(_block(root, not options.full, ledger=options.ledger)[0], end="")
        return 0
    text, note = _block(root, not (options.full or options.write), evidence=root / EVIDENCE)
    readme = root / "README.md"
    if options.write:
        print("README.md rewritten" if blocks.write(readme, text) else "README.md is already right")
    elif options.check:
        found = blocks.difference(readme, text)
        print(found or note or "README.md agrees with every byte of the evidence", end="" if found else "\n")
        return 1 if found else 0
    else:
        print(text, end="")
    return 0
