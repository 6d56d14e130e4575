"""K3Config: the public model by default, every public field mapped or refused by name, all faults at once."""

import json
from dataclasses import replace

import pytest

from k3 import K3Config
from k3.hf_config import PUBLISHED_QUANTIZATION
from tests.k3.support import tiny


@pytest.fixture
def public():
    """The public nested form of the public model."""
    found = K3Config().to_hf()
    found["text_config"]["quantization_config"] = PUBLISHED_QUANTIZATION
    return found


def test_schedule_counts_from_one():
    """The two lists count from 1: every fourth layer is MLA, and the last two are."""
    config = K3Config()
    mla = [i for i, kind in enumerate(config.layer_types) if kind == "mla"]
    assert mla == [*range(3, 92, 4), 92]
    assert config.attention_type(0) == "kda" and config.attention_type(3) == "mla"
    assert [config.is_moe(i) for i in (0, 1, 92)] == [False, True, True]
    with pytest.raises(IndexError, match="outside 0..92"):
        config.attention_type(93)


def test_round_trip(public, tmp_path):
    """The public form gives the default config, from a dict, a file and a folder, and comes back unchanged."""
    (tmp_path / "config.json").write_text(json.dumps(public))
    for source in (public, tmp_path, tmp_path / "config.json", str(tmp_path)):
        config = K3Config.from_hf(source)
        assert config == K3Config() and hash(config) == hash(K3Config())
        assert config.to_hf() == public


def test_fields_without_role_survive(public):
    """Fields that change nothing in the forward pass are carried through, and a changed field is written back."""
    public["text_config"] |= {"temperature": 0.7, "_note": "kept"}
    public["vision_config"] = {"vt_hidden_size": 16}
    written = replace(K3Config.from_hf(public), num_experts_per_token=8).to_hf()
    text = written["text_config"]
    assert (text["temperature"], text["_note"], text["num_experts_per_token"]) == (0.7, "kept", 8)
    assert written["vision_config"] == {"vt_hidden_size": 16}
    assert text["quantization_config"] == PUBLISHED_QUANTIZATION


def test_every_text_field_is_read(public):
    """Each mapped public field, removed or given nonsense, is missed by name: nothing falls back to a default."""
    optional = "max_position_embeddings topk_method use_grouped_topk num_key_value_heads pad_token_id initializer_range"
    skipped = {*optional.split(), "linear_attn_config", "quantization_config", "tie_word_embeddings"}
    skipped |= {"architectures", "bos_token_id", "eos_token_id", "dtype", "model_type", "use_cache"}
    fields = set(public["text_config"]) - skipped - {"num_nextn_predict_layers"}
    assert len(fields) == 30
    for name in fields:
        text = {key: value for key, value in public["text_config"].items() if key != name}
        with pytest.raises(ValueError, match=rf"text_config.{name} is missing"):
            K3Config.from_hf(public | {"text_config": text})
    for name in public["text_config"]["linear_attn_config"]:
        linear = {k: v for k, v in public["text_config"]["linear_attn_config"].items() if k != name}
        with pytest.raises(ValueError, match=rf"linear_attn_config.{name} is missing"):
            K3Config.from_hf(public | {"text_config": public["text_config"] | {"linear_attn_config": linear}})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("moe_renormalize", False), ("moe_router_activation_func", "softmax"), ("latent_moe_use_norm", False),
        ("routed_expert_hidden_size", None), ("mla_use_output_gate", False), ("mla_use_nope", False),
        ("kda_use_full_rank_gate", False), ("kda_gate_lower_bound", None), ("attn_res_block_size", None),
        ("hidden_act", "silu"), ("topk_method", "greedy"), ("kda_gate_lower_bound", -6.0), ("hidden_size", 0),
        ("num_experts", True), ("rms_norm_eps", float("nan")), ("num_key_value_heads", 1), ("topk_group", 2),
        ("num_expert_group", 3), ("num_experts_per_token", 5), ("pad_token_id", 32), ("kda_layers", (0,)),
        ("kda_layers", (1, 2)), ("full_attention_layers", ("2",)), ("num_hidden_layers", 3),
    ],
)  # fmt: skip
def test_refused_values(name, value):
    """What the public model does not use, and what makes no sense, is refused by the field's name."""
    with pytest.raises(ValueError, match=name):
        tiny(**{name: value})


def test_all_faults_at_once(public):
    """One error names every fault of a file: missing, unknown, unimplemented, out of range and contradictory."""
    text = public["text_config"]
    text |= {"moe_renormalize": False, "surprise": 1, "tie_word_embeddings": True, "hidden_size": -1, "topk_group": 9}
    text["linear_attn_config"] |= {"gate_lower_bound": None, "rope": 1}
    text["quantization_config"] = PUBLISHED_QUANTIZATION | {"format": "int4-pack"}
    del text["kv_lora_rank"]
    with pytest.raises(ValueError) as caught:
        K3Config.from_hf(public | {"num_nextn_predict_layers": 1, "other": 2})
    named = (
        "moe_renormalize surprise tie_word_embeddings hidden_size topk_group gate_lower_bound rope "
        "format='int4-pack' kv_lora_rank num_nextn_predict_layers other"
    )
    assert [name for name in named.split() if name not in str(caught.value)] == []


def test_pad_token():
    """A left-out pad id beyond a small vocabulary means no padding row; one given in a file is refused."""
    assert K3Config().pad_token_id == 163839 and tiny().pad_token_id is None and tiny(pad_token_id=0).pad_token_id == 0
    written = tiny().to_hf()
    written["text_config"]["pad_token_id"] = 163839
    with pytest.raises(ValueError, match="pad_token_id=163839"):
        K3Config.from_hf(written)


def test_flat_text_config(public):
    """A text_config by itself, as `kimi_linear` configs come, is read as the nested form's."""
    assert K3Config.from_hf(public["text_config"]) == K3Config()


def test_wrong_document():
    """A dict that is not the public nested form is refused by what it is."""
    with pytest.raises(ValueError, match="model_type='llama'"):
        K3Config.from_hf({"model_type": "llama", "hidden_size": 8})


def test_unknown_keyword():
    """A mistyped keyword is an error, not a default."""
    with pytest.raises(TypeError, match="hidden_sise"):
        tiny(hidden_sise=8)
