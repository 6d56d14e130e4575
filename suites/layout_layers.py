"""Single layers at public head widths under a layout: drawn alike on every rank, run whole or in parts.

Shared by the layout suites that need a GPU's own kernels (gpu_layout.py) and by their benchmark (bench_layout.py).
On a CPU the same code takes the torch paths in float32.
"""

from __future__ import annotations

import torch
from torch import nn

from k3 import K3Config
from k3.parallel import collectives
from suites.ranks import device

DTYPES = {"cuda": torch.bfloat16, "cpu": torch.float32}
SIZES = {
    "cuda": {
        "hidden_size": 2048, "kda_num_heads": 16, "num_attention_heads": 8, "num_key_value_heads": 8,
        "q_lora_rank": 256, "kv_lora_rank": 256, "num_experts": 64, "num_experts_per_token": 8,
        "moe_intermediate_size": 1024, "routed_expert_hidden_size": 1024, "num_shared_experts": 1,
    },
    "cpu": {
        "hidden_size": 32, "kda_num_heads": 4, "kda_head_dim": 8, "num_attention_heads": 2, "num_key_value_heads": 2,
        "q_lora_rank": 8, "kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8,
        "num_experts": 8, "num_experts_per_token": 2, "moe_intermediate_size": 16, "routed_expert_hidden_size": 16,
        "num_shared_experts": 1,
    },
}  # fmt: skip


def config() -> K3Config:
    """Widths of the layers: those of a GPU have the public head sizes, which its kernels are made for."""
    return K3Config(**SIZES[device().type])


def built(kind: type[nn.Module], *arguments) -> nn.Module:
    """A layer whose every weight matters, the same on every rank; most heads forget slowly."""
    layer = kind(config(), *arguments, device=device(), dtype=DTYPES[device().type])
    generator = torch.Generator().manual_seed(1)
    for name, parameter in layer.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        parameter.data.copy_(value(name, noise))
    return layer


def value(name: str, noise: torch.Tensor) -> torch.Tensor:
    if name.endswith("A_log"):
        return 0.4 * noise
    if name.endswith("dt_bias"):
        return 2.0 * noise - 4.0
    if "norm" in name:
        return 1.0 + 0.1 * noise
    return noise * (0.5 if "conv1d" in name else noise.shape[-1] ** -0.5)


def draw(length: int, seed: int = 2) -> torch.Tensor:
    """Activations [1, length, hidden], the same on every rank."""
    shape = (1, length, config().hidden_size)
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(device(), DTYPES[device().type])


def run(layer: nn.Module, x: torch.Tensor, upstream: torch.Tensor, **options) -> dict[str, torch.Tensor]:
    """Output `y`, and the gradients `dx` and `d<parameter>` that `upstream` gives."""
    x = x.detach().requires_grad_()
    y = layer(x, **options)
    names = ["x", *(name for name, _ in layer.named_parameters())]
    found = torch.autograd.grad(y, [x, *layer.parameters()], upstream)
    return {"y": y.detach()} | {f"d{name}": gradient for name, gradient in zip(names, found, strict=True)}


def summed(found: dict[str, torch.Tensor], group) -> dict[str, torch.Tensor]:
    """The parameters' gradients summed over the ranks; output and input gradient are this rank's own."""
    own = ("y", "dx")
    return {
        name: x if name in own else collectives.sum_ranks(x.float(), group, "gradients") for name, x in found.items()
    }
