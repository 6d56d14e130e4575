"""What expires, on the real tree: every file of k3 mutated, every sabotage made again, a history of 60 commits.

    python -m tests.ledger.history [--ledger PATH] [--live N]

Works on the published evidence (or on a ledger) for the present tree. Edits are made in a scratch copy; nothing is
run again unless --live, which breaks N functions for real, runs the proven claims' tests there, and checks that
whatever fails had lost its green cell.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import random
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from harness import sabotage
from ledger import evidence
from ledger.canonical import FUNCTIONS, parse
from ledger.claims import Judge, known_inputs, open_judge
from ledger.db import connect_read
from ledger.facts import Fact
from ledger.freshness import Tree
from ledger.load import load_run
from ledger.runs import Run

ROOT = Path(__file__).resolve().parents[2]
PUBLISHED = ROOT / "ledger" / "evidence"
MODEL = ("model", "kda", "mla", "moe", "residual", "layers", "loss", "precision")
# What a commit touches, and how many of the sixty do.
COMMITS = {"README or tests": 24, "harness or ledger": 12, "one suite": 9, "one parallel file": 6, "one model file": 6,
           "dependency pins": 3}  # fmt: skip


class Bench:
    """A scratch copy of the project, and the proven facts whose closures are compared with it."""

    def __init__(self, ledger: Path | None, scratch: Path):
        self.judge = open_judge(ROOT, ledger) if ledger else open_judge(ROOT, evidence=PUBLISHED)
        self.root = scratch
        ignored = shutil.ignore_patterns("__pycache__", ".git", "evidence")
        for part in ("k3", "suites", "harness", "ledger", "tests"):
            shutil.copytree(ROOT / part, scratch / part, ignore=ignored)
        for name in ("pyproject.toml", "README.md"):
            shutil.copy(ROOT / name, scratch / name)
        self.facts = self.proven()

    def proven(self) -> dict[tuple[str, str], Fact]:
        """The fact behind every cell that is proven at the present tree."""
        found = {}
        for claim, topology in self.judge.claims.cells():
            status = self.judge.status(claim, topology)
            if status.state == "proven":
                facts = self.judge.decided(claim, topology)
                found[claim.id, topology.name] = next(o.fact for o in facts if o.fact.run == status.run)
        return found

    def stale(self) -> dict[tuple[str, str], str]:
        """Cells that are not proven at the scratch tree as it is now, with the first difference."""
        tree = Tree(self.root, known_inputs(self.judge.claims))
        judge = Judge(self.judge.claims, tree, self.judge.facts)
        named = {
            cell: tree.difference(judge.facts.closure(fact.closure), fact.closure) for cell, fact in self.facts.items()
        }
        return {cell: why for cell, why in named.items() if why}

    def rerun(self, cells) -> None:
        """Take the scratch tree's pieces for a cell's own, as a run there would record them."""
        tree = Tree(self.root)
        for cell in cells:
            closure = self.judge.facts.closure(self.facts[cell].closure)
            for key in closure:
                file, _, name = key.partition("::")
                if file != "data" and name in tree.pieces(file):
                    closure[key] = tree.pieces(file)[name]


# --- edits ----------------------------------------------------------------------------------------------------


def bodies(text: str) -> list[str]:
    """Functions whose body can be changed by a line of its own."""
    return sorted({f.qualname for f in parse(text).functions if _line_of(f.node) is not None})


def _line_of(node: ast.AST) -> int | None:
    """The line of the first statement after the docstring; None for a body on its def line."""
    first = node.body[0]
    if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and len(node.body) > 1:
        first = node.body[1]
    line = min([first.lineno, *(d.lineno for d in getattr(first, "decorator_list", ()))])
    return None if line == node.lineno else line


def change_body(path: Path, qualname: str, statement: str = "changed = None") -> None:
    """Put one more statement at the beginning of a function's body."""
    text = path.read_text()
    lines = text.splitlines(keepends=True)
    node = next(f.node for f in parse(text).functions if f.qualname == qualname and _line_of(f.node) is not None)
    line = _line_of(node)
    indent = lines[line - 1][: len(lines[line - 1]) - len(lines[line - 1].lstrip())]
    lines.insert(line - 1, f"{indent}{statement}\n")
    path.write_text("".join(lines))


def constants(text: str) -> list[ast.Constant]:
    """Numbers and texts at module level: constants, class attributes and defaults."""
    return list(_constants(ast.parse(text)))


def _constants(node: ast.AST) -> Iterator[ast.Constant]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, FUNCTIONS):
            yield from (d for d in [*child.args.defaults, *child.args.kw_defaults] if _is_plain(d))
        elif isinstance(child, (ast.Assign, ast.AnnAssign)) and child.value is not None:
            yield from (n for n in ast.walk(child.value) if _is_plain(n))
        elif isinstance(child, ast.ClassDef):
            yield from _constants(child)


def _is_plain(node: ast.AST | None) -> bool:
    return (
        isinstance(node, ast.Constant)
        and type(node.value) in (int, float, str, bool)
        and node.end_lineno == node.lineno
    )


