"""An immutable copy of the working tree: dirty and untracked files included and named, hashed file by file.

Jobs run this copy, never the live tree. Works with git (which then decides what is ignored) and without.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

from harness.spec import HarnessError
from ledger.record import digest

PACKAGES = ("k3", "suites", "harness", "ledger")
PARTS = (*PACKAGES, "pyproject.toml")
LEFT_OUT = ("ledger/evidence",)
OWN_BYTE_CODE = re.compile(r"^(harness|ledger)/(.*/)?__pycache__/")
NEVER = ("__pycache__", ".*", "*.pyc", "*.egg-info", "*.tmp")


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """A copied tree: where it lies, its manifest (path -> SHA-256), and what git said of the original."""

    path: Path
    manifest: dict[str, str]
    commit: str = ""
    dirty_files: tuple[str, ...] = ()

    @property
    def hash(self) -> str:
        """SHA-256 of the canonical manifest: the identity of what runs."""
        return digest(self.manifest)


def find_root(start: Path | None = None) -> Path:
    """The project around `start`: the nearest folder above it with suites/claims.toml, else the installed one."""
    start = Path.cwd() if start is None else Path(start).resolve()
    candidates = (start, *start.parents, Path(__file__).resolve().parent.parent)
    for folder in candidates:
        if (folder / "suites" / "claims.toml").is_file():
            return folder
    raise HarnessError(f"{start} is not inside a project (no suites/claims.toml there or above); change into the clone")


def files(root: Path) -> list[str]:
    """Relative paths that belong to a snapshot of `root`, sorted."""
    listed = _from_git(root) or _from_walk(root)
    kept = {path for path in listed if not path.startswith(tuple(f"{part}/" for part in LEFT_OUT))}
    return sorted(path for path in kept if (root / path).is_file())


def take(root: Path, target: Path) -> Snapshot:
    """Copy the tree to `target` (which must not exist) and make every file read-only."""
    paths = files(root)
    if "suites/claims.toml" not in paths:
        raise HarnessError(f"{root} has no suites/claims.toml to copy (is it ignored by git?); a snapshot needs it")
    target.mkdir(parents=True)
    for path in paths:
        copy = target / path
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(root / path, copy)
        copy.chmod(0o444)
    commit, dirty = git_state(root)
    return Snapshot(path=target, manifest=manifest(target), commit=commit, dirty_files=dirty)


def look(root: Path, digest_of: Callable[[Path], str]) -> Snapshot:
    """The tree as it lies, not copied: what `take` would call it, for those who only read. Git is not asked."""
    return Snapshot(path=root, manifest={path: digest_of(root / path) or sha256(root / path) for path in files(root)})


def manifest(tree: Path) -> dict[str, str]:
    """Hash every file below `tree` but our own byte code: nothing may hide beside what was copied."""
    return {path: sha256(tree / path) for path in sorted(_everything(tree))}


def differences(expected: dict[str, str], tree: Path) -> list[str]:
    """What is changed, missing or added in `tree`, one short line each."""
    found = manifest(tree)
    lines = [f"{path} changed" for path in expected if path in found and found[path] != expected[path]]
    lines += [f"{path} missing" for path in expected if path not in found]
    return sorted(lines + [f"{path} added" for path in found if path not in expected])


def sha256(path: Path) -> str:
    """SHA-256 of a file's bytes (hex)."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def origins(tree: Path) -> dict[str, str]:
    """Where our packages resolve in this process: relative to the snapshot `tree`, absolute when outside it."""
    found = {}
    for name in PACKAGES:
        spec = importlib.util.find_spec(name)
        origin = Path(spec.origin).resolve() if spec and spec.origin else Path("/nowhere")
        found[name] = str(origin.relative_to(tree.resolve()) if origin.is_relative_to(tree.resolve()) else origin)
    return found


def search_path(tree: Path) -> str:
    """PYTHONPATH for a process that runs the snapshot `tree`: it, then the caller's own less other copies of us."""
    entries = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    others = [entry for entry in entries if not any((Path(entry) / name).is_dir() for name in PACKAGES)]
    return os.pathsep.join([str(tree), *others])


def git_state(root: Path) -> tuple[str, tuple[str, ...]]:
    """The commit and the files of the snapshot's parts that differ from it; ('', ()) where there is no git."""
    commit = _git(root, "rev-parse", "--verify", "HEAD")
    if commit is None:
        return "", ()
    status = _git(root, "status", "--porcelain", "-z", "--untracked-files=all", "--no-renames", "--", *_present(root))
    dirty = (line[3:] for line in (status or "").split("\0") if line)
    prefix = (_git(root, "rev-parse", "--show-prefix") or "").strip()
    return commit.strip(), tuple(sorted(path.removeprefix(prefix) for path in dirty if not _left_out(path, prefix)))


def discard(tree: Path) -> None:
    """Remove a snapshot that nothing will run."""
    shutil.rmtree(tree)


def _left_out(path: str, prefix: str) -> bool:
    return path.removeprefix(prefix).startswith(LEFT_OUT)


def _present(root: Path) -> list[str]:
    return [part for part in PARTS if (root / part).exists()]


def _from_git(root: Path) -> list[str]:
    """Tracked and untracked, less what git ignores; empty where git does not know this tree."""
    listed = _git(root, "ls-files", "-z", "--cached", "--others", "--exclude-standard", "--", *_present(root))
    return [path for path in (listed or "").split("\0") if path]


def _from_walk(root: Path) -> list[str]:
    found = []
    for part in _present(root):
        found += [part] if (root / part).is_file() else [f"{part}/{path}" for path in _walk(root / part, NEVER)]
    return found


def _everything(tree: Path) -> list[str]:
    """The launcher may leave byte code of harness and ledger; of the subject none is tolerated."""
    return [path for path in _walk(tree, ()) if not OWN_BYTE_CODE.match(path)]


def _walk(tree: Path, skipped: tuple[str, ...]) -> list[str]:
    found = []
    for folder, subfolders, names in os.walk(tree):
        subfolders[:] = sorted(name for name in subfolders if not _matches(name, skipped))
        below = Path(folder).relative_to(tree)
        found += [(below / name).as_posix() for name in sorted(names) if not _matches(name, skipped)]
    return found


def _matches(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatch(name, pattern) for pattern in patterns)


def _git(root: Path, *arguments: str) -> str | None:
    """git's answer, or None where git is missing or this is no repository."""
    if shutil.which("git") is None:
        return None
    asked = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True, check=False)
    return asked.stdout if asked.returncode == 0 else None
