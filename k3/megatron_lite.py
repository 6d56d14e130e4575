"""Kimi K3 as a model of Megatron Lite: what is handed to its registry. Imported by `registry` alone."""

from __future__ import annotations

import importlib
import importlib.util

REGISTRY = "megatron.lite.model.registry"
HF_MODEL_TYPES = ["kimi_k3", "kimi_linear"]


def register() -> bool:
    """Register "k3" with `k3.protocol` as its "lite" implementation; False where there is no such registry."""
    if not importable(REGISTRY):
        return False
    registry = importlib.import_module(REGISTRY)
    protocol = importlib.import_module("k3.protocol")
    registry.register_model("k3", package="k3", hf_model_types=HF_MODEL_TYPES, impls={"lite": protocol})
    return True


def importable(module: str) -> bool:
    """Whether `module` is installed; a fault inside an installed package is raised, not taken for absence."""
    parts = module.split(".")
    try:
        return all(importlib.util.find_spec(".".join(parts[: i + 1])) for i in range(len(parts)))
    except ModuleNotFoundError as error:
        if error.name and module.startswith(error.name):
            return False
        raise
