"""K3: the Kimi K3 text backbone. Importing this package imports no torch and changes no registry."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from k3.paths import announce

if TYPE_CHECKING:
    from k3.config import K3Config
    from k3.decode import Cache
    from k3.model import K3Model
    from k3.registry import register_model
    from k3.sequence import SequenceLayout

_HOME = {
    "K3Config": "k3.config",
    "K3Model": "k3.model",
    "Cache": "k3.decode",
    "SequenceLayout": "k3.sequence",
    "register_model": "k3.registry",
}

__all__ = ["Cache", "K3Config", "K3Model", "SequenceLayout", "announce", "register_model"]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'k3' has no attribute {name!r}; it offers {', '.join(__all__)}")
    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
