"""Toolchain windows: versions known to be bad, as data with links, and where a claim's evidence stands among them.

Flags, never verdicts: a flagged cell keeps its state, and its reader sees why to doubt it.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import msgspec

from ledger.record import Claim, ClaimStatus, Record, check_schema

FILE = Path(__file__).with_name("known_bad.toml")
DISTRIBUTIONS = {"fla": "fla-core"}


class Window(Record, kw_only=True):
    """One range of versions of one package in which something is wrong."""

    package: str
    versions: str
    text: str
    links: tuple[str, ...]
    gpu: str = ""
    paths: tuple[str, ...] = ()

    def covers(self, version: str) -> bool:
        from packaging.specifiers import SpecifierSet
        from packaging.version import InvalidVersion, Version

        try:
            return Version(version) in SpecifierSet(self.versions, prereleases=True)
        except InvalidVersion:
            return False

    def __str__(self) -> str:
        where = f" on {self.gpu.replace('|', ', ')}" if self.gpu else ""
        return f"{self.package} {self.versions}{where}: {self.text} ({', '.join(self.links)})"


@cache
def windows() -> tuple[Window, ...]:
    """All known-bad windows."""
    raw = tomllib.loads(FILE.read_text(encoding="utf-8"))
    check_schema(raw)
    return msgspec.convert(raw["windows"], tuple[Window, ...])


def versions(toolchain: str) -> dict[str, str]:
    """'torch 2.13.0+cpu, python 3.11' -> {'torch': '2.13.0+cpu', 'python': '3.11'}."""
    return dict(part.split(" ", 1) for part in toolchain.split(", ") if " " in part)


def flags(status: ClaimStatus, claim: Claim) -> list[Window]:
    """The windows that a cell's evidence lies in."""
    found = versions(status.toolchain)
    return [window for window in windows() if window.package in found and window.covers(found[window.package])
            and _concerns(window, status.device, claim.paths)]  # fmt: skip


def _concerns(window: Window, device: str, paths: Iterable[str]) -> bool:
    on_device = not window.gpu or re.search(window.gpu, device) is not None
    return on_device and (not window.paths or any(path.startswith(window.paths) for path in paths))


def installed(gpu: str | None = None) -> list[Window]:
    """The windows that this machine's packages lie in; with the name of the device that would run, only its own."""
    from importlib.metadata import PackageNotFoundError, version

    found = []
    for window in windows():
        try:
            here = version(DISTRIBUTIONS.get(window.package, window.package))
        except PackageNotFoundError:
            continue
        if window.covers(here) and (gpu is None or not window.gpu or re.search(window.gpu, gpu)):
            found.append(window)
    return found


def reach(claim: Claim, validated: Iterable[str], root: Path) -> dict[str, list[str]]:
    """Where a claim holds: validated on (evidence), declared for (pyproject), known bad in (windows)."""
    bad = [str(w) for w in windows() if not w.paths or any(path.startswith(w.paths) for path in claim.paths)]
    return {"validated_on": sorted(set(validated) - {""}), "declared_for": declared(root), "known_bad_in": bad}


def declared(root: Path) -> list[str]:
    """What pyproject.toml asks for, of the packages that a toolchain names."""
    file = root / "pyproject.toml"
    project = tomllib.loads(file.read_text(encoding="utf-8")).get("project", {}) if file.is_file() else {}
    asked = [*project.get("dependencies", []), *project.get("optional-dependencies", {}).get("gpu", [])]
    named = [item for item in asked if item.startswith(("torch", "triton", "flash-linear-attention"))]
    python = project.get("requires-python")
    return [*named, f"python{python}"] if python else named