def change_constant(path: Path, node: ast.Constant) -> None:
    """Write another value in a constant's place."""
    value = node.value
    other = not value if isinstance(value, bool) else value + 1 if isinstance(value, (int, float)) else value + "_"
    lines = path.read_text().splitlines(keepends=True)
    line = lines[node.lineno - 1].encode()
    lines[node.lineno - 1] = (line[: node.col_offset] + repr(other).encode() + line[node.end_col_offset :]).decode()
    path.write_text("".join(lines))


# --- sixty commits ----------------------------------------------------------------------------------------------


def commit(bench: Bench, kind: str, number: int, choose: random.Random) -> str:
    """Make one commit's edit; returns what was edited."""
    root = bench.root
    if kind == "dependency pins":
        path = root / "pyproject.toml"
        path.write_text(path.read_text() + f"# pin {number}\n")
        return path.name
    if kind == "README or tests" and number % 2:
        (root / "README.md").write_text((root / "README.md").read_text() + f"\nEdited {number}.\n")
        return "README.md"
    folders = {"README or tests": ["tests"], "harness or ledger": ["harness", "ledger"], "one suite": ["suites"],
               "one parallel file": ["k3/parallel"], "one model file": ["k3"]}[kind]  # fmt: skip
    files = [path for folder in folders for path in sorted((root / folder).rglob("*.py")) if bodies(path.read_text())]
    if kind == "one model file":
        files = [root / "k3" / f"{name}.py" for name in MODEL if bodies((root / "k3" / f"{name}.py").read_text())]
    if kind == "one suite":
        tested = {test.split("::")[0] for claim in bench.judge.claims.claims.values() for test in claim.tests}
        files = [path for path in files if path.relative_to(root).as_posix() in tested]
    path = choose.choice(files)
    name = choose.choice(bodies(path.read_text()))
    change_body(path, name, f"changed = {number}")
    return f"{path.relative_to(root).as_posix()}: {name}"


def history(bench: Bench, seed: int = 0) -> None:
    """Sixty commits in a shuffled order; after each, what must run again and what that costs."""
    choose = random.Random(seed)
    kinds = [kind for kind, count in COMMITS.items() for _ in range(count)]
    choose.shuffle(kinds)
    whole = sum(fact.duration_s for fact in bench.facts.values())
    cost, cells = Counter(), Counter()
    for number, kind in enumerate(kinds, start=1):
        commit(bench, kind, number, choose)
        stale = bench.stale()
        cost[kind] += sum(bench.facts[cell].duration_s for cell in stale)
        cells[kind] += len(stale)
        bench.rerun(stale)
    print(f"{len(bench.facts)} proven cells, {whole:.0f} s to run everything; 60 commits, seed {seed}\n")
    print("| commits | number | cells to run again | run cost | of everything again |\n|---|---|---|---|---|")
    for kind, count in COMMITS.items():
        print(f"| {kind} | {count} | {cells[kind]} | {cost[kind]:.0f} s | {cost[kind] / (whole * count):.1%} |")
    total = sum(cost.values())
    print(f"| all | 60 | {sum(cells.values())} | {total:.0f} s | **{total / (60 * whole):.1%}** |")


# --- every file mutated -------------------------------------------------------------------------------------------


def dependents(ledger: Path | None, bench: Bench) -> dict[str, set[tuple[str, str]]]:
    """Piece -> cells some test of which recorded it on some rank: read from the raw records, not from the verdicts."""
    found: dict[str, set[tuple[str, str]]] = {}
    for run in _runs(ledger, {fact.run for fact in bench.facts.values()}):
        jobs = {e.job: e for e in run.record.expected}
        for stream in run.streams:
            expected = jobs[stream.job]
            for _, row, _ in stream.tests:
                name = row.test.split("[")[0]
                for claim in run.record.claims:
                    cell = (claim.id, expected.topology.name)
                    chosen = claim.id in expected.claims and (name in claim.tests or row.test in claim.tests)
                    if chosen and bench.facts.get(cell) and bench.facts[cell].run == run.record.run:
                        for piece in run.closures[run.closure_of(row)]:
                            found.setdefault(piece, set()).add(cell)
    return found


def _runs(ledger: Path | None, names: set[str]) -> Iterator[Run]:
    if ledger is None:
        yield from (file.run for file in evidence.read_folder(PUBLISHED) if file.run.record.run in names)
        return
    with contextlib.closing(connect_read(ledger)) as connection:
        yield from (load_run(connection, name) for name in sorted(names))


