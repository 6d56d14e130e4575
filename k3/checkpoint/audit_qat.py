"""Compare what a trainer and an export quantise, layer by layer, and every value both sides see.

The trainer's side is a model, or a folder: its plain routed weights are fake-quantised as training does, its packed
ones decoded. The exported side is a folder. Values are compared bit for bit in bf16 (F32 where stored so).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from k3.checkpoint.names import is_ignored, is_stack, layer_of, to_native
from k3.checkpoint.slots import native_tensors, slots
from k3.checkpoint.source import Source
from k3.ops import mxfp4
from k3.qat import FakeMXFP4, seen_weights


class Seen:
    """One side: which weights it quantises, and each weight as a forward pass sees it."""

    def __init__(self, quantised: set[str], read: dict[str, Any]):
        self.quantised, self._read = quantised, read

    def names(self) -> set[str]:
        return set(self._read)

    def value(self, name: str) -> torch.Tensor:
        return self._read[name]()


def audit_qat(trained: nn.Module | str | Path, exported: str | Path, *, scale_rule: str = "even") -> dict[str, Any]:
    """Return {"passed", "layers": [{"layer", "tensors", "differences"}]}; layers in order, globals first."""
    with Source.open(exported) as source:
        right = seen_in_folder(source)
        if isinstance(trained, nn.Module):
            return _compare(seen_in_model(trained), right)
        with Source.open(trained) as other:
            return _compare(seen_in_folder(other, scale_rule), right)


def seen_in_folder(source: Source, scale_rule: str | None = None) -> Seen:
    """A folder's side; with a scale rule its plain routed weights count as quantised by it."""
    quantised, read = set(), {}
    for name in source.weights():
        if is_ignored(name):
            continue
        routed = to_native(name).expert is not None
        if source.is_packed(name):
            quantised.add(name)
            read[name] = lambda n=name: mxfp4.unpack(source.read(n + "_packed"), source.read(n + "_scale"))
        elif routed and scale_rule is not None:
            quantised.add(name)
            read[name] = lambda n=name: mxfp4.fake_quantise(source.read(n), scale_rule)
        else:
            read[name] = lambda n=name: source.read(n)
    return Seen(quantised, read)


@torch.no_grad()
def seen_in_model(model: nn.Module) -> Seen:
    """A one-rank model's side: stacks as the forward uses them, quantised where QAT wrapped them."""
    wrapped = {
        f"{prefix.removesuffix('.parametrizations')}.{which}"
        for prefix, module in model.named_modules() if prefix.endswith(".experts.parametrizations")
        for which, chain in module.items() if any(isinstance(step, FakeMXFP4) for step in chain)
    }  # fmt: skip
    tensors = native_tensors(model) | seen_weights(model)
    read, quantised = {}, set()
    for slot in slots(tensors, model.config, None):
        native = to_native(slot.public).name
        if native in wrapped:
            quantised.add(slot.public)
        wide = not is_stack(native) and slot.tensor.dtype == torch.float32 and _stored_wide(native)
        read[slot.public] = lambda t=slot.tensor, wide=wide: t if wide else t.to(torch.bfloat16)
    return Seen(quantised, read)


def _stored_wide(native: str) -> bool:
    """Whether the public layout stores this tensor in F32."""
    return native.endswith((".A_log", ".dt_bias", "conv1d.weight", ".o_norm.weight", ".e_score_correction_bias"))


def _compare(left: Seen, right: Seen) -> dict[str, Any]:
    layers: dict[int | None, list[str]] = {}
    for name in sorted(left.names() | right.names()):
        layers.setdefault(layer_of(name), []).append(name)
    found = []
    for layer in sorted(layers, key=lambda index: -1 if index is None else index):
        differences = [text for name in layers[layer] for text in _differences(name, left, right)]
        label = "globals" if layer is None else f"layer {layer}"
        found.append({"layer": label, "tensors": len(layers[layer]), "differences": differences})
    return {"passed": not any(layer["differences"] for layer in found), "layers": found}


def _differences(name: str, left: Seen, right: Seen) -> Iterator[str]:
    """What differs in one weight: presence, whether it is quantised, its values."""
    sides = {"trained": left, "exported": right}
    absent = [label for label, side in sides.items() if name not in side.names()]
    if absent:
        yield f"{name} is missing in {absent[0]}"
        return
    if (name in left.quantised) != (name in right.quantised):
        yield f"{name} is quantised only in {'trained' if name in left.quantised else 'exported'}"
    a, b = left.value(name), right.value(name)
    b = b[: a.shape[0]] if name.endswith(".A_log") else b
    if a.dtype != b.dtype or a.shape != b.shape:
        yield f"{name} is {a.dtype} {list(a.shape)} trained, {b.dtype} {list(b.shape)} exported"
    elif different := int((a.contiguous().view(torch.uint8) != b.contiguous().view(torch.uint8)).sum()):
        yield f"{name} differs in {different} bytes"
