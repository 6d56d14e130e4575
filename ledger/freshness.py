"""Compares recorded closures with a tree's content: what has changed since, by file and function. Never by commit.

Keeps a cache of pieces per file digest so that reading commands need not parse the tree each time.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path

import msgspec

from ledger.state import state_dir

DATA = "data::"
CACHE_FILE = "pieces-1.json"  # the number changes with the canonical form


class Tree:
    """A project tree as it is now. `known_data` are digests of declared inputs that lie outside of it."""

    def __init__(self, root: Path, known_data: frozenset[str] = frozenset(), use_cache: bool = True):
        self.root, self.known_data, self.use_cache = Path(root), known_data, use_cache
        self.files: dict[str, tuple[str, dict[str, str]]] = {}  # path -> (digest, pieces)
        self.fresh: dict[str, dict[str, str]] = {}  # digest -> pieces, not yet in the cache file
        self.data: dict[str, str] = {}  # data file -> digest
        self.seen: dict[str, str] = {}  # closure digest -> first difference

    def difference(self, closure: Mapping[str, str], name: str = "") -> str:
        """The first piece of a closure that is not the same here, or ''. `name` is the closure's digest, if known."""
        if name not in self.seen or not name:
            self.seen[name] = next((text for key in sorted(closure) if (text := self._differs(key, closure[key]))), "")
        return self.seen[name]

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
            self.data[path] = hashlib.sha256(file.read_bytes()).hexdigest()
        return "" if self.data[path] == recorded else f"data file {path} changed"

    def pieces(self, file: str) -> dict[str, str]:
        """Pieces of one file of the tree; empty if there is no such file."""
        return self._file(file)[1]

    def _file(self, file: str) -> tuple[str, dict[str, str]]:
        if file not in self.files:
            self.files[file] = self._load(file)
        return self.files[file]

    def _load(self, file: str) -> tuple[str, dict[str, str]]:
        try:
            data = (self.root / file).read_bytes()
        except OSError:
            return "", {}
        name = hashlib.sha256(data).hexdigest()
        if name not in self.cache:
            from ledger.runs import file_pieces

            self.cache[name] = self.fresh[name] = file_pieces(data)
        return name, self.cache[name]

    @cached_property
    def cache(self) -> dict[str, dict[str, str]]:
        try:
            data = self._cache_file.read_bytes() if self.use_cache else b"{}"
            return msgspec.json.decode(data, type=dict[str, dict[str, str]])
        except (OSError, msgspec.DecodeError, msgspec.ValidationError):
            return {}

    @property
    def _cache_file(self) -> Path:
        return state_dir() / CACHE_FILE

    def save_cache(self) -> None:
        """Remember newly hashed files. A cache that cannot be written costs time, never truth."""
        if not self.fresh or not self.use_cache:
            return
        kept = {**self.cache, **self.fresh} if len(self.cache) < 5_000 else self.fresh
        temporary = self._cache_file.with_suffix(f".{os.getpid()}.tmp")
        with contextlib.suppress(OSError):
            temporary.parent.mkdir(parents=True, exist_ok=True)
            temporary.write_bytes(msgspec.json.encode(kept))
            temporary.replace(self._cache_file)
        self.fresh = {}
