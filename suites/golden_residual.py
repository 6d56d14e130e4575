"""Attention residuals against the vendor's run: every mix over depth, the snapshots, the prefix that restarts."""

import pytest
import torch

from suites.goldens import GRADIENT_LENGTHS, LENGTHS, close, relative
from suites.models import Watch, golden_model, public_gradients

CASES = ("readme2", "hybrid5", "mxfp4_3")
ALL = [(case, length) for case, lengths in LENGTHS.items() for length in lengths]
GRADIENTS = [(case, length) for case, lengths in GRADIENT_LENGTHS.items() for length in lengths]


@pytest.mark.parametrize("case", CASES)
def test_mixes(golden):
    """What every norm receives from the mix over depth equals the vendor's, up to the output mix."""
    model = golden_model(golden)
    with Watch(model) as watch:
        model(golden.inputs(7)[0])
    for i in range(golden.text["num_hidden_layers"]):
        if i:
            wanted = golden.get(f"f32.T7.layer{i}.attn_mix")
            close(watch.inputs[f"layers.{i}.input_layernorm"], wanted, 5e-4, f"layer {i} attention mix")
        wanted = golden.get(f"f32.T7.layer{i}.mlp_mix")
        close(watch.inputs[f"layers.{i}.post_attention_layernorm"], wanted, 5e-4, f"layer {i} MLP mix")
    close(watch.inputs["norm"], golden.get("f32.T7.output_mix"), 5e-4, "output mix")


@pytest.mark.parametrize(("case", "length"), ALL)
def test_snapshots(golden, length):
    """The bank that leaves the last layer holds the vendor's snapshots in creation order, and nothing else."""
    model = golden_model(golden)
    with Watch(model) as watch:
        model(golden.inputs(length)[0])
    _, bank = watch.outputs[f"layers.{golden.text['num_hidden_layers'] - 1}"]
    found = torch.stack(list(bank), dim=-2).flatten(0, 1)
    close(found, golden.get(f"f32.T{length}.snapshots"), 1e-3, "snapshots")


@pytest.mark.parametrize(("case", "length"), GRADIENTS)
def test_gradients(golden, length):
    """Gradients of every residual norm and projection equal the vendor's; layer 0's attention mix has none."""
    ids, labels = golden.inputs(length)
    model = golden_model(golden)
    model(ids, labels=labels)["loss"].backward()
    found = public_gradients(model)
    wanted = {name: gradient for name, gradient in golden.gradients(length).items() if "_res_" in name}
    assert len(wanted) == 4 * golden.text["num_hidden_layers"]
    for name, gradient in wanted.items():
        relative(found[name], gradient, 1e-3, name)
    assert not any(
        found.get(f"{Watch.ROOT}layers.0.self_attention_res_{n}.weight") is not None for n in ("norm", "proj")
    )
