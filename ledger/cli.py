"""k3-ledger: reads the ledger and the published evidence, and answers. Only export, import and matrix --write write."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from ledger import commands
from ledger.claimfile import CLAIM_FILE, ClaimFileError

LISTING = (("--json", "print JSON"), ("--csv", "print CSV"))


def main(arguments: list[str] | None = None) -> int:
    """Run one command; returns the exit code: 0 good, 1 a check failed, 2 it could not be done as asked."""
    options = parser().parse_args(arguments)
    try:
        return options.run(options)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the reader has gone: say nothing more
        return 0
    except (ValueError, RuntimeError) as error:
        if not (isinstance(error, ClaimFileError) or type(error).__module__.startswith("ledger.")):
            raise
        print(f"k3-ledger: {error}", file=sys.stderr)
        return 2


def parser() -> argparse.ArgumentParser:
    """The whole command line; every option says what it does."""
    top = argparse.ArgumentParser(prog="k3-ledger", description="What is proven, by what, and what would revoke it.")
    top.set_defaults(run=lambda _: top.print_help() or 2)
    verbs = top.add_subparsers(title="commands", metavar="COMMAND")
    claims = add(verbs, "claims", commands.claims, "the state and grade of every cell at this tree", LISTING)
    claims.add_argument("claim", nargs="*", help="claim ids or suite names; all if none")
    claims.add_argument("--published", action="store_true", help="from ledger/evidence/ alone, as the README is")
    show = add(verbs, "show", commands.show, "one run: jobs, attempts, outcomes, measures", LISTING)
    show.add_argument("id", nargs="?", help="a run id or its beginning; lists the latest runs if left out")
    why = add(verbs, "why", commands.why, "the chain of evidence of one claim, and what would revoke it", LISTING[:1])
    why.add_argument("claim", help="a claim id")
    query = add(verbs, "query", commands.query, "read-only SQL on the ledger; without SQL, its tables", LISTING)
    query.add_argument("sql", nargs="?", help="a SELECT; see the tables with `k3-ledger query`")
    bench = add(verbs, "bench", commands.bench, "measured numbers: the latest, or one run's against another's", LISTING)
    bench.add_argument("old", nargs="?", help="a run id or commit (or its beginning); the latest measures if left out")
    bench.add_argument("new", nargs="?", help="what to compare with it; only the old side's peers if left out")
    bench.add_argument("--confirm", nargs=2, metavar=("OLD", "NEW"), help="a later allocation that confirms a slowdown")
    matrix = add(verbs, "matrix", commands.matrix, "the README's matrix from ledger/evidence/ and this tree")
    matrix.add_argument("--write", action="store_true", help="replace the block in README.md")
    matrix.add_argument("--check", action="store_true", help="print a diff and exit 1 if README.md disagrees")
    matrix.add_argument("--full", action="store_true", help="read every byte again, whatever was read before")
    matrix.add_argument("--local", action="store_true", help="from this user's ledger instead (never into README.md)")
    verify = add(
        verbs, "verify", commands.verify, "look for lies in evidence, ledger and run directories, and print one"
    )
    verify.add_argument("--all", action="store_true", help="print every lie, not only the first")
    verify.add_argument("--full", action="store_true", help="read every byte again, whatever was verified before")
    verify.add_argument("--runs", metavar="DIR", type=Path, help="run directories (default: the user's spool)")
    export = add(verbs, "export", commands.export, "publish runs as signed, chained files without names or paths")
    export.add_argument("run_id", nargs="*", help="run ids; those that the present verdicts rest on if none")
    export.add_argument("--out", metavar="DIR", type=Path, help="folder (default: ledger/evidence/ of the project)")
    export.add_argument("--unsigned", action="store_true", help="write without a signature")
    export.add_argument("--prune", action="store_true", help="remove own files that decide nothing any more")
    export.add_argument("--public-key", action="store_true", help="print the file for ledger/keys/ and stop")
    export.add_argument("--label", default="", help="with --public-key: who signs, in a word")
    export.add_argument("--cluster", default="", help="with --public-key: for which cluster this key speaks")
    imports = add(verbs, "import", commands.import_, "take evidence files, or folders of them, into the ledger")
    imports.add_argument("path", nargs="+", type=Path, help="evidence files or folders")
    return top


def add(verbs, name: str, run, text: str, flags=()) -> argparse.ArgumentParser:
    """One command with the options that all share."""
    one = verbs.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
    one.add_argument("--ledger", metavar="PATH", type=Path, help="ledger file (default: the user's state folder)")
    one.add_argument("--root", metavar="DIR", type=Path, help="project (default: around the current folder)")
    if flags:
        group = one.add_mutually_exclusive_group()
        for flag, meaning in flags:
            group.add_argument(flag, action="store_true", help=meaning)
    one.set_defaults(run=run, name=name)
    return one


def find_root(start: Path | None) -> Path:
    """The project around `start` or the current folder, else the one this package lies in."""
    here = (start or Path.cwd()).resolve()
    for folder in (here, *here.parents, Path(__file__).resolve().parent.parent):
        if (folder / CLAIM_FILE).is_file():
            return folder
    raise ClaimFileError(f"{here} is not inside a project: no {CLAIM_FILE} there or above; pass --root DIR")


if __name__ == "__main__":
    sys.exit(main())
