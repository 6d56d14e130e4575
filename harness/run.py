"""`k3-harness run`: plan, submit, watch, collect, ingest; then the matrix and a sentence per cell that is not green."""

from __future__ import annotations

import argparse
from pathlib import Path

from rich.console import Console

from harness import mutate, progress, spool
from harness.collect import collect
from harness.planning import Session, add_selection, known_statuses, prepare, summary
from harness.spec import ClaimStatus, HarnessError
from harness.submit import executor, preview, submit
from harness.submit import prepare as write_run
from harness.watch import follow

INTERRUPTED = 130


def configure(parser: argparse.ArgumentParser) -> None:
    """Arguments of `k3-harness run`."""
    add_selection(parser)
    mutate.configure(parser)
    parser.add_argument("--dry-run", action="store_true", help="print the batch scripts and the cost; submit nothing")


def command(options: argparse.Namespace) -> int:
    """Run what is not settled. 0: every selected cell is proven; 1: some is not; 130: interrupted."""
    if options.sabotage:
        return mutate.command(options)
    if not options.names:
        raise HarnessError("run what? name suites, claims or test files, e.g. k3-harness run quick")
    console = Console(highlight=False)
    session = prepare(options)
    if options.dry_run:
        console.print(preview(session.plan, session.cluster, session.run_dir, session.nonce, session.snapshot),
                      soft_wrap=True, markup=False)  # fmt: skip
        spool.discard(session.run_dir)
        return 0
    try:
        interrupted = execute(session, console) if session.plan.expected else _nothing_to_run(session, console)
    finally:
        if not (session.run_dir / "run.json").exists():
            spool.discard(session.run_dir)
    code = report(session, console)
    return INTERRUPTED if interrupted else code


def execute(session: Session, console: Console) -> bool:
    """Submit and watch to the end; True when the user interrupted, after everything was ended and recorded."""
    console.print(summary(session.plan), soft_wrap=True)
    console.print(f"run {session.run_dir.name}, snapshot {session.snapshot.hash[:12]}{_dirt(session)}", soft_wrap=True)
    write_run(session.plan, session.snapshot, session.cluster, session.run_dir, session.nonce)
    try:
        submit(session.plan, session.cluster, session.run_dir)
        watch(session.run_dir, console, session.ledger)
    except KeyboardInterrupt:
        console.print("interrupted: ending every job of this run", soft_wrap=True)
        jobs = [job.job for job in session.plan.expected]
        executor(session.cluster).cancel(session.run_dir, jobs, "cancelled by the user (Ctrl-C)")
        collect(session.run_dir, session.ledger)
        return True
    return False


def watch(run_dir: Path, console: Console, ledger: Path | None) -> None:
    """Look until every job has ended, ingesting as they end."""
    with progress.Board(console, run_dir) as board:
        follow(run_dir, board.show, ledger)


def report(session: Session, console: Console) -> int:
    """Print the matrix of the selected cells, and why each one that is not green is not."""
    wanted = {(cell.claim, cell.topology) for cell in session.plan.cells}
    found = known_statuses(session.root, session.ledger)
    progress.matrix(console, found, published(session.root), wanted)
    sentences = progress.sentences(found, session.plan.cells)
    for sentence in sentences:
        console.print(sentence, soft_wrap=True, markup=False)
    if not sentences:
        console.print(f"all {len(wanted)} selected cells are proven")
    return 1 if sentences else 0


def published(root: Path) -> list[ClaimStatus]:
    """What ledger/evidence says of the same tree."""
    from ledger.claims import statuses

    evidence = root / "ledger" / "evidence"
    return statuses(root, evidence=evidence) if evidence.is_dir() else []


def _nothing_to_run(session: Session, console: Console) -> bool:
    reasons: dict[str, int] = {}
    for cell in session.plan.cells:
        reasons[cell.reason] = reasons.get(cell.reason, 0) + 1
    console.print("nothing to submit (--all runs settled cells anyway):")
    for reason, count in reasons.items():
        console.print(f"  {count} cells: {reason}", soft_wrap=True, markup=False)
    return False


def _dirt(session: Session) -> str:
    files = session.snapshot.dirty_files
    return f", {len(files)} files differ from commit {session.snapshot.commit[:12]}, e.g. {files[0]}" if files else ""
