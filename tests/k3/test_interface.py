"""The public surface as users write it: every single-rank snippet of the interface, run as it stands."""

import json

import pytest
import torch

from suites.goldens import FOLDER, Golden

PACKABLE = {"hidden_size": 32, "routed_expert_hidden_size": 32, "moe_intermediate_size": 32}


@pytest.fixture
def config():
    """The tiny config every user tries first, spelled out."""
    from k3 import K3Config

    return K3Config(
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        vocab_size=32,
        intermediate_size=24,
        q_lora_rank=8,
        kv_lora_rank=4,
        qk_nope_head_dim=4,
        qk_rope_head_dim=4,
        v_head_dim=4,
        kda_head_dim=4,
        kda_num_heads=2,
        kda_short_conv_kernel_size=2,
        full_attention_layers=(2,),
        kda_layers=(1,),
        attn_res_block_size=2,
        first_k_dense_replace=1,
        moe_intermediate_size=6,
        routed_expert_hidden_size=8,
        num_experts=4,
        num_experts_per_token=2,
        num_shared_experts=2,
        max_position_embeddings=16,
    )


def test_config_from_every_source(tmp_path):
    """K3Config() is the public model; from_hf takes a path or the nested dict, from_hf_config an object."""
    from k3 import K3Config

    config = K3Config()
    assert config.layer_types[:4] == ["kda", "kda", "kda", "mla"] and config.attention_type(3) == "mla"
    (tmp_path / "config.json").write_text(json.dumps(config.to_hf()))
    assert K3Config.from_hf(tmp_path / "config.json") == K3Config.from_hf(config.to_hf()) == config


def test_build_run_and_train(config):
    """build_model, a chunk called by keyword, loss and logits, a step of training."""
    from k3.protocol import ImplConfig, build_model

    bundle = build_model(config, impl_cfg=ImplConfig(device="cpu", dtype="float32"))
    ids, labels = torch.randint(0, 32, (2, 16)), torch.randint(0, 32, (2, 16))
    labels[0, 0], loss_mask = -100, torch.ones(2, 16)
    loss_mask[1, 3:] = 0
    out = bundle.chunks[0](input_ids=ids, labels=labels, loss_mask=loss_mask)
    out["loss"].backward()
    assert out["logits"].shape == (2, 16, 32) and out["loss"].isfinite()
    assert bundle.parallel_state.tp_size == 1 and callable(bundle.forward_step) and bundle.extras == {}
    kept = [(b, t) for b in range(2) for t in range(16) if labels[b, t] != -100 and loss_mask[b, t]]
    ce = [-out["logits"][b, t].log_softmax(-1)[labels[b, t]] for b, t in kept]
    torch.testing.assert_close(out["loss"], torch.stack(ce).mean())


def test_load(tmp_path):
    """load_hf_weights reads a public-layout folder into a chunk."""
    from k3.protocol import ImplConfig, build_model, build_model_config, load_hf_weights

    golden = Golden("readme2")
    (tmp_path / "config.json").write_text(json.dumps(golden.hf))
    (tmp_path / "model.safetensors").symlink_to(FOLDER / "readme2.weights.safetensors")
    config = build_model_config(tmp_path)
    bundle = build_model(config, impl_cfg=ImplConfig(device="cpu", dtype="float32"))
    load_hf_weights(bundle.chunks[0], tmp_path, config, bundle.parallel_state)
    logits = bundle.chunks[0](golden.inputs(7)[0])["logits"]
    torch.testing.assert_close(logits, golden.expected("f32", 7)["logits"], atol=1e-3, rtol=0)


def test_save_and_export(tmp_path):
    """save_hf_weights writes packed experts in shards; export_hf_weights yields the same public tensors."""
    from safetensors import safe_open

    from k3.checkpoint import save_hf_weights
    from k3.protocol import ImplConfig, build_model, export_hf_weights
    from tests.k3.support import tiny

    config = tiny(**PACKABLE)
    bundle = build_model(config, impl_cfg=ImplConfig(device="cpu", dtype="bfloat16"))
    model = bundle.chunks[0]
    save_hf_weights(
        model, tmp_path / "k3-hf", config, bundle.parallel_state, target="mxfp4", max_shard_size_bytes=5 * 1024**3
    )
    stored = {}
    for path in (tmp_path / "k3-hf").glob("*.safetensors"):
        with safe_open(str(path), "pt") as file:
            stored |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
    exported = dict(export_hf_weights(bundle.chunks, config, bundle.parallel_state, target="mxfp4"))
    assert exported.keys() == stored.keys()
    assert all(torch.equal(exported[name], tensor) for name, tensor in stored.items())
    assert "language_model.model.layers.1.block_sparse_moe.experts.3.w1.weight_packed" in stored


def test_quantisation_aware_training():
    """ImplConfig(qat=...) trains through packed weights and reports what it wrapped."""
    from k3.protocol import ImplConfig, build_model
    from tests.k3.support import tiny

    settings = ImplConfig(device="cpu", dtype="bfloat16", qat={"enabled": True, "format": "mxfp4"})
    bundle = build_model(tiny(**PACKABLE), impl_cfg=settings)
    assert bundle.extras["qat"]["wrapped"]
    ids = torch.randint(0, 32, (1, 8))
    bundle.chunks[0](input_ids=ids, labels=ids)["loss"].backward()


def test_layout_on_meta():
    """A stage of a full-size layout knows its layers without a process group."""
    from k3 import K3Config, K3Model
    from k3.parallel import ParallelState

    parallel = ParallelState(
        tp_size=1, cp_size=8, dp_size=8, ep_size=32, pp_size=8, pp_rank=7, pp_is_first=False, pp_is_last=True
    )
    assert K3Model(K3Config(), parallel, device="meta").layer_indices == list(range(84, 93))
    rows = [["embedding", *["decoder"] * 32], ["decoder"] * 32, [*["decoder"] * 29, "loss"]]
    with pytest.warns(UserWarning, match="block alignment"):
        explicit = ParallelState(pp_size=3, pp_rank=1, pp_layout=rows)
    assert explicit.layer_indices(K3Config()) == list(range(32, 64))


def test_register(config):
    """register_model() is explicit; the Auto class then builds the public config and trains with the shifted loss."""
    from transformers import AutoConfig, AutoModelForCausalLM

    from k3 import register_model

    register_model()
    public = {key: value for key, value in config.to_hf().items() if key != "model_type"}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("kimi_k3", **public), dtype=torch.float32)
    ids = torch.randint(0, 32, (1, 9))
    out = model(input_ids=ids, labels=ids)
    out.loss.backward()
    wanted = torch.nn.functional.cross_entropy(out.logits[0, :-1], ids[0, 1:])
    torch.testing.assert_close(out.loss, wanted)
