"""Which tests a tree really has: pytest collects them inside the snapshot, in a process of its own."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from harness.revision import search_path
from harness.spec import TestItem
from ledger.facts import selects

DROPPED = ("PYTEST_", "PYTHON", "K3_JOB")
TIMEOUT_S = 300


@dataclass(frozen=True, kw_only=True)
class Discovery:
    """What collection found: tests in collection order, and what is wrong with which file."""

    items: tuple[TestItem, ...]
    errors: dict[str, str]  # suite file -> why its tests cannot be planned

    def select(self, wanted: str) -> list[TestItem]:
        """The tests that a claim's entry names: that id, or all parameters of it."""
        return [item for item in self.items if selects(wanted, item.id)]


def discover(tree: Path, files: list[str]) -> Discovery:
    """Collect `files` (relative to the snapshot `tree`). Faults are returned by file, so that the rest can go on."""
    present = [file for file in files if (tree / file).is_file()]
    errors = {file: f"{file} does not exist; was it renamed?" for file in files if file not in present}
    errors |= {file: fault for file in present if (fault := _twice_defined(tree / file, file))}
    if not present:
        return Discovery(items=(), errors=errors)
    with tempfile.TemporaryDirectory(prefix="k3-collect-") as folder:
        answer = Path(folder) / "items.json"
        asked = _collect(tree, present, answer)
        if not answer.is_file():
            said = (asked.stderr or asked.stdout).strip().splitlines() or ["nothing"]
            return Discovery(items=(), errors=errors | dict.fromkeys(present, f"pytest could not collect: {said[-1]}"))
        raw = json.loads(answer.read_bytes())
    if asked.returncode not in (0, 2, 5) and not raw["errors"]:
        raw["errors"] = [{"file": file, "text": asked.stderr or asked.stdout} for file in present]
    errors = {_file_of(fault["file"], present): _short(fault["text"]) for fault in raw["errors"]} | errors
    return Discovery(items=tuple(TestItem(id=i["id"], ranks=tuple(i["ranks"])) for i in raw["items"]), errors=errors)


def _collect(tree: Path, files: list[str], answer: Path) -> subprocess.CompletedProcess:
    env = {name: value for name, value in os.environ.items() if not name.startswith(DROPPED)}
    env |= {
        "PYTHONPATH": search_path(tree), "PYTHONDONTWRITEBYTECODE": "1", "K3_COLLECT_TO": str(answer),
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
    }  # fmt: skip
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", *files, f"--rootdir={tree}"]
    command += [f"-c{tree / 'pyproject.toml'}", "-oaddopts=", "--strict-markers", "-pno:cacheprovider"]
    command += ["-pharness.collecting", "-ppytest_timeout", "-ppytest_benchmark.plugin"]
    return subprocess.run(command, cwd=tree, env=env, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)


def _twice_defined(path: Path, name: str) -> str:
    """A test defined twice hides its first body; pytest collects the last one without a word."""
    try:
        body = ast.parse(path.read_text()).body
    except SyntaxError as error:
        return f"{name}:{error.lineno}: {error.msg}"
    scopes = [("", body), *((f"{node.name}::", node.body) for node in body if isinstance(node, ast.ClassDef))]
    counts = Counter(f"{prefix}{node.name}" for prefix, nodes in scopes for node in nodes if _is_test(node))
    twice = [test for test, count in counts.items() if count > 1]
    return f"{name} defines {', '.join(twice)} more than once, and only the last would run; rename one" if twice else ""


def _is_test(node: ast.stmt) -> bool:
    return isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test")


def _file_of(node_id: str, files: list[str]) -> str:
    return next((file for file in files if node_id.startswith(file)), node_id)


def _short(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line.removeprefix("E ").strip() for line in lines if line.startswith("E ")]
    return (errors or lines or ["unknown error"])[-1]