def mutations(bench: Bench, ledger: Path | None, seed: int = 0) -> None:
    """Mutate one body and one constant of each file of k3; every dependent cell must lose its green."""
    choose, depends = random.Random(seed), dependents(ledger, bench)
    rows, missed = [], 0
    for path in sorted((bench.root / "k3").rglob("*.py")):
        file, text = path.relative_to(bench.root).as_posix(), path.read_text()
        for kind, piece, change in _changes(path, file, text, choose, depends):
            wanted = depends.get(piece, set())
            change()
            stale = set(bench.stale())
            path.write_text(text)
            missed += len(wanted - stale)
            rows.append((piece, kind, len(wanted), len(stale), len(wanted - stale)))
    print("\n| mutated | how | cells that depend on it | cells no longer green | missed |\n|---|---|---|---|---|")
    for row in rows:
        print(f"| `{row[0]}` | {row[1]} | {row[2]} | {row[3]} | {row[4]} |")
    by_folder(rows)
    print(f"\n{len(rows)} mutations in {len({r[0].split('::')[0] for r in rows})} files: {missed} missed.\n")


def by_folder(rows: list[tuple]) -> None:
    """The table of the README: the same, summed over the files of each folder."""
    print(
        "\n| files of | mutations | dependent cells, summed | no longer green | of them missed |\n|---|---|---|---|---|"
    )
    folders: dict[str, list[tuple]] = {}
    for row in rows:
        folders.setdefault(row[0].split("::")[0].rpartition("/")[0], []).append(row)
    for folder, found in folders.items():
        sums = [sum(row[place] for row in found) for place in (2, 3, 4)]
        print(f"| `{folder}/` | {len(found)} | {' | '.join(map(str, sums))} |")


def _changes(path: Path, file: str, text: str, choose: random.Random, depends: dict):
    names = bodies(text)
    used = [name for name in names if f"{file}::{name}" in depends] or names
    if used:
        name = choose.choice(used)
        yield "body", f"{file}::{name}", lambda: change_body(path, name)
    if found := constants(text):
        node = choose.choice(found)
        yield "constant", f"{file}::<module>", lambda: change_constant(path, node)


# --- failures that really happened --------------------------------------------------------------------------------


def failures(bench: Bench) -> None:
    """Make every recorded sabotage again: each cell whose tests failed under it must lose its green."""
    failed: dict[str, set[tuple[str, str]]] = {}
    for fact in (fact for facts in bench.judge.facts.sabotage.values() for fact in facts):
        if fact.outcome == "failed" and (fact.claim, fact.topology) in bench.facts:
            failed.setdefault(fact.sabotage, set()).add((fact.claim, fact.topology))
    known = sabotage.read(bench.root)
    edits, green = 0, []
    for name in sorted(failed.keys() & known.keys()):
        path = bench.root / known[name].file
        text = path.read_text()
        path.write_text(sabotage.edited(known[name], text))
        green += [f"{name}: {' on '.join(cell)}" for cell in failed[name] - set(bench.stale())]
        path.write_text(text)
        edits += 1
    pairs = sum(len(failed[name]) for name in failed.keys() & known.keys())
    print(f"{edits} sabotages made again, under which tests of {pairs} cells had failed: {len(green)} still green.\n")
    print("".join(f"still green: {text}\n" for text in green))


# --- for real -----------------------------------------------------------------------------------------------------


def live(bench: Bench, count: int, ledger: Path | None, seed: int = 0) -> None:
    """Break functions that tests executed, run every proven one-rank claim, and look for failures in green cells."""
    choose, depends = random.Random(seed), dependents(ledger, bench)
    pieces = [p for p in sorted(depends) if p.startswith("k3/") and not p.endswith("<module>")]
    pieces = [p for p in pieces if p.split("::")[1] in bodies((bench.root / p.split("::")[0]).read_text())]
    sound = [claim for claim in _claims(bench) if _passes(bench, claim)]
    print(f"\n{len(sound)} one-rank claims pass here unbroken\n")
    print("| broken | claims that failed | of them still green |\n|---|---|---|")
    for piece in choose.sample(pieces, count):
        file, _, name = piece.partition("::")
        path, text = bench.root / file, (bench.root / file).read_text()
        change_body(path, name, "raise RuntimeError('broken on purpose')")
        stale = {claim for claim, _ in bench.stale()}
        failed = {claim for claim in sound if not _passes(bench, claim)}
        path.write_text(text)
        print(f"| `{piece}` | {len(failed)} | {', '.join(sorted(failed - stale)) or 0} |", flush=True)


def _claims(bench: Bench) -> list[str]:
    return sorted({claim for claim, topology in bench.facts if bench.judge.claims.topologies[topology].ranks == 1})


def _passes(bench: Bench, claim: str) -> bool:
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-x",
        "-p",
        "no:cacheprovider",
        *bench.judge.claims.claims[claim].tests,
    ]
    return subprocess.run(command, cwd=bench.root, capture_output=True, check=False).returncode == 0


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--ledger", type=Path)
    options.add_argument("--live", type=int, default=0, metavar="N")
    options.add_argument("--seed", type=int, default=0)
    chosen = options.parse_args()
    for part in (lambda b: mutations(b, chosen.ledger, chosen.seed), failures, lambda b: history(b, chosen.seed),
                 lambda b: live(b, chosen.live, chosen.ledger, chosen.seed) if chosen.live else None):  # fmt: skip
        with tempfile.TemporaryDirectory() as place:
            part(Bench(chosen.ledger, Path(place) / "tree"))


if __name__ == "__main__":
    main()
