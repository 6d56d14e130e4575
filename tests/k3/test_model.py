"""The whole model: golden vectors, names and sizes, training of the tiny config, and mistakes that must be seen."""

from contextlib import nullcontext

import pytest
import torch

import k3.kda
import k3.moe
import k3.ops.kda
import k3.residual
from k3 import Cache, K3Config, K3Model
from suites.goldens import Golden
from suites.models import golden_model, public_gradients
from tests.k3.support import ids, lively, tiny

CASES = ["readme2", "hybrid5", "mxfp4_3", "par6"]
LENGTH = {"par6": 64}  # the others at T = 7


def worst(case, dtype=torch.float32):
    """Largest logit, state and relative gradient difference from the vendor's float32 run."""
    golden, T = Golden(case), LENGTH.get(case, 7)
    model, (x, labels), wanted = golden_model(golden, dtype), golden.inputs(T), golden.expected("f32", T)
    out, cache = model(x, labels=labels), Cache()
    out["loss"].backward()
    with torch.no_grad():
        model(x, cache=cache)
    found, grads = public_gradients(model), golden.gradients(T)
    states = {i: wanted[f"layer{i}.kda_state"] for i in cache.kda}
    return (
        (out["logits"] - wanted["logits"]).abs().max(),
        max((cache.kda[i].S - s).abs().max() / s.abs().max() for i, s in states.items()),
        max((found[name] - g).norm() / g.norm() for name, g in grads.items()),
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("case", CASES)
def test_golden(case, dtype):
    """Logits, KDA states and every gradient of the vendor's code: atol 1e-3, 1e-4 and 1e-3 (golden README)."""
    logits, state, gradient = worst(case, dtype)
    assert logits <= 1e-3 and state <= 1e-4 and gradient <= 1e-3


@pytest.mark.parametrize("case", ["readme2", "hybrid5", "mxfp4_3"])
def test_bfloat16_rounds_as_the_vendor(case):
    """In bfloat16 the logits are the vendor's bit for bit where no float32 sum happens to round differently (T = 7)."""
    golden = Golden(case)
    x, labels = golden.inputs(7)
    out = golden_model(golden, torch.bfloat16)(x, labels=labels)
    wanted = golden.expected("bf16", 7)["logits"]
    assert out["logits"].dtype == torch.bfloat16 and (out["logits"] == wanted).float().mean() >= 0.95
    error = (out["logits"].double() - golden.expected("f64", 7)["logits"]).abs().mean()
    assert error <= 2 * golden.bf16_mean(7)


def off_by_one(config, index):
    return "kda" if index in config.kda_layers else "mla"


def mean_norm(x):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)


def softplus_gate(g, A_log, dt_bias, lower_bound):
    z = torch.nn.functional.softplus(g + dt_bias.unflatten(0, (-1, g.shape[-1])))
    return (-A_log.exp().unsqueeze(-1) * z).clamp_min(lower_bound)


def reversed_taps(x, weight, **options):
    return CONVOLVE(x, weight.flip(-1), **options)


def exchanged_halves(gate, up, *caps):
    return SITU(up, gate, *caps)


def normed_blend(prefix, bank, proj, norm):
    scale = [v * torch.rsqrt(v.square().mean(-1, keepdim=True) + norm.eps) for v in (*bank, prefix)]
    return k3.ops.attnres.attnres_mix(scale, norm.weight, proj.weight, norm.eps)


CONVOLVE, SITU = k3.kda.short_conv, k3.moe.situ
MISTAKES = {
    "none": None,
    "layers counted from 0": (K3Config, "attention_type", off_by_one),
    "mean instead of sum in the l2 norm": (k3.ops.kda, "l2_normalize", mean_norm),
    "clamped softplus gate": (k3.ops.kda, "log_decay", softplus_gate),
    "taps reversed": (k3.kda, "short_conv", reversed_taps),
    "normalised vectors blended": (k3.residual, "mix", normed_blend),
    "gate and up exchanged": (k3.moe, "situ", exchanged_halves),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_seen(mistake, monkeypatch):
    """Each deliberate mistake, and only a mistake, moves the logits by more than the tolerance."""
    if MISTAKES[mistake]:
        monkeypatch.setattr(*MISTAKES[mistake])
    expectation = pytest.raises(RuntimeError) if "from 0" in mistake else nullcontext()
    with expectation:  # the wrong kind of layer does not take the weights
        logits, _, _ = worst("hybrid5")
        assert (logits > 1e-2) == (MISTAKES[mistake] is not None)


def test_public_names_and_sizes():
    """The full model on the meta device has the public tensors: 2,779,484,476,000 numbers, experts stacked."""
    state = K3Model(K3Config(), device="meta", dtype=torch.bfloat16).state_dict()
    assert sum(t.numel() for t in state.values()) == 2_779_484_476_000
    layer = "language_model.model.layers.1.block_sparse_moe."
    assert state[layer + "experts.w2"].shape == (896, 3584, 3072)
    assert state[layer + "gate.e_score_correction_bias"].dtype == torch.float32
    assert len(state) == 2460 + 92 * 3


def test_tiny_trains():
    """The config every user tries first learns a fixed batch by heart, past its max_position_embeddings."""
    torch.manual_seed(0)
    model = K3Model(tiny())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    x = ids(2, 20)
    for _ in range(60):
        loss = model(x, labels=x.roll(-1, 1))["loss"]
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss < 0.1


def test_pad_row():
    """The pad row starts at zero and gets no gradient, even where the pad id occurs."""
    model = K3Model(tiny(pad_token_id=3))
    x = torch.tensor([[3, 1, 3, 2]])
    model(x, labels=x)["loss"].backward()
    weight = model.decoder.embed_tokens.weight
    assert not weight[3].any() and not weight.grad[3].any() and weight.grad[1].any()


@pytest.mark.parametrize("name", ["pixel_values", "image_grid_thw", "video_values", "attention_mask"])
def test_other_inputs_are_refused(name):
    """What a text backbone does not have is refused by the name of the argument."""
    with pytest.raises(NotImplementedError, match=name):
        lively(tiny())(ids(1, 3), **{name: torch.zeros(1)})


def test_future_is_not_seen():
    """Changing a token changes no earlier logits, in a model of both mixers."""
    model, x = lively(tiny()), ids(1, 12)
    changed = x.clone()
    changed[0, 7] = (x[0, 7] + 1) % 32
    a, b = model(x)["logits"], model(changed)["logits"]
    assert torch.equal(a[:, :7], b[:, :7]) and not torch.equal(a[:, 7], b[:, 7])
