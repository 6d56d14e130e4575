"""Layouts of one K3 over many ranks: the mesh, and how each axis enters the model through its seams.

Importing this package imports no torch; the modules that talk to a process group are imported where they are used.
"""

from __future__ import annotations

import importlib

_HOMES = {
    "ParallelState": "mesh",
    "connect": "mesh",
    "parallelize_model": "parallelize",
    "context_layout": "layouts",
    "sync_gradients": "data",
    "clip_gradients": "data",
    "fully_shard_model": "data",
    "save_training_state": "state",
    "load_training_state": "state",
}

__all__ = sorted(_HOMES)


def __getattr__(name: str):
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
