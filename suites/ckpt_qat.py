"""QAT: what it wraps, that the forward sees what export writes, that it trains, and the audit of both sides."""

import json

import pytest
import torch

from k3 import K3Model, qat
from k3.checkpoint import load_hf_weights, save_hf_weights
from k3.checkpoint.audit_qat import audit_qat
from k3.checkpoint.validate import main
from k3.ops.mxfp4 import pack_naive, unpack_naive
from k3.protocol import ImplConfig, build_model
from suites import ckpt_folders as folders
from suites.ckpt_folders import LAYER, MOE

QAT = {"enabled": True, "format": "mxfp4"}
STACKS = [LAYER + f"{layer}.{MOE}experts.{which}" for layer in (1, 2) for which in ("w1", "w2", "w3")]


def _batch():
    random = torch.Generator().manual_seed(23)
    return torch.randint(1, 96, (2, 17), generator=random), torch.randint(1, 96, (2, 17), generator=random)


def _trained(steps=3, dtype=torch.float32, **options):
    model = folders.model(dtype)
    qat.apply(model, QAT | options)
    ids, labels = _batch()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)  # no decay: only a gradient moves a master
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(input_ids=ids, labels=labels)["loss"]
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return model, losses


def test_extras_say_what_was_wrapped():
    """The bundle lists the six expert stacks as wrapped and every other parameter and buffer as not."""
    bundle = build_model(folders.config(), impl_cfg=ImplConfig(device="cpu", dtype="bfloat16", qat=QAT))
    report = bundle.extras["qat"]
    assert report["enabled"] and report["format"] == "mxfp4" and sorted(report["wrapped"]) == sorted(STACKS)
    everything = set(K3Model(folders.config(), device="meta").state_dict())
    assert set(report["untouched"]) == everything - set(STACKS)


def test_nothing_else_is_touched():
    """Outside the stacks a QAT model has the modules, classes, parameters and bits of the plain one."""
    plain, wrapped = folders.model(), folders.model()
    qat.apply(wrapped, QAT)
    modules = {name: type(m) for name, m in wrapped.named_modules() if ".experts" not in name}
    assert modules == {name: type(m) for name, m in plain.named_modules() if ".experts" not in name}
    state = {name: tensor for name, tensor in wrapped.state_dict().items() if ".experts." not in name}
    folders.assert_same_bytes(state, {n: t for n, t in plain.state_dict().items() if ".experts." not in n})


