"""Quantisation-aware training: routed experts are fake-quantised in the forward exactly as an export packs them.

Nothing else of the model is touched. The master weights stay parameters, under torch's parametrization names
(`experts.parametrizations.w1.original`), which the checkpoint code reads as `experts.w1`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import parametrize

from k3.moe import StackedExperts
from k3.ops import mxfp4
from k3.paths import announce

WRAPPED = ("w1", "w2", "w3")
FIELDS = ("enabled", "format", "scale_rule")


class FakeMXFP4(nn.Module):
    """weight [E, out, in] -> what a reader of the exported bytes sees, in its dtype; gradient straight through."""

    def __init__(self, scale_rule: str):
        super().__init__()
        self.scale_rule = scale_rule

    def forward(self, weight: Tensor) -> Tensor:
        announce("torch.mxfp4_fake_quantise")
        if not isinstance(weight, DTensor):
            return mxfp4.fake_quantise(weight, self.scale_rule)
        seen = mxfp4.fake_quantise(weight.to_local(), self.scale_rule)
        return DTensor.from_local(
            seen, weight.device_mesh, weight.placements, run_check=False, shape=weight.shape, stride=weight.stride()
        )


def apply(chunks: Iterable[nn.Module] | nn.Module, options: Mapping[str, Any]) -> dict[str, Any]:
    """Wrap the routed experts of every chunk in place; return what was wrapped and what was not, by native name.

    options: `enabled`, `format` ("mxfp4"), and `scale_rule` (default "even", the export's own default).
    Raises ValueError naming the option, or the weight whose blocks of 32 inputs this rank does not hold whole.
    """
    rule = _check(options)
    chunks = [chunks] if isinstance(chunks, nn.Module) else list(chunks)
    before = {name: tensor for chunk in chunks for name, tensor in chunk.state_dict(keep_vars=True).items()}
    wrapped = []
    if options.get("enabled", False):
        stacks = [(n, m) for chunk in chunks for n, m in chunk.named_modules() if isinstance(m, StackedExperts)]
        for prefix, experts in stacks:
            _check_blocks(prefix, experts)
        for prefix, experts in stacks:
            wrapped += [_wrap(prefix, experts, which, rule) for which in WRAPPED]
    untouched = sorted(set(before) - set(wrapped))
    return {"enabled": bool(wrapped), "format": "mxfp4", "scale_rule": rule, "wrapped": wrapped, "untouched": untouched}


def is_applied(model: nn.Module) -> bool:
    """Whether any routed expert of the model is fake-quantised."""
    return any(isinstance(module, FakeMXFP4) for module in model.modules())


@torch.no_grad()
def seen_weights(model: nn.Module) -> dict[str, Tensor]:
    """Return the stacked experts as the forward pass uses them on this rank: fake-quantised where wrapped."""
    stacks = ((n, m) for n, m in model.named_modules() if isinstance(m, StackedExperts))
    seen = {f"{prefix}.{which}": getattr(m, which) for prefix, m in stacks for which in WRAPPED}
    return {name: t.to_local() if isinstance(t, DTensor) else t for name, t in seen.items()}


def _check(options: Mapping[str, Any]) -> str:
    if strange := sorted(set(options) - set(FIELDS)):
        raise ValueError(f"qat has unknown options {', '.join(strange)}; it takes {', '.join(FIELDS)}")
    if options.get("format", "mxfp4") != "mxfp4":
        raise NotImplementedError(f"qat format={options['format']!r} is not implemented; K3 releases use 'mxfp4'")
    rule = options.get("scale_rule", "even")
    if rule not in mxfp4.SCALE_RULES:
        raise ValueError(f"qat scale_rule={rule!r} is unknown; use one of {', '.join(mxfp4.SCALE_RULES)}")
    return rule


def _check_blocks(prefix: str, experts: StackedExperts) -> None:
    """Every block must be whole here, or this rank would choose another scale than the export."""
    for which in WRAPPED:
        weight = getattr(experts, which)
        width = (weight.to_local() if isinstance(weight, DTensor) else weight).shape[-1]
        if width % mxfp4.BLOCK:
            raise ValueError(
                f"{prefix}.{which} has {width} inputs on this rank, MXFP4 needs a multiple of {mxfp4.BLOCK}; "
                "use a smaller etp_size, or train without qat"
            )


def _wrap(prefix: str, experts: StackedExperts, which: str, rule: str) -> str:
    name = f"{prefix}.{which}"
    if parametrize.is_parametrized(experts, which):
        raise ValueError(f"{name} is parametrized already; apply qat once")
    parametrize.register_parametrization(experts, which, FakeMXFP4(rule), unsafe=True)
    return name
