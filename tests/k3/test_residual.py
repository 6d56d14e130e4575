"""Attention Residuals: the schedule of snapshots, and the mix against a plain softmax over depth."""

import pytest
import torch

from k3.ops.attnres import attnres_mix
from tests.k3.support import ids, lively, tiny

LAYERS = {
    "num_hidden_layers": 7,
    "full_attention_layers": (2, 4),
    "kda_layers": (1, 3, 5, 6, 7),
    "attn_res_block_size": 3,
}


def test_mix_is_a_softmax_over_depth():
    """Scores come from the normalised sources, the blend from the raw ones, per token, without a scale."""
    sources = [torch.randn(2, 3, 6, dtype=torch.float64) * (i + 1) for i in range(4)]
    norm, proj = torch.rand(6, dtype=torch.float64), torch.randn(1, 6, dtype=torch.float64)
    found = attnres_mix(sources, norm, proj, 1e-5)
    for b, t in ((0, 0), (1, 2)):
        values = torch.stack([s[b, t] for s in sources])
        normed = values / (values.square().mean(-1, keepdim=True) + 1e-5).sqrt()
        scores = normed @ (norm * proj[0])
        torch.testing.assert_close(found[b, t], scores.softmax(0) @ values)


def test_mix_scores_in_float32():
    """In bfloat16 the two score weights are multiplied in float32 and the blend is rounded once."""
    sources = [torch.randn(1, 5, 64).bfloat16() for _ in range(3)]
    norm, proj = torch.rand(64).bfloat16(), torch.randn(1, 64).bfloat16()
    exact = attnres_mix([s.double() for s in sources], norm.double(), proj.double(), 1e-5)
    assert torch.equal(attnres_mix(sources, norm, proj, 1e-5), exact.bfloat16())


def test_zero_queries_average():
    """With the initial zero pseudo-query every mix is the mean of its sources."""
    sources = [torch.randn(1, 2, 4), torch.randn(1, 2, 4)]
    torch.testing.assert_close(attnres_mix(sources, torch.ones(4), torch.zeros(1, 4), 1e-5), sum(sources) / 2)


def test_schedule():
    """Snapshots are the raw prefixes entering layers 0, 3, 6, and the prefix restarts from that layer's attention."""
    model = lively(tiny(**LAYERS))
    prefix, bank = model.embed(ids(1, 5)), []
    sizes = []
    for i, layer in enumerate(model.decoder.layers.values()):
        attended = []
        handle = layer.self_attn.register_forward_hook(lambda m, a, o, kept=attended: kept.append(o))
        ffn = []
        handles = [handle, layer.ffn.register_forward_hook(lambda m, a, o, kept=ffn: kept.append(o))]
        before = prefix
        prefix, bank = layer(prefix, bank)
        base = attended[0] if i % 3 == 0 else before + attended[0]
        torch.testing.assert_close(prefix, base + ffn[0])
        assert i % 3 or torch.equal(bank[-1], before)
        sizes.append(len(bank))
        [h.remove() for h in handles]
    assert sizes == [1, 1, 1, 2, 2, 2, 3]


def test_layer_does_not_change_its_bank():
    """A layer returns a new bank: a caller that recomputes it (activation checkpointing) sees the old one."""
    model = lively(tiny())
    bank = []
    model.decoder.layers["0"](model.embed(ids(1, 3)), bank)
    assert bank == []


def test_first_layer_ignores_its_attention_mix():
    """Layer 0's self_attention_res tensors exist, change nothing and receive no gradient; all others receive one."""
    model = lively(tiny(**LAYERS))
    model(ids(2, 9), labels=ids(2, 9, seed=2))["loss"].backward()
    idle = [name for name, parameter in model.named_parameters() if parameter.grad is None]
    prefix = "language_model.model.layers.0.self_attention_res_"
    assert idle == [prefix + "norm.weight", prefix + "proj.weight"]


@pytest.mark.parametrize("block", [1, 2, 7, 50])
def test_block_sizes(block):
    """Blocks of one layer, of odd size, of all layers and longer than the model run forward and backward."""
    model = lively(tiny(**(LAYERS | {"attn_res_block_size": block})))
    loss = model(ids(1, 4), labels=ids(1, 4))["loss"]
    loss.backward()
    assert loss.isfinite()
