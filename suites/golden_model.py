"""The whole model against the vendor's run: logits, layers, both losses and every gradient, float32 and bfloat16."""

import pytest
import torch

from suites.goldens import GRADIENT_LENGTHS, LENGTHS, Golden, close, relative
from suites.models import Watch, golden_model, public_gradients

ALL = [(case, length) for case, lengths in LENGTHS.items() for length in lengths]
GRADIENTS = [(case, length) for case, lengths in GRADIENT_LENGTHS.items() for length in lengths]
FLIP_FREE = [pair for pair in ALL if Golden(pair[0]).routing_flips(pair[1]) == 0]


@pytest.mark.parametrize(("case", "length"), ALL)
def test_logits(golden, length, measure):
    """float32 logits equal the vendor's within 1e-3, ten times the spread of three implementations."""
    ids, _ = golden.inputs(length)
    logits = golden_model(golden)(ids)["logits"]
    assert logits.dtype == torch.float32
    worst = close(logits, golden.get(f"f32.T{length}.logits"), 1e-3, "logits")
    measure(f"golden.{golden.case}.logits_max_abs", "1", "lower", [worst], shape=f"T={length}", dtype="float32")


@pytest.mark.parametrize(("case", "length"), ALL)
def test_float64_logits(golden, length):
    """A float64 model is float64 throughout: its logits equal the float64 reference within 1e-9."""
    logits = golden_model(golden, torch.float64)(golden.inputs(length)[0])["logits"]
    assert logits.dtype == torch.float64
    close(logits, golden.get(f"f64.T{length}.logits"), 1e-9, "logits")


@pytest.mark.parametrize(("case", "length"), ALL)
def test_hidden(golden, length):
    """The residual prefix that leaves every layer equals the vendor's."""
    model = golden_model(golden)
    with Watch(model) as watch:
        model(golden.inputs(length)[0])
    for i in range(golden.text["num_hidden_layers"]):
        close(watch.outputs[f"layers.{i}"][0], golden.get(f"f32.T{length}.layer{i}.hidden"), 1e-3, f"layer {i}")


@pytest.mark.parametrize("case", ["readme2", "hybrid5", "mxfp4_3"])
def test_head_input(golden):
    """The head takes the final norm of the output mix, without scale or cap."""
    model = golden_model(golden)
    with Watch(model) as watch:
        logits = model(golden.inputs(7)[0])["logits"]
    normed = golden.get("f32.T7.detail.final.norm")
    close(watch.outputs["norm"], normed, 1e-3, "final.norm")
    close(logits, watch.outputs["norm"] @ model.state_dict()["language_model.lm_head.weight"].T, 1e-5, "logits")


@pytest.mark.parametrize(("case", "length"), ALL)
def test_loss(golden, length):
    """The loss of aligned labels, and of the shifted convention where it exists, equals the vendor's."""
    ids, labels = golden.inputs(length)
    model = golden_model(golden)
    close(model(ids, labels=labels)["loss"].reshape(1), golden.get(f"f32.T{length}.loss"), 1e-4, "loss")
    if length > 1:
        shifted = model(ids, labels=labels, shift_labels=True)["loss"].reshape(1)
        close(shifted, golden.get(f"f32.T{length}.loss_hf_shift"), 1e-4, "loss_hf_shift")


@pytest.mark.parametrize(("case", "length"), GRADIENTS)
def test_gradients(golden, length):
    """Every gradient the vendor produced is reproduced, and parameters without one there have none or zero here."""
    ids, labels = golden.inputs(length)
    model = golden_model(golden)
    model(ids, labels=labels)["loss"].backward()
    found, wanted = public_gradients(model), golden.gradients(length)
    assert wanted
    for name, gradient in wanted.items():
        relative(found[name], gradient, 1e-3, name)
    for name in golden.notes["_golden"]["cross_checks_max_abs"][f"T{length}"]["f32"]["params_without_grad"]:
        assert name not in found or not found[name].any(), f"{name} receives a gradient; the vendor's run gave none"


@pytest.mark.parametrize(("case", "length"), FLIP_FREE)
def test_bfloat16_logits(golden, length, measure):
    """bfloat16 logits are as near to float64 as the vendor's own bfloat16 run, where no routing flips."""
    logits = golden_model(golden, torch.bfloat16)(golden.inputs(length)[0])["logits"]
    assert logits.dtype == torch.bfloat16
    error = (logits.double() - golden.get(f"f64.T{length}.logits")).abs()
    limit = 1.5 * golden.bf16_mean(length)
    assert float(error.mean()) <= limit, f"mean |error| {float(error.mean()):.4f} is above {limit:.4f}"
    measure(f"golden.{golden.case}.bf16_mean_abs", "1", "lower", [error.mean()], shape=f"T={length}", dtype="bfloat16")


@pytest.mark.parametrize(("case", "length"), FLIP_FREE)
def test_bfloat16_layers(golden, length):
    """In bfloat16 every layer leaves the vendor's bfloat16 prefix but for single roundings."""
    model = golden_model(golden, torch.bfloat16)
    with Watch(model) as watch:
        model(golden.inputs(length)[0])
    for i in range(golden.text["num_hidden_layers"]):
        wanted = golden.get(f"bf16.T{length}.layer{i}.hidden")
        relative(watch.outputs[f"layers.{i}"][0], wanted, 2e-2, f"layer {i}")
