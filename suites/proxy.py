"""The tiny proxies through the door that users take: build, load a public folder, export it, reload it bit for bit.

The folders are the vendor's golden cases, so nothing that `k3` wrote itself is the reference.
"""

import json
import math

import pytest
import torch
from safetensors import safe_open

from k3 import K3Config
from k3.protocol import ImplConfig, build_model, export_hf_weights, load_hf_weights, vocab_size
from suites.goldens import close

TINY = {
    "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 32, "intermediate_size": 24,
    "q_lora_rank": 8, "kv_lora_rank": 4, "qk_nope_head_dim": 4, "qk_rope_head_dim": 4, "v_head_dim": 4,
    "kda_head_dim": 4, "kda_num_heads": 2, "kda_short_conv_kernel_size": 2, "full_attention_layers": (2,),
    "kda_layers": (1,), "attn_res_block_size": 2, "first_k_dense_replace": 1, "moe_intermediate_size": 6,
    "routed_expert_hidden_size": 8, "num_experts": 4, "num_experts_per_token": 2, "num_shared_experts": 2,
    "max_position_embeddings": 16,
}  # fmt: skip


def stored(path) -> dict[str, torch.Tensor]:
    """Every tensor of a safetensors file as it lies there."""
    with safe_open(str(path), "pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (safe_open is not a mapping)


def same_bits(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    """Assert equal names, dtypes, shapes and bytes."""
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert found[name].dtype == tensor.dtype and found[name].shape == tensor.shape, name
        assert found[name].contiguous().view(torch.uint8).equal(tensor.contiguous().view(torch.uint8)), name


@pytest.fixture
def folder(golden, tmp_path):
    """The golden case as a public folder: config, one shard, index."""
    (tmp_path / "config.json").write_text(json.dumps(golden.hf))
    (tmp_path / "model.safetensors").symlink_to(golden.weights_path)
    names = dict.fromkeys(stored(golden.weights_path), "model.safetensors")
    index = {"metadata": {"total_size": 0}, "weight_map": names}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    return tmp_path


def loaded(folder, dtype: str):
    """A bundle of the folder's config that holds the folder's weights, and that config."""
    config = K3Config.from_hf(folder)
    bundle = build_model(config, impl_cfg=ImplConfig(device="cpu", dtype=dtype))
    load_hf_weights(bundle.chunks[0], folder, config, bundle.parallel_state)
    return bundle, config


@pytest.mark.parametrize("case", ["readme2", "hybrid5", "mxfp4_3", "par6"])
def test_loaded_model_is_the_vendors(golden, folder):
    """A folder read through the protocol gives the vendor's logits and loss, packed experts included."""
    length = golden.notes["_golden"]["lengths"][-1]
    ids, labels = golden.inputs(length)
    bundle, _ = loaded(folder, "float32")
    out = bundle.chunks[0](input_ids=ids, labels=labels)
    close(out["logits"], golden.get(f"f32.T{length}.logits"), 1e-3, "logits")
    close(out["loss"].reshape(1), golden.get(f"f32.T{length}.loss"), 1e-4, "loss")


@pytest.mark.parametrize("case", ["readme2", "hybrid5", "par6"])
def test_plain_export_gives_the_file_back(golden, folder):
    """The bf16 export of a loaded folder is the vendor's file, byte for byte, A_log's padding included."""
    bundle, config = loaded(folder, "bfloat16")
    exported = dict(export_hf_weights(bundle.chunks, config, bundle.parallel_state, target="bf16"))
    wanted = stored(golden.weights_path)
    padded = {n: t for n, t in exported.items() if n.endswith("A_log")}  # the vendor's proxy pads to another length
    heads = config.kda_num_heads
    for name, tensor in padded.items():
        assert tensor[:heads].equal(wanted[name][:heads]) and not tensor[heads:].any(), name
    rest = {name: tensor for name, tensor in wanted.items() if name not in padded}
    same_bits({name: tensor for name, tensor in exported.items() if name not in padded}, rest)


@pytest.mark.parametrize("case", ["mxfp4_3"])
def test_packed_export_keeps_every_value(golden, folder):
    """The MXFP4 export of a loaded packed folder decodes to exactly the vendor's values."""
    from suites import oracle_weights

    bundle, config = loaded(folder, "bfloat16")
    exported = dict(export_hf_weights(bundle.chunks, config, bundle.parallel_state, target="mxfp4"))
    source = stored(golden.weights_path)
    stems = [name.removesuffix("_packed") for name in source if name.endswith("_packed")]
    assert stems and all(f"{stem}_packed" in exported for stem in stems)
    for stem in stems:
        found, wanted = (oracle_weights.decode(t[f"{stem}_packed"], t[f"{stem}_scale"]) for t in (exported, source))
        assert found.equal(wanted), stem


@pytest.mark.parametrize("case", ["readme2", "hybrid5", "mxfp4_3"])
@pytest.mark.parametrize("target", ["bf16"])
def test_reload_is_bit_for_bit(golden, folder, target, tmp_path):
    """Save and load again: every parameter and buffer has the same bits, and so have the logits."""
    from k3.checkpoint import save_hf_weights

    bundle, config = loaded(folder, "bfloat16")
    save_hf_weights(bundle.chunks[0], tmp_path / "again", config, bundle.parallel_state, target=target)
    again, _ = loaded(tmp_path / "again", "bfloat16")
    same_bits(again.chunks[0].state_dict(), bundle.chunks[0].state_dict())
    ids, _ = golden.inputs(7)
    assert torch.equal(again.chunks[0](ids)["logits"], bundle.chunks[0](ids)["logits"])


def test_tiny_config_trains():
    """The configuration every user tries first builds, runs and trains on a CPU as it is."""
    torch.manual_seed(0)
    config = K3Config(**TINY)
    bundle = build_model(config, impl_cfg=ImplConfig(device="cpu", dtype="float32"))
    model, ids = bundle.chunks[0], torch.randint(0, 32, (2, 9))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(12):
        out = model(input_ids=ids, labels=ids.roll(-1, 1))
        optimizer.zero_grad()
        out["loss"].backward()
        optimizer.step()
        losses.append(out["loss"].item())
    assert out["logits"].shape == (2, 9, vocab_size(config)) and out["logits"].dtype == torch.float32
    assert losses[0] == pytest.approx(math.log(32), rel=0.02) and 0 < losses[-1] < 0.8 * losses[0]
