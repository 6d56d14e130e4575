"""Layers at full width, forward and backward with all weight gradients: MLA, the routed layer, grouped experts."""

from itertools import cycle

import pytest
import torch
from torch import nn

from k3 import K3Config
from k3.mla import MLA
from k3.moe import LatentMoE
from k3.ops.grouped_mm import grouped_mm
from suites.eager import eager_operations
from suites.gpu_common import ratio
from suites.timing import DEVICE, ON_GPU, race, timed  # noqa: F401

pytestmark = timed
T = 8192 if ON_GPU else 64
DTYPE = torch.bfloat16 if ON_GPU else torch.float32
DTYPE_NAME = str(DTYPE).removeprefix("torch.")
SMALL = {
    "hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2, "q_lora_rank": 32, "kv_lora_rank": 32,
    "routed_expert_hidden_size": 32, "moe_intermediate_size": 48, "num_experts_per_token": 2,
}  # fmt: skip
EXPERTS = 64 if ON_GPU else 4
CONFIG = K3Config(num_experts=EXPERTS, **({} if ON_GPU else SMALL))


def built(layer: nn.Module) -> nn.Module:
    for parameter in layer.parameters():
        nn.init.normal_(parameter, mean=float(parameter.ndim == 1), std=0.02)
    return layer


def step(layer: nn.Module):
    """Forward and backward of a layer on the next of two inputs."""
    parameters = list(layer.parameters())
    inputs = cycle([torch.randn(1, T, CONFIG.hidden_size, device=DEVICE).to(DTYPE).requires_grad_() for _ in range(2)])

    def call():
        x = next(inputs)
        y = layer(x)
        torch.autograd.grad(y, [x, *parameters], torch.ones_like(y))

    return call


def test_mla(race):  # noqa: F811
    """Latent attention; the floor is its products, the causal half of the scores among them."""
    torch.manual_seed(1)
    layer = built(MLA(CONFIG, 3, device=DEVICE, dtype=DTYPE))
    other = built(MLA(CONFIG, 3, device=DEVICE, dtype=DTYPE))
    other.load_state_dict(layer.state_dict())
    layer.backend, other.backend = ("cudnn", "torch_sdpa") if ON_GPU else ("torch_eager", "torch_sdpa")
    x = torch.randn(1, T, CONFIG.hidden_size, device=DEVICE).to(DTYPE)
    assert ratio(layer(x), other(x)) < 1e-2
    weights = sum(p.numel() for p in layer.parameters() if p.ndim == 2)
    widths = CONFIG.qk_nope_head_dim + CONFIG.qk_rope_head_dim + CONFIG.v_head_dim
    attention = T * T * CONFIG.num_attention_heads * widths  # the causal half of two products, two operations each
    names = (layer.backend, "torch's own choice of SDPA")
    contenders = dict(zip(names, (step(layer), step(other)), strict=True))
    flops = 6 * weights * T + 3 * attention
    race(contenders, shape=f"T={T} D={CONFIG.hidden_size}", dtype=DTYPE_NAME, rounds=10, floor_flops=flops)


def test_moe(race):  # noqa: F811
    """The routed layer with 64 experts on one GPU, top 16; the floor is the products of the rows really routed."""
    torch.manual_seed(2)
    layer = built(LatentMoE(CONFIG, device=DEVICE, dtype=DTYPE))
    once = sum(p.numel() for name, p in layer.named_parameters() if p.ndim == 2 and name != "gate.weight")
    expert = sum(p[0].numel() for p in (layer.experts.w1, layer.experts.w2, layer.experts.w3))
    eager, x = step(layer), torch.randn(1, T, CONFIG.hidden_size, device=DEVICE).to(DTYPE)
    with torch.no_grad(), eager_operations():
        wanted = layer(x)
    with torch.no_grad():
        assert ratio(layer(x), wanted) < 1e-2

    def in_eager():
        with eager_operations():
            eager()

    contenders = {"torch.grouped_mm, triton": step(layer), "eager torch, one expert at a time": in_eager}
    flops = 6 * T * (once + CONFIG.num_experts_per_token * expert)
    race(contenders, shape=f"T={T} E={EXPERTS}", dtype=DTYPE_NAME, rounds=10, floor_flops=flops)


@pytest.mark.parametrize("rows", [256, 2048])
@pytest.mark.parametrize("direction", ["forward", "both"])
def test_grouped(race, rows, direction):  # noqa: F811
    """One product per expert over 256 or 2048 rows each, 3584 wide to 6144, against one expert at a time."""
    torch.manual_seed(rows)
    rows, wide, out = (rows, 3584, 6144) if ON_GPU else (8, 32, 48)
    counts = torch.full((EXPERTS,), rows, device=DEVICE)
    sets = [torch.randn(EXPERTS * rows, wide, device=DEVICE).to(DTYPE).requires_grad_() for _ in range(2)]
    weight = (0.02 * torch.randn(EXPERTS, out, wide, device=DEVICE)).to(DTYPE).requires_grad_()

    def call(backend):
        inputs = cycle(sets)

        def forward():
            with torch.no_grad():
                grouped_mm(next(inputs), weight, counts, backend=backend)

        def both():
            x = next(inputs)
            y = grouped_mm(x, weight, counts, backend=backend)
            torch.autograd.grad(y, [x, weight], torch.ones_like(y))

        return forward if direction == "forward" else both

    kernel = "torch_grouped" if ON_GPU else "loop"
    contenders = {kernel: call(kernel)} | ({"loop": call("loop")} if ON_GPU else {})
    flops = 2 * EXPERTS * rows * wide * out * (1 if direction == "forward" else 3)
    shape = f"E={EXPERTS} rows={rows} {wide}x{out} {direction}"
    race(contenders, shape=shape, dtype=DTYPE_NAME, rounds=10, floor_flops=flops)
