"""The model against our own equations on configs no golden vector covers, in float64 (tight) and float32 (published).

The odd proxy has expert groups, a scaling factor, two dense layers, blocks of three, three taps, and different head
counts in its two attentions; the faint one has latents and queries so small that every epsilon decides the result.
"""

import pytest
import torch

from suites import oracle, oracle_weights, proxies
from suites.goldens import close, relative
from suites.models import Watch, build, native_state, public_gradients

WEIGHTS = {"odd": proxies.odd, "faint": proxies.faint}
# float64 throughout leaves only the order of sums; 1e-9 is far below any wrong epsilon, constant or rounding
TIGHT = 1e-9


def run(weights: str, length: int, dtype):
    """The model's and the oracle's view of one forward pass: (watch, out, trace, logits, labels)."""
    tensors = WEIGHTS[weights]()
    ids, labels = proxies.tokens(length)
    trace = oracle.Trace()
    logits = oracle.forward(tensors, proxies.ODD_TEXT, ids, trace)
    model = build(proxies.ODD, tensors, dtype)
    with Watch(model) as watch:
        out = model(ids, labels=labels)
    return watch, out, trace, logits, labels


@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("length", [1, 2, 63])
def test_float64(weights, length):
    """Every layer, the logits and the loss of a float64 model equal the equations."""
    watch, out, trace, logits, labels = run(weights, length, torch.float64)
    for i in range(proxies.ODD_TEXT["num_hidden_layers"]):
        close(watch.outputs[f"layers.{i}"][0], trace[f"layer{i}.hidden"], TIGHT, f"layer {i}")
    close(out["logits"], logits, TIGHT, "logits")
    close(out["loss"], oracle.loss(logits, labels), TIGHT, "loss")


@pytest.mark.parametrize("weights", WEIGHTS)
def test_float64_gradients(weights):
    """Every gradient of a float64 model equals autograd on the equations, and the same parameters receive one."""
    tensors, (ids, labels) = WEIGHTS[weights](), proxies.tokens(37)
    value, wanted = oracle.gradients(tensors, proxies.ODD_TEXT, ids, labels)
    model = build(proxies.ODD, tensors, torch.float64)
    out = model(ids, labels=labels)
    out["loss"].backward()
    close(out["loss"], value, TIGHT, "loss")
    found = public_gradients(model)
    for name, gradient in wanted.items():
        relative(found[name], gradient, 1e-7, name)
    assert not [name for name in found.keys() - wanted.keys() if found[name].any()]


@pytest.mark.parametrize("length", [63, 130])
def test_published_differences(length, measure):
    """In float32 the worst layer, logit, loss and gradient differences stay small; they are recorded as measures."""
    watch, out, trace, logits, labels = run("odd", length, torch.float32)
    layers = range(proxies.ODD_TEXT["num_hidden_layers"])
    found = {
        "layer": max(
            close(watch.outputs[f"layers.{i}"][0], trace[f"layer{i}.hidden"], 2e-3, f"layer {i}") for i in layers
        ),
        "logit": close(out["logits"], logits, 2e-3, "logits"),
        "loss": close(out["loss"], oracle.loss(logits, labels), 1e-5, "loss"),
    }
    for name, value in found.items():
        measure(f"oracle.{name}_max_abs", "1", "lower", [value], shape=f"T={length}", dtype="float32")


def test_published_gradient_differences(measure):
    """In float32 every gradient is within 1e-3 of the equations (relative L2); the worst is recorded as a measure."""
    tensors, (ids, labels) = proxies.odd(), proxies.tokens(63)
    _, wanted = oracle.gradients(tensors, proxies.ODD_TEXT, ids, labels)
    model = build(proxies.ODD, tensors)
    model(ids, labels=labels)["loss"].backward()
    found = public_gradients(model)
    worst = max(relative(found[name], gradient, 1e-3, name) for name, gradient in wanted.items())
    measure("oracle.gradient_max_rel_l2", "1", "lower", [worst], shape="T=63", dtype="float32")


def test_loss_mask():
    """A loss mask weighs each label, -100 stays out, and the gradient follows."""
    tensors, (ids, labels) = proxies.odd(), proxies.tokens(17)
    mask = torch.rand(ids.shape, generator=torch.Generator().manual_seed(3)).round()
    value, wanted = oracle.gradients(tensors, proxies.ODD_TEXT, ids, labels, mask)
    model = build(proxies.ODD, tensors, torch.float64)
    loss = model(ids, labels=labels, loss_mask=mask)["loss"]
    loss.backward()
    close(loss, value, TIGHT, "masked loss")
    relative(
        model.get_parameter("language_model.lm_head.weight").grad, wanted["language_model.lm_head.weight"], 1e-7, ""
    )


def test_nothing_to_learn():
    """With every label ignored the loss is 0 and every gradient 0, not NaN."""
    ids, labels = proxies.tokens(5)
    model = build(proxies.ODD, proxies.odd(), torch.float64)
    loss = model(ids, labels=torch.full_like(labels, -100))["loss"]
    loss.backward()
    assert loss.item() == 0.0
    assert all(p.grad is None or not p.grad.any() for p in model.parameters())


def test_pad_row_gets_no_gradient():
    """The embedding row of the pad token receives no gradient although the token occurs."""
    ids, labels = proxies.tokens(9)
    ids[0, 3] = ids[1, 0] = proxies.ODD_TEXT["pad_token_id"]
    tensors = proxies.odd()
    _, wanted = oracle.gradients(tensors, proxies.ODD_TEXT, ids, labels)
    model = build(proxies.ODD, tensors, torch.float64)
    model(ids, labels=labels)["loss"].backward()
    name = "language_model.model.embed_tokens.weight"
    gradient = model.get_parameter(name).grad
    assert not gradient[0].any() and gradient[1:].any()
    relative(gradient, wanted[name], 1e-7, name)


@pytest.mark.parametrize("weights", WEIGHTS)
def test_routing_in_groups(weights):
    """Expert groups, the selection-only bias and the scaling factor: indices exact, weights to rounding."""
    watch, _, trace, _, _ = run(weights, 63, torch.float64)
    for i in range(proxies.ODD_TEXT["first_k_dense_replace"], proxies.ODD_TEXT["num_hidden_layers"]):
        index, weight = watch.outputs[f"layers.{i}.block_sparse_moe.gate"]
        order = index.argsort(dim=-1)
        assert torch.equal(index.gather(-1, order), trace[f"layer{i}.topk_idx"]), f"layer {i} routes differently"
        close(weight.gather(-1, order), trace[f"layer{i}.topk_weight"], TIGHT, f"layer {i} weights")


def test_names_and_shapes():
    """The model's own parameters and buffers are the public tensors of the config, experts stacked."""
    model = build(proxies.ODD, proxies.odd())
    wanted = native_state(oracle_weights.draw(proxies.ODD_TEXT, 0), 5)
    assert {n: t.shape for n, t in model.state_dict().items()} == {n: t.shape for n, t in wanted.items()}
