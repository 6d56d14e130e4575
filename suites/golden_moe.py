"""The router and the latent mixture of experts against the vendor's run; routing is compared directly.

A norm follows the combined latent, so a wrong weight or factor hardly moves the logits: the weights are tested here.
"""

import pytest
import torch

from suites.goldens import GRADIENT_LENGTHS, LENGTHS, close, relative
from suites.models import Watch, golden_model, public_gradients

CASES = ("readme2", "hybrid5", "mxfp4_3")
ALL = [(case, length) for case, lengths in LENGTHS.items() for length in lengths]
GRADIENTS = [(case, length) for case, lengths in GRADIENT_LENGTHS.items() for length in lengths]
PARTS = {
    "routed_expert_down_proj": "latent", "routed_expert_norm": "routed_norm", "routed_expert_up_proj": "routed_up",
    "shared_experts": "shared",
}  # fmt: skip


def ascending(index, weight):
    """Sort one routing decision as the golden files do: experts ascending."""
    order = index.argsort(dim=-1)
    return index.gather(-1, order), weight.gather(-1, order)


@pytest.mark.parametrize(("case", "length"), ALL)
def test_routing(golden, length):
    """Every token of every layer takes exactly the vendor's experts, with the vendor's weights."""
    model = golden_model(golden)
    with Watch(model) as watch:
        model(golden.inputs(length)[0])
    wanted = {k: v for k, v in golden.expected("f32", length).items() if k.endswith("topk_idx")}
    assert wanted
    for key, indices in wanted.items():
        layer = key.split(".")[0].removeprefix("layer")
        index, weight = ascending(*watch.outputs[f"layers.{layer}.block_sparse_moe.gate"])
        assert torch.equal(index.int(), indices), f"layer {layer} routes differently"
        assert weight.dtype == torch.float32
        close(weight, golden.get(f"f32.T{length}.layer{layer}.topk_weight"), 2e-5, f"layer {layer} weights")


@pytest.mark.parametrize("case", CASES)
def test_details(golden):
    """Latent, weighted sum, norm, up-projection, shared part and output of the first MoE layer match the vendor's."""
    index, wanted = golden.detail("moe")
    moe = golden_model(golden).get_submodule(f"language_model.model.layers.{index}.block_sparse_moe")
    with Watch(moe) as watch:
        out = moe(wanted["in"])
    for name, key in PARTS.items():
        close(watch.outputs[name].reshape(wanted[key].shape), wanted[key], 5e-5, key)
    close(watch.inputs["routed_expert_norm"].reshape(wanted["routed_sum"].shape), wanted["routed_sum"], 5e-5, "sum")
    close(out, wanted["out"], 5e-5, "out")


@pytest.mark.parametrize("case", CASES)
def test_dense(golden):
    """The dense MLP with SiTU, fed the vendor's own input, gives the vendor's output."""
    index, wanted = golden.detail("dense")
    mlp = golden_model(golden).get_submodule(f"language_model.model.layers.{index}.mlp")
    close(mlp(wanted["in"]), wanted["out"], 2e-5, "out")


@pytest.mark.parametrize(("case", "length"), GRADIENTS)
def test_gradients(golden, length):
    """Gradients of router, latents, experts and shared experts equal the vendor's; the correction bias gets none."""
    ids, labels = golden.inputs(length)
    model = golden_model(golden)
    model(ids, labels=labels)["loss"].backward()
    found = public_gradients(model)
    wanted = {n: g for n, g in golden.gradients(length).items() if ".block_sparse_moe." in n or ".mlp." in n}
    assert wanted
    for name, gradient in wanted.items():
        relative(found[name], gradient, 1e-3, name)
    assert not any(name.endswith("e_score_correction_bias") for name in found)


@pytest.mark.parametrize("case", ["hybrid5", "mxfp4_3"])
def test_bfloat16_router(golden):
    """In bfloat16 the router still scores in float32: no golden token changes experts at T=7."""
    model = golden_model(golden, torch.bfloat16)
    with Watch(model) as watch:
        model(golden.inputs(7)[0])
    for key, indices in golden.expected("bf16", 7).items():
        if key.endswith("topk_idx"):
            layer = key.split(".")[0].removeprefix("layer")
            gate = f"layers.{layer}.block_sparse_moe.gate"
            index, weight = ascending(*watch.outputs[gate])
            assert torch.equal(index.int(), indices) and weight.dtype == torch.float32
            score = torch.sigmoid(watch.inputs[gate].float() @ model.get_submodule(Watch.ROOT + gate).weight.float().T)
            picked = score.reshape(-1, score.shape[-1]).gather(1, index)
            close(weight, picked / picked.sum(-1, keepdim=True), 1e-6, f"layer {layer} weights")
