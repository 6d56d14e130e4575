"""Build `k3` models for the suites from public tensors, and watch what passes between their parts.

The mapping from public tensors to parameters is written here once more, so that the claims about the mathematics do
not depend on the checkpoint code.
"""

from __future__ import annotations

import re

import torch

from k3 import K3Config, K3Model
from suites import oracle_weights
from suites.goldens import Golden

EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(w[123])\.weight")


def native_state(tensors: dict[str, torch.Tensor], heads: int) -> dict[str, torch.Tensor]:
    """Public tensors under the names and shapes of `K3Model.state_dict()`: experts stacked, A_log without its pad."""
    stacks: dict[str, dict[int, torch.Tensor]] = {}
    state = {}
    for name, tensor in tensors.items():
        if match := EXPERT.fullmatch(name):
            stacks.setdefault(f"{match[1]}.{match[3]}", {})[int(match[2])] = tensor
        else:
            state[name] = tensor[:heads] if name.endswith("A_log") else tensor
    return state | {name: torch.stack([rows[e] for e in sorted(rows)]) for name, rows in stacks.items()}


def public_gradients(model) -> dict[str, torch.Tensor]:
    """Gradients of a model's parameters by public name, one per expert."""
    found = {}
    for name, parameter in model.named_parameters():
        if parameter.grad is None:
            continue
        if name.rpartition(".")[0].endswith(".experts"):
            stem, _, which = name.rpartition(".")
            found |= {f"{stem}.{e}.{which}.weight": grad for e, grad in enumerate(parameter.grad)}
        else:
            found[name] = parameter.grad
    return found


def build(hf: dict, tensors: dict[str, torch.Tensor], dtype=torch.float32) -> K3Model:
    """A `K3Model` of the public nested config `hf` holding exactly these public tensors."""
    config = K3Config.from_hf(hf)
    model = K3Model(config, dtype=dtype)
    model.load_state_dict(native_state(tensors, config.kda_num_heads), strict=True)
    return model


def golden_model(golden: Golden, dtype=torch.float32) -> K3Model:
    return build(golden.hf, oracle_weights.read(golden.weights_path), dtype)


class Watch:
    """Inputs and outputs of every submodule of one forward pass, by name relative to the decoder (`layers.0.mlp`)."""

    ROOT = "language_model.model."

    def __init__(self, model):
        self.inputs: dict[str, torch.Tensor] = {}
        self.outputs: dict[str, object] = {}
        self.handles = [module.register_forward_hook(self._keep(name)) for name, module in model.named_modules()]

    def _keep(self, name):
        short = name.removeprefix(self.ROOT)

        def hook(_module, args, output):
            self.inputs[short] = args[0] if args else None
            self.outputs[short] = output

        return hook

    def __enter__(self) -> Watch:
        return self

    def __exit__(self, *_):
        for handle in self.handles:
            handle.remove()
