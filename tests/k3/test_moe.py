"""LatentMoE: routing, groups, stacked experts and the combine, each against a plain loop over tokens."""

import pytest
import torch

from k3.layers import rms_normalize
from k3.moe import LocalDispatcher, combine
from k3.ops.grouped_mm import grouped_mm, loop_mm
from k3.ops.situ import situ
from tests.k3.support import lively, tiny

GROUPED = {"num_experts": 12, "num_experts_per_token": 3, "num_expert_group": 4, "topk_group": 2}


def moe_layer(**changes):
    return lively(tiny(**changes)).decoder.layers["1"].block_sparse_moe


def tokens(count=9, dtype=torch.float64):
    return torch.randn(count, 16, generator=torch.Generator().manual_seed(3), dtype=torch.float64).to(dtype)


def loop_choice(gate, scores):
    """The experts of one token by sorting: the best groups by their two best biased scores, then the best experts."""
    biased = scores + gate.e_score_correction_bias
    groups = biased.view(gate.num_groups, -1)
    value = [sum(sorted(group.tolist())[-2:]) for group in groups]
    kept = sorted(range(len(value)), key=value.__getitem__)[-gate.top_groups :]
    size = groups.shape[1]
    candidates = [e for e in range(len(biased)) if e // size in kept]
    return set(sorted(candidates, key=biased.tolist().__getitem__)[-gate.top_k :])


@pytest.mark.parametrize("changes", [{}, GROUPED, {"routed_scaling_factor": 2.5}])
def test_router(changes):
    """Selection sees the bias and the groups, the weights see neither; they add up to the scaling factor."""
    gate = moe_layer(**changes).gate
    gate.e_score_correction_bias.copy_(torch.linspace(0.5, -0.5, gate.weight.shape[0]))
    x = tokens(40)
    idx, weight = gate(x)
    scores = (x @ gate.weight.T).sigmoid()
    assert [set(row) for row in idx.tolist()] == [loop_choice(gate, row) for row in scores]
    torch.testing.assert_close(weight, scores.gather(1, idx) / scores.gather(1, idx).sum(1, True) * gate.scaling)


def test_router_is_float32_in_bfloat16():
    """Scores of a bfloat16 model are those of the up-cast factors, also under autocast."""
    gate = moe_layer().gate.to(torch.bfloat16)
    x = tokens(dtype=torch.bfloat16)
    scores = (x.float() @ gate.weight.float().T).sigmoid()
    for enabled in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            idx, weight = gate(x)
        assert weight.dtype == torch.float32
        chosen = scores.gather(1, idx)
        torch.testing.assert_close(weight, chosen / chosen.sum(1, True), atol=1e-6, rtol=0)


def test_bias_has_no_gradient():
    """The correction bias is a buffer, not a parameter; the router's weight learns through the weights alone."""
    gate = moe_layer().gate
    assert dict(gate.named_parameters()).keys() == {"weight"}
    weight = gate(tokens())[1]
    (weight * torch.arange(weight.numel()).view_as(weight)).sum().backward()
    assert gate.weight.grad.abs().max() > 0


def test_layer_against_a_loop():
    """Every token by itself: down, its experts one by one, weighted sum, norm, up, plus shared experts."""
    moe, x = moe_layer(**GROUPED), tokens().view(3, 3, 16)
    idx, weight = moe.gate(x.flatten(0, 1))
    wanted = []
    for token, experts, w in zip(x.flatten(0, 1), idx, weight, strict=True):
        z = moe.routed_expert_down_proj(token)
        w1, w2, w3 = (getattr(moe.experts, name)[experts] for name in ("w1", "w2", "w3"))
        outputs = [w2[j] @ situ(w1[j] @ z, w3[j] @ z, 4.0, 25.0) for j in range(3)]
        u = rms_normalize(sum(a * b for a, b in zip(w, outputs, strict=True)), 1e-5) * moe.routed_expert_norm.weight
        wanted.append(moe.routed_expert_up_proj(u) + moe.shared_experts(token))
    torch.testing.assert_close(moe(x), torch.stack(wanted).view_as(x), atol=1e-12, rtol=1e-12)


def test_combine_is_float32():
    """Products and sum of the routed outputs are float32 and rounded once, in any order of the choices."""
    rows = torch.randn(5, 16, 7).bfloat16()
    weight = torch.rand(5, 16)
    exact = (weight.double()[..., None] * rows.double()).sum(1)
    torch.testing.assert_close(combine(rows, weight).double(), exact, atol=1e-6, rtol=1e-6)


def test_idle_experts():
    """Experts without a token take part with zero gradients; all tokens on one expert work too."""
    moe = moe_layer()
    idx = torch.tensor([[2, 2]] * 5)
    z = torch.randn(5, 8, dtype=torch.float64)
    LocalDispatcher()(z, idx, torch.full((5, 2), 0.5), moe.experts).sum().backward()
    assert moe.experts.w1.grad[2].any() and not moe.experts.w1.grad[[0, 1, 3]].any()


def test_grouped_mm_definition():
    """Rows sorted by expert meet their expert's matrix; no rows at all give an empty result with a gradient path."""
    x, w = torch.randn(6, 3), torch.randn(4, 5, 3, requires_grad=True)
    found = grouped_mm(x, w, torch.tensor([2, 0, 3, 1]))
    wanted = torch.stack([w[e] @ row for e, row in zip([0, 0, 2, 2, 2, 3], x, strict=True)])
    torch.testing.assert_close(found, wanted)
    assert loop_mm(x[:0], w, torch.zeros(4, dtype=torch.long)).shape == (0, 5)
    with pytest.raises(ValueError, match="'cublas' is unknown"):
        grouped_mm(x, w, torch.tensor([6, 0, 0, 0]), backend="cublas")


def test_situ_is_bounded():
    """SiTU caps both halves: |gate| <= beta, |up| <= linear beta, and small values pass nearly unchanged."""
    g, u = torch.tensor([1e4, -1e4, 1e-3]).double(), torch.tensor([1e4, 1e4, 1e-3]).double()
    found = situ(g, u, 4.0, 25.0)
    torch.testing.assert_close(found[:2], torch.tensor([100.0, 0.0]).double())
    torch.testing.assert_close(found[2], g[2] * g[2].sigmoid() * u[2], rtol=1e-6, atol=0)
