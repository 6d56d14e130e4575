"""The routed layer on a GPU: the fp32 router at its real width, rows to experts and back, grouped expert products."""

import pytest
import torch
from torch.func import functional_call

from k3 import K3Config
from k3.moe import LatentMoE, Router
from k3.ops import route
from k3.ops.grouped_mm import grouped_mm
from suites.gpu_common import Draw, exact_float32, gradients, leaves, on_gpu, paired, within  # noqa: F401

pytestmark = on_gpu


def test_router():
    """At 7168 x 896 in bfloat16 the chosen experts are those of float64 wherever the margin exceeds fp32 rounding."""
    make = Draw(1)
    router = Router(K3Config(), device="cuda", dtype=torch.bfloat16)
    router.weight.data = make.normal(896, 7168, scale=0.02)
    router.e_score_correction_bias.copy_(make.normal(896, scale=0.01, dtype=torch.float32))
    x = make.normal(1000, 7168)
    idx, weight = router(x)
    scores = (x.double() @ router.weight.double().T).sigmoid()
    best = (scores + router.e_score_correction_bias).topk(17, dim=-1)
    clear = best.values[:, 15] - best.values[:, 16] > 1e-5
    assert clear.sum() > 900
    wanted = best.indices[:, :16].sort(-1).values
    assert torch.equal(idx.sort(-1).values[clear], wanted[clear])
    chosen = scores.gather(-1, idx)
    within({"weight": (weight, chosen / chosen.sum(-1, keepdim=True))}, 1e-5)


@pytest.mark.parametrize("tokens", [1, 63, 1000])
def test_rows_there_and_back(tokens):
    """Spreading tokens over 896 experts and combining 16 choices, with gradients, equals the plain gather and sum."""
    make = Draw(tokens)
    idx = make.experts(tokens, 896, 16)
    order = route.sort_by_expert(idx, 896)
    assert torch.equal(order.counts, torch.bincount(idx.flatten(), minlength=896))
    inputs = {"z": make.normal(tokens, 3584), "weight": make.normal(tokens, 16, dtype=torch.float32).sigmoid()}
    x, y = leaves(inputs), leaves(inputs, torch.float64)
    found = route.combine(3 * route.spread(x["z"], order, backend="triton"), order, x["weight"], backend="triton")
    wanted = 3 * (y["weight"].unsqueeze(-1) * y["z"].unsqueeze(1)).sum(1)
    upstream = make.normal(tokens, 3584)
    mine, exact = gradients(found, x, upstream), gradients(wanted, y, upstream.double())
    within({"out": (found, wanted)} | paired(mine, exact), 5e-3)


def test_rows_are_sorted_by_expert():
    """Each row of the spread tokens belongs to its expert's range and to the token that chose it."""
    idx = Draw(4).experts(50, 12, 3)
    order = route.sort_by_expert(idx, 12)
    row_expert = torch.arange(12, device="cuda").repeat_interleave(order.counts)
    assert torch.equal(row_expert[order.position], idx)
    assert torch.equal(order.source[order.position], torch.arange(50, device="cuda")[:, None].expand(50, 3))


@pytest.mark.parametrize("counts", [[0, 1, 300, 0, 17, 64, 5, 0], [128] * 8, [0] * 7 + [33]])
def test_grouped_products(counts):
    """One product per expert over ragged rows, experts without rows among them; their gradient is zero."""
    make = Draw(sum(counts))
    inputs = {"x": make.normal(sum(counts), 512), "weight": make.normal(8, 768, 512, scale=0.05)}
    rows = torch.tensor(counts, device="cuda")
    x, y = leaves(inputs), leaves(inputs, torch.float64)
    found = grouped_mm(**x, counts=rows, backend="torch_grouped")
    wanted = grouped_mm(**y, counts=rows, backend="loop")
    upstream = make.normal(*found.shape)
    mine, exact = gradients(found, x, upstream), gradients(wanted, y, upstream.double())
    within({"out": (found, wanted)} | paired(mine, exact), 5e-3)
    assert not mine["dweight"][rows == 0].any()


def small_config() -> K3Config:
    return K3Config(
        hidden_size=1024, num_experts=32, num_experts_per_token=4, routed_expert_hidden_size=512,
        moe_intermediate_size=384,
    )  # fmt: skip


def test_latent_moe():
    """The whole layer in bfloat16 with its kernels against itself in float64, routed alike, every gradient."""
    layer, make = LatentMoE(small_config(), device="cuda", dtype=torch.bfloat16), Draw(21)
    parameters = {name: make.normal(*p.shape, scale=p.shape[-1] ** -0.5) for name, p in layer.named_parameters()}
    parameters["routed_expert_norm.weight"] = 1 + make.normal(512, scale=0.1)
    x, upstream, runs = make.normal(1, 333, 1024), make.normal(1, 333, 1024), {}
    choice, _ = functional_call(layer.gate, {"weight": parameters["gate.weight"]}, (x[0],))
    layer.gate.select = lambda scores: choice  # a flipped choice is no error of the kernels
    for dtype in (torch.bfloat16, torch.float64):
        inputs = leaves(parameters | {"x": x}, dtype)
        weights = {name: tensor for name, tensor in inputs.items() if name != "x"}
        out = functional_call(layer.to(dtype), weights, (inputs["x"],))
        runs[dtype] = {"out": out} | gradients(out, inputs, upstream.to(dtype))
    within(paired(runs[torch.bfloat16], runs[torch.float64]), 3e-2)
