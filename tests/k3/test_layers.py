"""The seams of the math files: `local`, the dispatcher and the sequence layout are the only ways tensors enter."""

import copy
from dataclasses import dataclass

import torch
from torch import nn

from k3.sequence import SequenceLayout
from tests.k3.support import ids, lively, tiny


def test_every_direct_parameter_is_read_through_local():
    """What `placed` returns is what the forward uses, for every parameter that is not a plain linear or embedding."""
    model, doubled = lively(tiny()), lively(tiny())
    seen = set()
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear | nn.Embedding) or not module._parameters:
            continue
        module.placed = {key: lambda p=p: 2 * p for key, p in module._parameters.items()}
        seen |= set(module._parameters)
        for parameter in doubled.get_submodule(name)._parameters.values():
            parameter.data *= 2
    assert seen == {"A_log", "dt_bias", "weight", "w1", "w2", "w3"}
    assert torch.equal(model(ids(1, 7))["logits"], doubled(ids(1, 7))["logits"])


def test_heads_come_from_tensors():
    """Half of the heads' rows and columns give half of the mixer's output: no head count is read from the config."""
    model = lively(tiny())
    for layer, split in (("0", 4), ("1", None)):
        mixer = model.decoder.layers[layer].self_attn
        x = torch.randn(1, 9, 16, dtype=torch.float64)
        parts = [half(mixer, split, which)(x) for which in (0, 1)]
        torch.testing.assert_close(sum(parts), mixer(x))


def half(mixer, head_dim, which):
    """The mixer with one of its two heads, cut as a tensor-parallel rank would hold it."""
    cut = copy.deepcopy(mixer)
    rows = (
        ["q_proj", "k_proj", "v_proj", "g_proj", "f_b_proj", "b_proj"]
        if head_dim
        else ["q_b_proj", "kv_b_proj", "g_proj"]
    )
    rows += ["q_conv1d", "k_conv1d", "v_conv1d"] if head_dim else []
    for module, key in [(getattr(cut, name), "weight") for name in rows] + [(cut, "A_log"), (cut, "dt_bias")] * bool(
        head_dim
    ):
        setattr(module, key, nn.Parameter(getattr(module, key).detach().chunk(2)[which]))
    cut.o_proj.weight = nn.Parameter(cut.o_proj.weight.detach().chunk(2, dim=1)[which])
    return cut


def test_dispatcher_and_layout_are_swappable():
    """A dispatcher and a layout of one's own are called with the local tensors, and their results are used."""
    calls = []

    @dataclass(frozen=True, kw_only=True, eq=False)
    class Spy(SequenceLayout):
        def kda(self, core, q, *rest, **options):
            calls.append(("kda", tuple(q.shape)))
            return super().kda(core, q, *rest, **options)

        def mla(self, core, q, latent):
            calls.append(("mla", tuple(q.shape), tuple(latent.shape)))
            return super().mla(core, q, latent)

    model, x = lively(tiny()), ids(2, 5)
    wanted = model(x)["logits"]
    moe = model.decoder.layers["1"].block_sparse_moe
    inner = moe.dispatcher
    moe.dispatcher = lambda z, idx, weight, experts: calls.append(tuple(idx.shape)) or inner(z, idx, weight, experts)
    assert torch.equal(model(x, layout=Spy())["logits"], wanted)
    assert calls == [("kda", (2, 5, 8)), ("mla", (2, 5, 2, 8), (2, 5, 8)), (10, 2)]
