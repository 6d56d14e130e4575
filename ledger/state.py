"""Where this user's ledger, cache and keys live. `K3_STATE_DIR` moves all of them."""

from __future__ import annotations

import os
from pathlib import Path


def state_dir() -> Path:
    """The state folder: `K3_STATE_DIR` if set, else the platform's place for user state."""
    if folder := os.environ.get("K3_STATE_DIR"):
        return Path(folder)
    import platformdirs

    return Path(platformdirs.user_state_dir("k3"))


def ledger_path(path: Path | str | None = None) -> Path:
    """The ledger file: as given, else `ledger.db` in the state folder."""
    return Path(path) if path is not None else state_dir() / "ledger.db"
