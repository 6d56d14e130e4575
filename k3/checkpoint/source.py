"""A checkpoint folder opened for reading: checked as a whole from index and headers, then read slice by slice.

Nothing is read before everything the folder says about itself agrees. Imports torch only to hand out tensors.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from k3.checkpoint.errors import CheckpointError
from k3.checkpoint.header import Stored, read_header
from k3.checkpoint.index import INDEX_FILE, read_index
from k3.checkpoint.names import is_ignored
from k3.checkpoint.release import Release

if TYPE_CHECKING:
    import torch

SINGLE_FILE = "model.safetensors"
# Present while a save replaces files: see k3.checkpoint.commit.
JOURNAL = "k3-save-in-progress.json"


@dataclass
class Source:
    """An opened folder. `stored` says where every key is; `read` returns a box of it."""

    folder: Path
    stored: dict[str, Stored]
    _files: ExitStack = field(default_factory=ExitStack)
    _open: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def open(cls, folder: str | Path) -> Source:
        """Check journal, index and every shard's header. Raises CheckpointError naming file and key."""
        folder = Path(folder)
        refuse_interrupted(folder)
        weight_map = read_weight_map(folder)
        headers = {file: read_header(folder / file) for file in sorted(set(weight_map.values()))}
        _check_places(weight_map, headers)
        source = cls(folder, {name: headers[file][name] for name, file in weight_map.items()})
        source._check_pairs()
        return source

    def __enter__(self) -> Source:
        return self

    def __exit__(self, *exc) -> None:
        self.close()

    def close(self) -> None:
        self._files.close()
        self._open.clear()

    def read(self, name: str, box: tuple[slice, ...] = ()) -> torch.Tensor:
        """Return a box of a stored tensor, reading only its bytes. Raises CheckpointError naming file and key."""
        from safetensors import SafetensorError, safe_open

        entry = self.stored[name]
        try:
            if entry.file not in self._open:
                self._drop_oldest()
                self._open[entry.file] = safe_open(str(self.folder / entry.file), "pt")
            return self._open[entry.file].get_slice(name)[box or ...]
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{entry.file}: reading {name} failed: {error}") from error

    def _drop_oldest(self, kept: int = 8) -> None:
        while len(self._open) >= kept:
            self._open.pop(next(iter(self._open)))

    def is_packed(self, name: str) -> bool:
        """Whether the weight `name` is stored as codes and scales; decided by the names that exist, nothing else."""
        return name + "_packed" in self.stored

    def weights(self) -> Iterator[str]:
        """Every stored weight by its plain name, a pair counted once."""
        for name in self.stored:
            if not name.endswith("_scale"):
                yield name.removesuffix("_packed")

    def _check_pairs(self) -> None:
        for name, entry in self.stored.items():
            stem, _, half = name.rpartition("_")
            other = stem + {"packed": "_scale", "scale": "_packed"}.get(half, "")
            if half in ("packed", "scale") and stem.endswith(".weight"):
                if other not in self.stored:
                    raise CheckpointError(f"{entry.file}: {name} has no {other}; both halves are needed")
                if stem in self.stored:
                    raise CheckpointError(f"{entry.file}: {stem} is stored both plain and packed; keep one")
                if self.stored[other].file != entry.file:
                    raise CheckpointError(f"{name} is in {entry.file} but {other} in {self.stored[other].file}")

    def check(self, config: Any) -> list[str]:
        """Compare every key with what `config` demands; return the ignored keys.

        Raises CheckpointError for a key that is missing, unknown, or of another dtype or shape.
        """
        plain = Release(config, "bf16")
        packed = Release(config, "mxfp4") if any(name.endswith("_packed") for name in self.stored) else plain
        ignored = [name for name in self.stored if is_ignored(name)]
        for name, entry in self.stored.items():
            if not is_ignored(name):
                release = packed if name.endswith(("_packed", "_scale")) else plain
                _check_entry(name, entry, release.find(name))
        for tensor in plain.tensors():
            if tensor.name not in self.stored and not self.is_packed(tensor.name):
                raise CheckpointError(f"{self.folder}: {tensor.name} is missing; the configuration demands it")
        return ignored


def refuse_interrupted(folder: Path) -> None:
    """Raise CheckpointError when a save stopped while it replaced the files of this folder."""
    if (folder / JOURNAL).exists():
        raise CheckpointError(
            f"{folder} holds {JOURNAL}: a save stopped while it replaced files; "
            "finish it with `k3-validate-checkpoint recover`, or save again"
        )


def read_weight_map(folder: Path) -> dict[str, str]:
    """Return file of every key: from the index, or from the single file of a small checkpoint."""
    if (folder / INDEX_FILE).exists():
        weight_map = read_index(folder / INDEX_FILE).weight_map
        for name, file in weight_map.items():
            if "/" in file or not file.endswith(".safetensors"):
                raise CheckpointError(f"{INDEX_FILE}: {name} is in {file!r}, which is no shard beside the index")
        return weight_map
    if (folder / SINGLE_FILE).exists():
        return dict.fromkeys(read_header(folder / SINGLE_FILE), SINGLE_FILE)
    raise CheckpointError(f"{folder} has neither {INDEX_FILE} nor {SINGLE_FILE}; it is not a complete checkpoint")


def _check_places(weight_map: dict[str, str], headers: dict[str, dict[str, Stored]]) -> None:
    """Every key is in the shard the index gives, in no other shard, and no shard holds a key the index lacks."""
    for file, header in headers.items():
        for name in header:
            expected = weight_map.get(name)
            if expected is None:
                raise CheckpointError(f"{file} holds {name}, which the index does not name")
            if expected != file:
                also = "also" if name in headers[expected] else "only"
                raise CheckpointError(f"{name} is {also} in {file}, the index says {expected}; every key has one place")
    for name, file in weight_map.items():
        if name not in headers[file]:
            raise CheckpointError(f"{file} does not hold {name}, which the index places there")


def _check_entry(name: str, entry: Stored, expected: Any) -> None:
    if expected is None:
        raise CheckpointError(f"{entry.file}: {name} is no tensor of this configuration; remove it or fix the config")
    if (entry.dtype, entry.shape) != (expected.dtype, expected.shape):
        raise CheckpointError(
            f"{entry.file}: {name} is {entry.dtype} {list(entry.shape)}, "
            f"the configuration demands {expected.dtype} {list(expected.shape)}"
        )


def read_config(folder: str | Path) -> dict[str, Any]:
    """Return config.json of a folder. Raises CheckpointError when it is missing or no JSON."""
    path = Path(folder) / "config.json"
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: {error}; a checkpoint folder needs its configuration") from error
