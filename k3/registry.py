"""`register_model`: the one act that makes other libraries know Kimi K3. Importing `k3` registers nothing."""

from __future__ import annotations

from k3 import megatron_lite


def register_model() -> dict[str, bool]:
    """Register with transformers' Auto classes (kimi_k3) and Megatron Lite, where present; calling twice is harmless.

    kimi_linear stays with transformers, which owns it. Returns which of "transformers" and "megatron_lite" know K3 now.
    """
    return {"transformers": _register_transformers(), "megatron_lite": megatron_lite.register()}


def _register_transformers() -> bool:
    if not megatron_lite.importable("transformers"):
        return False
    from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

    from k3.huggingface import KimiK3Config, KimiK3ForCausalLM

    AutoConfig.register("kimi_k3", KimiK3Config, exist_ok=True)
    for auto in (AutoModel, AutoModelForCausalLM):
        auto.register(KimiK3Config, KimiK3ForCausalLM, exist_ok=True)
    return True
