"""The public configuration and its layer schedule: the real file where it is at hand, the same facts without it."""

import copy
import json

import pytest

from k3 import K3Config
from suites import proxies

MLA_LAYERS = [*range(3, 92, 4), 92]  # from 0: every fourth, and the last two
PUBLIC_FACTS = {
    "vocab_size": 163840, "hidden_size": 7168, "num_hidden_layers": 93, "intermediate_size": 33792,
    "first_k_dense_replace": 1, "moe_layer_freq": 1, "hidden_act": "situ", "activation_situ_beta": 4.0,
    "activation_situ_linear_beta": 25.0, "rms_norm_eps": 1e-5, "attn_res_block_size": 12, "num_attention_heads": 96,
    "num_key_value_heads": 96, "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64, "v_head_dim": 128, "mla_use_nope": True, "mla_use_output_gate": True, "kda_num_heads": 96,
    "kda_head_dim": 128, "kda_short_conv_kernel_size": 4, "kda_gate_lower_bound": -5.0, "kda_use_full_rank_gate": True,
    "num_experts": 896, "num_experts_per_token": 16, "num_shared_experts": 2, "moe_intermediate_size": 3072,
    "routed_expert_hidden_size": 3584, "latent_moe_use_norm": True, "moe_router_activation_func": "sigmoid",
    "moe_renormalize": True, "routed_scaling_factor": 1.0, "num_expert_group": 1, "topk_group": 1,
    "use_grouped_topk": True, "topk_method": "noaux_tc", "max_position_embeddings": 1048576, "pad_token_id": 163839,
}  # fmt: skip
NOT_DONE = {
    "moe_renormalize": False, "moe_router_activation_func": "softmax", "latent_moe_use_norm": False,
    "routed_expert_hidden_size": None, "mla_use_output_gate": False, "mla_use_nope": False, "attn_res_block_size": None,
    "hidden_act": "silu",
}  # fmt: skip
NOT_DONE_KDA = {"use_full_rank_gate": False, "gate_lower_bound": None}


@pytest.fixture
def changed():
    """Build from the odd proxy's public form with some text fields changed."""

    def build(**fields):
        hf = copy.deepcopy(proxies.ODD)
        hf["text_config"] |= fields
        return K3Config.from_hf(hf)

    return build


def test_defaults_are_the_public_model():
    """`K3Config()` is the public model, field by field."""
    config = K3Config()
    assert {name: getattr(config, name) for name in PUBLIC_FACTS} == PUBLIC_FACTS


def test_real_config(public, data_file):
    """The vendor's own config.json gives exactly the defaults."""
    assert K3Config.from_hf(data_file(public / "config.json")) == K3Config()


def test_real_config_survives(public, data_file):
    """What the config writes back holds the vendor's value in every field that it writes."""
    real = json.loads(data_file(public / "config.json").read_text())
    written = K3Config.from_hf(real).to_hf()
    assert K3Config.from_hf(written) == K3Config()
    text = written["text_config"]
    names = [name for name in PUBLIC_FACTS if not name.startswith("kda_")]
    assert {name: text[name] for name in names} == {name: real["text_config"][name] for name in names}
    assert text["linear_attn_config"] == real["text_config"]["linear_attn_config"]


def test_schedule():
    """Both layer lists count from 1: 69 KDA and 24 MLA layers, MLA every fourth and the last two."""
    config = K3Config()
    assert [i for i in range(93) if config.attention_type(i) == "mla"] == MLA_LAYERS
    assert list(config.layer_types) == ["mla" if i in MLA_LAYERS else "kda" for i in range(93)]
    assert config.layer_types.count("kda") == 69
    assert config.full_attention_layers == tuple(i + 1 for i in MLA_LAYERS)
    assert [i for i in range(93) if not config.is_moe(i)] == [0]


def test_schedule_of_a_proxy(changed):
    """A config with other lists, dense layers and MoE frequency follows them, from 1 and from 0 as each counts."""
    config = changed(moe_layer_freq=2)
    assert list(config.layer_types) == ["kda", "kda", "mla", "kda", "kda", "mla", "mla"]
    assert [i for i in range(7) if config.is_moe(i)] == [2, 4, 6]


def test_round_trip():
    """A config read back from its own public form is the same config."""
    config = K3Config.from_hf(proxies.ODD)
    assert K3Config.from_hf(config.to_hf()) == config
    assert config.kda_gate_lower_bound == -3.0 and config.topk_group == 2 and config.routed_scaling_factor == 2.5


@pytest.mark.parametrize("field", NOT_DONE)
def test_refuses_what_it_does_not_do(changed, field):
    """A value the public model does not use is refused by its name instead of being guessed at."""
    with pytest.raises((ValueError, NotImplementedError), match=field):
        changed(**{field: NOT_DONE[field]})


@pytest.mark.parametrize("field", NOT_DONE_KDA)
def test_refuses_other_kda(changed, field):
    """The same holds for the fields of the linear attention."""
    linear = proxies.ODD_TEXT["linear_attn_config"] | {field: NOT_DONE_KDA[field]}
    with pytest.raises((ValueError, NotImplementedError), match=field):
        changed(linear_attn_config=linear)


def test_refuses_unknown_fields(changed):
    """A field nobody knows is named, never dropped."""
    with pytest.raises(ValueError, match="rope_wobble"):
        changed(rope_wobble=3)


@pytest.mark.parametrize(
    ("kda", "mla"), [([0, 1, 3, 4], [2, 5, 6]), ([1, 2, 4], [3, 6, 7]), ([1, 2, 3, 4, 5], [3, 6, 7]), ([1], [2, 8])]
)
def test_refuses_wrong_lists(changed, kda, mla):
    """Lists that count from 0, leave a layer out, name one twice or go past the end are refused."""
    linear = proxies.ODD_TEXT["linear_attn_config"] | {"kda_layers": kda, "full_attn_layers": mla}
    with pytest.raises(ValueError, match="layers"):
        changed(linear_attn_config=linear)


def test_tells_all_faults_at_once():
    """Three faults make one error that names all three."""
    with pytest.raises(ValueError) as caught:
        K3Config(hidden_size=-1, num_experts_per_token=1000, vocab_size=0)
    assert all(name in str(caught.value) for name in ("hidden_size", "num_experts_per_token", "vocab_size"))
