"""Pins: the configuration and index a release is known by, as SHA-256. Imports no torch."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from k3.checkpoint.errors import CheckpointError

KNOWN = {
    "9f62e4e9": {
        "release": "9f62e4e9fffbd0a83ddd60e1c209d828994b3569",
        "config_sha256": "9710e121a58d03ac92c8d6da287a19541994319afbbe6d6202af001ffd379213",
        "index_sha256": "a1c5210650ce71d2d3ae9ec5a101ac4afd3cf4b10091be589853437eb967febd",
    }
}
FIELDS = {"release", "config_sha256", "index_sha256"}


def find_pin(name: str) -> dict[str, str]:
    """Return a known pin, or the one in a file. Raises CheckpointError for what is neither."""
    if name in KNOWN:
        return KNOWN[name]
    try:
        pin = json.loads(Path(name).read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"release {name!r} is not one of {sorted(KNOWN)} nor a pin file ({error})") from error
    if not isinstance(pin, dict) or set(pin) != FIELDS:
        raise CheckpointError(f"{name} is not a pin: it needs exactly {sorted(FIELDS)}; write one with make-pin")
    return pin


def check_pin(pin: dict[str, str], found: dict[str, Any]) -> None:
    """Raise CheckpointError naming the file whose bytes are not the pinned ones."""
    for field, file in (("config_sha256", "config.json"), ("index_sha256", "the index")):
        if pin[field] != found[field]:
            raise CheckpointError(f"{file} has SHA-256 {found[field]}, release {pin['release']} has {pin[field]}")


def sha256_of(path: Path) -> str:
    """SHA-256 of a file, streamed."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
