"""Checkpoints in the public layout: index, load, save, export and validation. Importing this imports no torch."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from k3.checkpoint.commit import recover
    from k3.checkpoint.errors import CheckpointError
    from k3.checkpoint.load import load_hf_weights, read_packed_experts
    from k3.checkpoint.save import export_hf_weights, save_hf_weights

_HOME = {
    "CheckpointError": "errors",
    "export_hf_weights": "save",
    "load_hf_weights": "load",
    "read_packed_experts": "load",
    "recover": "commit",
    "save_hf_weights": "save",
}

__all__ = [
    "CheckpointError",
    "export_hf_weights",
    "load_hf_weights",
    "read_packed_experts",
    "recover",
    "save_hf_weights",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'k3.checkpoint' has no attribute {name!r}; it offers {', '.join(__all__)}")
    return getattr(importlib.import_module(f"k3.checkpoint.{_HOME[name]}"), name)