@pytest.mark.parametrize("rule", ["floor", "even", "ceil6"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
def test_forward_uses_the_exported_weights(rule, dtype):
    """Each stack as the forward reads it equals decoding the packed bf16-rounded master, one code at a time."""
    model = folders.model(dtype)
    qat.apply(model, QAT | {"scale_rule": rule})
    master = folders.model(dtype).state_dict()
    for layer in (1, 2):
        experts = model.decoder.layers[str(layer)].block_sparse_moe.experts
        for which in ("w1", "w2", "w3"):
            rounded = master[LAYER + f"{layer}.{MOE}experts.{which}"].bfloat16().float()
            assert torch.equal(getattr(experts, which), unpack_naive(*pack_naive(rounded, rule), dtype))


def test_trainer_and_rollout_compute_the_same_logits(tmp_path):
    """After training steps, a plain model loaded from the MXFP4 export gives the trainer's logits bit for bit."""
    model, _ = _trained(dtype=torch.bfloat16)
    save_hf_weights(model, tmp_path, model.config, target="mxfp4")
    rollout = K3Model(model.config, dtype=torch.bfloat16)
    load_hf_weights(rollout, tmp_path, model.config)
    ids, _ = _batch()
    with torch.no_grad():
        assert torch.equal(rollout(input_ids=ids)["logits"], model(input_ids=ids)["logits"])


def test_twenty_steps_lower_the_loss():
    """Twenty Adam steps under fake quantisation lower the loss by more than a tenth, and move the masters."""
    model, losses = _trained(20)
    assert 0 < losses[-1] < 0.9 * losses[0], losses
    before = folders.model().state_dict()
    after = {
        name.replace("parametrizations.", "").replace(".original", ""): t for name, t in model.state_dict().items()
    }
    assert all(not torch.equal(after[name], before[name]) for name in STACKS)


def test_gradient_is_straight_through():
    """A stack's gradient under QAT is the plain model's gradient at the quantised weights."""
    quantised, plain = folders.model(), folders.model()
    qat.apply(quantised, QAT)
    seen = qat.seen_weights(quantised)
    plain.load_state_dict(plain.state_dict() | seen)
    ids, labels = _batch()
    for model in (quantised, plain):
        model(input_ids=ids, labels=labels)["loss"].backward()
    gradients = dict(plain.named_parameters())
    for name, parameter in quantised.named_parameters():
        name = name.replace("parametrizations.", "").replace(".original", "")
        torch.testing.assert_close(parameter.grad, gradients[name].grad, rtol=0, atol=0)


def test_audit_of_a_faithful_export(tmp_path):
    """A trained model, its bf16 masters and its packed export agree layer by layer."""
    model, _ = _trained()
    save_hf_weights(model, tmp_path / "masters", model.config)
    save_hf_weights(model, tmp_path / "packed", model.config, target="mxfp4")
    for trained in (model, tmp_path / "masters"):
        report = audit_qat(trained, tmp_path / "packed")
        assert report["passed"] and [row["layer"] for row in report["layers"]] == [
            "globals", "layer 0", "layer 1", "layer 2",
        ]  # fmt: skip


def test_audit_names_what_differs(tmp_path, capsys):
    """Another scale rule, a changed norm and an unquantised side are listed under their layers, with exit code 1."""
    model, _ = _trained()
    save_hf_weights(model, tmp_path / "masters", model.config)
    with torch.no_grad():
        model.decoder.layers["1"].input_layernorm.weight[3] += 1
    save_hf_weights(model, tmp_path / "packed", model.config, target="mxfp4", scale_rule="ceil6")
    output = tmp_path / "audit.json"
    assert main(["audit-qat", str(tmp_path / "masters"), str(tmp_path / "packed"), "--output", str(output)]) == 1
    lines = {line.split(":")[0]: line for line in capsys.readouterr().out.splitlines()}
    assert "layers.1.input_layernorm.weight differs" in lines["layer 1"] and "experts." in lines["layer 2"]
    assert lines["layer 0"].endswith("tensors equal") and not output.exists()
    plain = audit_qat(folders.model(), tmp_path / "packed")
    assert "is quantised only in exported" in json.dumps(plain["layers"][2])


@pytest.mark.parametrize(
    "options, error, message",
    [
        ({"enabled": True, "format": "int4"}, NotImplementedError, "int4"),
        ({"enabled": True, "bits": 4}, ValueError, "bits"),
        ({"enabled": True, "scale_rule": "like_source"}, ValueError, "like_source"),
    ],
)  # fmt: skip
def test_unknown_options_are_refused(options, error, message):
    """Another format, an unknown option and a rule that needs a source are refused by name."""
    with pytest.raises(error, match=message):
        qat.apply(folders.model(), options)


def test_widths_without_whole_blocks_are_refused():
    """A model whose experts are no multiple of 32 wide is refused before anything is wrapped."""
    model = folders.model(moe_intermediate_size=48)
    with pytest.raises(ValueError, match="w2 has 48 inputs"):
        qat.apply(model, QAT)
    assert not qat.is_applied(model)


def test_disabled_means_untouched():
    """`enabled: False` wraps nothing and says so."""
    model = folders.model()
    report = qat.apply(model, {"enabled": False})
    assert not report["wrapped"] and not report["enabled"] and not qat.is_applied(model)
