"""Gated latent attention without positions against the vendor's run: latents, output, gradients."""

import pytest

from suites.goldens import GRADIENT_LENGTHS, close, relative
from suites.models import Watch, golden_model, public_gradients

CASES = ("readme2", "hybrid5", "mxfp4_3")
GRADIENTS = [(case, length) for case, lengths in GRADIENT_LENGTHS.items() for length in lengths]


@pytest.mark.parametrize("case", CASES)
def test_details(golden):
    """Both latents after their norms and the output of the first MLA layer equal the vendor's."""
    index, wanted = golden.detail("mla")
    model = golden_model(golden)
    with Watch(model) as watch:
        model(golden.inputs(7)[0])
    at = f"layers.{index}.self_attn"
    close(watch.inputs[at], wanted["in"], 1e-3, "in")
    close(watch.outputs[f"{at}.q_a_layernorm"], wanted["q_latent"], 1e-3, "q_latent")
    close(watch.outputs[f"{at}.kv_a_layernorm"], wanted["kv_latent"], 1e-3, "kv_latent")
    close(watch.outputs[at], wanted["out"], 1e-3, "out")


@pytest.mark.parametrize("case", CASES)
def test_alone(golden):
    """The first MLA layer, fed the vendor's own input, gives the vendor's output to float32 rounding."""
    index, wanted = golden.detail("mla")
    attention = golden_model(golden).get_submodule(f"language_model.model.layers.{index}.self_attn")
    close(attention(wanted["in"]), wanted["out"], 2e-5, "out")
    q_latent = attention.q_a_layernorm(attention.q_a_proj(wanted["in"]))
    close(q_latent, wanted["q_latent"], 5e-6, "q_latent: an epsilon of 1e-5 moves it by more")


@pytest.mark.parametrize(("case", "length"), GRADIENTS)
def test_gradients(golden, length):
    """Gradients of every MLA parameter equal the vendor's."""
    ids, labels = golden.inputs(length)
    model = golden_model(golden)
    model(ids, labels=labels)["loss"].backward()
    found, wanted = public_gradients(model), golden.gradients(length)
    layers = golden.text["linear_attn_config"]["full_attn_layers"]
    names = [n for n in wanted if ".self_attn." in n and int(n.split(".")[3]) + 1 in layers]
    assert len(names) == 8 * len(layers)
    for name in names:
        relative(found[name], wanted[name], 1e-3, name)
