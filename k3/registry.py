"""`register_model`: the one act that makes other libraries know Kimi K3. Importing `k3` registers nothing."""

from __future__ import annotations

import importlib
import importlib.util

MEGATRON_LITE = "megatron.lite.model.registry"
HF_MODEL_TYPES = ["kimi_k3", "kimi_linear"]


def register_model() -> dict[str, bool]:
    """Register with transformers' Auto classes (kimi_k3) and Megatron Lite, where present; calling twice is harmless.

    kimi_linear stays with transformers, which owns it. Returns which of "transformers" and "megatron_lite" know K3 now.
    """
    return {"transformers": _register_transformers(), "megatron_lite": _register_megatron_lite()}


def _register_transformers() -> bool:
    if not _importable("transformers"):
        return False
    from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

    from k3.huggingface import KimiK3Config, KimiK3ForCausalLM

    AutoConfig.register("kimi_k3", KimiK3Config, exist_ok=True)
    for auto in (AutoModel, AutoModelForCausalLM):
        auto.register(KimiK3Config, KimiK3ForCausalLM, exist_ok=True)
    return True


def _register_megatron_lite() -> bool:
    if not _importable(MEGATRON_LITE):
        return False
    registry = importlib.import_module(MEGATRON_LITE)
    protocol = importlib.import_module("k3.protocol")
    registry.register_model("k3", package="k3", hf_model_types=HF_MODEL_TYPES, impls={"lite": protocol})
    return True


def _importable(module: str) -> bool:
    """Whether `module` is installed; a fault inside an installed one is not hidden."""
    parts = module.split(".")
    try:
        return all(importlib.util.find_spec(".".join(parts[: i + 1])) for i in range(len(parts)))
    except ModuleNotFoundError as error:
        if error.name and module.startswith(error.name):
            return False
        raise
