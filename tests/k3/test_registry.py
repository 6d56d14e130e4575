"""`register_model`: transformers' Auto classes, Megatron Lite where present, and nobody else's names."""

import json
import sys

import pytest
import torch

from k3 import K3Config, register_model
from suites.goldens import FOLDER, Golden
from suites.models import golden_model
from tests.k3.support import tiny

# A small real package in the shape of Megatron Lite's registry, written by the test and found on sys.path.
REGISTRY = """
MODELS = {}

def register_model(name, *, package, hf_model_types, impls):
    MODELS[name] = {"package": package, "hf_model_types": list(hf_model_types), "impls": dict(impls)}

def resolve_model_type_from_hf(hf_config):
    kind = hf_config["model_type"]
    return next((name for name, model in MODELS.items() if kind in model["hf_model_types"]), None)
"""


@pytest.fixture
def install(tmp_path, monkeypatch):
    """A function that puts the package megatron.lite.model.registry, with this source, on sys.path for one test."""

    def write(registry: str) -> None:
        package = tmp_path / "megatron" / "lite" / "model"
        package.mkdir(parents=True)
        for place in (package, package.parent, package.parent.parent):
            (place / "__init__.py").touch()
        (package / "registry.py").write_text(registry)
        monkeypatch.syspath_prepend(tmp_path)

    yield write
    for name in [name for name in sys.modules if name.split(".")[0] == "megatron"]:
        del sys.modules[name]


def test_megatron_lite(install):
    """With the package importable, one call registers "k3" and its protocol builds a model."""
    install(REGISTRY)
    from megatron.lite.model.registry import MODELS, resolve_model_type_from_hf

    assert resolve_model_type_from_hf({"model_type": "kimi_k3"}) is None
    assert register_model() == {"transformers": True, "megatron_lite": True}
    assert resolve_model_type_from_hf({"model_type": "kimi_k3"}) == "k3"
    assert resolve_model_type_from_hf({"model_type": "kimi_linear"}) == "k3"
    lite = MODELS["k3"]["impls"]["lite"]
    config = lite.build_model_config(tiny().to_hf())
    bundle = lite.build_model(config, impl_cfg=lite.ImplConfig(device="cpu", dtype="float32"))
    assert MODELS["k3"]["package"] == "k3" and lite.vocab_size(config) == 32
    assert callable(lite.load_hf_weights) and callable(lite.export_hf_weights)
    assert sorted(vars(bundle)) == ["chunks", "extras", "forward_step", "parallel_state"]


def test_broken_megatron_lite_is_not_hidden(install):
    """A Megatron Lite that is there and fails to import raises its own error; an absent one is no error."""
    assert register_model() == {"transformers": True, "megatron_lite": False}
    install("import a_missing_dependency")
    with pytest.raises(ModuleNotFoundError, match="a_missing_dependency"):
        register_model()


def test_auto_config_and_model():
    """The Auto classes build the public config, and transformers keeps its own kimi_linear."""
    from transformers import AutoConfig, AutoModelForCausalLM

    register_model()
    text = Golden("hybrid5").hf
    config = AutoConfig.for_model("kimi_k3", **{k: v for k, v in text.items() if k != "model_type"})
    assert K3Config.from_hf_config(config) == K3Config.from_hf(text)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    assert type(model).__module__ == "k3.huggingface"
    assert model.state_dict().keys() == golden_model(Golden("hybrid5")).state_dict().keys()
    assert type(AutoConfig.for_model("kimi_linear")).__module__.startswith("transformers.")


def auto_golden():
    """The Auto class's model with the weights of a golden case, and the case."""
    from transformers import AutoConfig, AutoModelForCausalLM

    register_model()
    golden = Golden("hybrid5")
    config = AutoConfig.for_model("kimi_k3", **{k: v for k, v in golden.hf.items() if k != "model_type"})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(golden_model(golden).state_dict())
    return model, golden


def test_shifted_loss():
    """The Auto class shifts labels, as the vendor's class does; a padded batch gives the loss of its real tokens."""
    model, golden = auto_golden()
    x, labels = golden.inputs(7)
    wanted = golden.expected("f32", 7)["loss_hf_shift"][0]
    torch.testing.assert_close(model(x, labels=labels).loss, wanted, atol=1e-4, rtol=0)
    padding = torch.zeros(2, 3, dtype=torch.long)
    padded, mask = torch.cat([padding, x], 1), torch.cat([padding, torch.ones_like(x)], 1)
    out = model(padded, attention_mask=mask, labels=torch.cat([padding, labels], 1))
    torch.testing.assert_close(out.loss, wanted, atol=1e-4, rtol=0)
    torch.testing.assert_close(out.logits[:, 3:], model(x).logits, atol=1e-5, rtol=0)


def test_generate():
    """transformers' own generate gives the greedy tokens of the cached decoder."""
    from k3.decode import generate

    model, golden = auto_golden()
    x, _ = golden.inputs(7)
    found = model.generate(x, max_new_tokens=4, min_new_tokens=4, do_sample=False)
    assert torch.equal(found, generate(model.backbone, x, 4))


@pytest.mark.parametrize("case", ["hybrid5", "mxfp4_3"])
def test_from_pretrained(case, tmp_path):
    """A public-layout folder, packed or not, loads through the Auto class in the asked dtype."""
    from transformers import AutoModelForCausalLM

    register_model()
    golden = Golden(case)
    (tmp_path / "config.json").write_text(json.dumps(golden.hf))
    (tmp_path / "model.safetensors").symlink_to(FOLDER / f"{case}.weights.safetensors")
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype="float32")
    x, _ = golden.inputs(7)
    torch.testing.assert_close(model(x).logits, golden.expected("f32", 7)["logits"], atol=1e-3, rtol=0)
    with pytest.raises(NotImplementedError, match="load_in_8bit"):
        AutoModelForCausalLM.from_pretrained(tmp_path, load_in_8bit=True)
    with pytest.raises(NotImplementedError, match="save_hf_weights"):
        model.save_pretrained(tmp_path / "copy")


def test_images_are_refused():
    """The Auto class refuses pixel values by name."""
    model, golden = auto_golden()
    with pytest.raises(NotImplementedError, match="pixel_values"):
        model(golden.inputs(7)[0], pixel_values=torch.zeros(1, 3, 14, 14))
