"""Compares recorded closures with a tree's content: what has changed since, by file and function. Never by commit.

Pieces are remembered per file digest, so that reading commands need not parse the tree each time.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from ledger.memory import Memory
from ledger.record import digest

DATA = "data::"


class Tree:
    """A project tree as it is now. `known_data` are digests of declared inputs that lie outside of it."""

    def __init__(self, root: Path, known_data: frozenset[str] = frozenset(), memory: Memory | None = None):
        self.root, self.known_data, self.memory = Path(root), known_data, memory or Memory(root)
        self.files: dict[str, dict[str, str]] = {}  # path -> pieces
        self.known: dict[str, str] = {}  # every piece of those files, as closures name them
        self.data: dict[str, str] = {}  # data file -> digest
        self.seen: dict[str, str] = {}  # closure digest -> first difference

    def difference(self, closure: Mapping[str, str], name: str = "") -> str:
        """The first piece of a closure that is not the same here, or ''. `name` is the closure's digest, if known."""
        if name not in self.seen or not name:
            self.seen[name] = "" if closure.items() <= self.known.items() else self._first(closure)
        return self.seen[name]

    def _first(self, closure: Mapping[str, str]) -> str:
        return next((text for key in sorted(closure) if (text := self._differs(key, closure[key]))), "")

    def _differs(self, key: str, recorded: str) -> str:
        if key.startswith(DATA):
            return self._data_differs(key.removeprefix(DATA), recorded)
        file, _, name = key.partition("::")
        found = self.pieces(file)
        if not found:
            return f"{file} is gone"
        if name not in found:
            return f"{file}: {name} is gone"
        return "" if found[name] == recorded else f"{file}: {name} changed"

    def _data_differs(self, path: str, recorded: str) -> str:
        file = self.root / path
        if recorded in self.known_data:
            return ""
        if not file.is_file():
            return f"data file {path} is gone"
        if path not in self.data:
            self.data[path] = self.memory.digest(file)
        return "" if self.data[path] == recorded else f"data file {path} changed"

    def pieces(self, file: str) -> dict[str, str]:
        """Pieces of one file of the tree; empty if there is no such file."""
        if file not in self.files:
            self.files[file] = self._load(file)
            self.known |= {f"{file}::{name}": value for name, value in self.files[file].items()}
        return self.files[file]

    def _load(self, file: str) -> dict[str, str]:
        path, table = self.root / file, self.memory.table("pieces")
        if (name := self.memory.digest(path)) in table:
            return table[name]
        try:
            data = path.read_bytes()
        except OSError:
            return {}
        from ledger.runs import file_pieces

        found = file_pieces(data)
        self.memory.add("pieces", digest(data), found)
        return found
