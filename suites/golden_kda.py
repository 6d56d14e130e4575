"""Kimi delta attention against the vendor's run: every intermediate, the final state, the gradients."""

import pytest
import torch

from k3.decode import Cache
from k3.kda import KDA, kda_core
from k3.ops.kda import log_decay
from k3.ops.short_conv import short_conv
from suites.goldens import GRADIENT_LENGTHS, LENGTHS, close, relative
from suites.models import Watch, golden_model, public_gradients

CASES = ("readme2", "hybrid5", "mxfp4_3")
ALL = [(case, length) for case, lengths in LENGTHS.items() for length in lengths]
GRADIENTS = [(case, length) for case, lengths in GRADIENT_LENGTHS.items() for length in lengths]
PROJECTIONS = {"f_b_proj": "gate_logit", "b_proj": "beta_logit", "g_proj": "out_gate_logit", "o_proj": "out"}


@pytest.mark.parametrize("case", CASES)
def test_details(golden):
    """What enters and leaves each projection of the first KDA layer equals the vendor's, and so does its output."""
    index, wanted = golden.detail("kda")
    model = golden_model(golden)
    with Watch(model) as watch:
        model(golden.inputs(7)[0])
    at = f"layers.{index}.self_attn"
    close(watch.inputs[at], wanted["in"], 1e-3, "in")
    for name, key in PROJECTIONS.items():
        close(watch.outputs[f"{at}.{name}"], wanted[key], 1e-3, key)
    close(watch.inputs[f"{at}.o_proj"], wanted["normed"].flatten(-2), 1e-3, "normed")
    close(watch.outputs[at], wanted["out"], 1e-3, "out")


@pytest.mark.parametrize("case", CASES)
def test_core_details(golden):
    """Convolved q, k, v, log decay and the recurrence's output equal the vendor's, step by step from its own input."""
    index, wanted = golden.detail("kda")
    attention = golden_model(golden).get_submodule(f"language_model.model.layers.{index}.self_attn")
    weights, heads = attention.weights(), (-1, attention.head_dim)
    raw = [getattr(attention, f"{name}_proj")(wanted["in"]) for name in "qkv"]
    for name, x, weight in zip("qkv", raw, weights[:3], strict=True):
        close(short_conv(x, weight), wanted[name], 2e-5, name)
    gate = wanted["gate_logit"].unflatten(-1, heads)
    bound = golden.text["linear_attn_config"]["gate_lower_bound"]
    close(log_decay(gate, weights.A_log, weights.dt_bias, bound), wanted["log_decay"], 2e-5, "log_decay")
    core, _ = kda_core(
        *raw, wanted["gate_logit"], wanted["beta_logit"], weights, head_dim=attention.head_dim, lower_bound=bound
    )
    close(core, wanted["core"], 2e-5, "core")


@pytest.mark.parametrize("backend", ["torch_recurrent", "torch_chunk"])
@pytest.mark.parametrize(("case", "length"), ALL)
def test_state(golden, length, backend):
    """The state after the last token equals the vendor's in every KDA layer, token by token and by chunks."""
    model, cache = golden_model(golden), Cache()
    for module in model.modules():
        if isinstance(module, KDA):
            module.backend = backend
    model(golden.inputs(length)[0], cache=cache)
    wanted = {k: v for k, v in golden.expected("f32", length).items() if k.endswith("kda_state")}
    assert len(wanted) == len(golden.text["linear_attn_config"]["kda_layers"]) == len(cache.kda)
    for key, state in wanted.items():
        found = cache.kda[int(key.split(".")[0].removeprefix("layer"))].S
        assert found.dtype == torch.float32
        close(found, state, 1e-4 * float(state.abs().max()), key)


@pytest.mark.parametrize(("case", "length"), GRADIENTS)
def test_gradients(golden, length):
    """Gradients of every KDA parameter equal the vendor's, A_log and dt_bias of every head among them."""
    ids, labels = golden.inputs(length)
    model = golden_model(golden)
    model(ids, labels=labels)["loss"].backward()
    found, wanted = public_gradients(model), golden.gradients(length)
    layers = golden.text["linear_attn_config"]["kda_layers"]
    names = [n for n in wanted if ".self_attn." in n and int(n.split(".")[3]) + 1 in layers]
    assert len(names) == 14 * len(layers)
    for name in names:
        relative(found[name], wanted[name], 1e-3, name)
