"""Small releases for the checkpoint suites, and raw reading of folders that shares no code with k3.checkpoint."""

from __future__ import annotations

import json
import re
from pathlib import Path

import torch
from safetensors.torch import load_file

from k3 import K3Config, K3Model
from k3.checkpoint.synthetic import write_release
from suites.models import native_state

LAYER = "language_model.model.layers."
MOE = "block_sparse_moe."
# structure -> pattern of its public names below a layer
STRUCTURES = {
    "dense": r"mlp\.(gate|up|down)_proj\.weight",
    "routed": r"block_sparse_moe\.experts\..*",
    "mla": r"self_attn\.(q_a|q_b|kv_a|kv_b|g|o)_(proj|layernorm).*\.weight",
    "kda": r"self_attn\.([qkv]_proj|[qkv]_conv1d|f_a_proj|f_b_proj|b_proj|A_log|dt_bias|o_norm).*",
    "shared": r"block_sparse_moe\.shared_experts\..*",
    "router": r"block_sparse_moe\.gate\..*",
}
VISION = {
    "vt_hidden_size": 16, "vt_intermediate_size": 32, "vt_num_hidden_layers": 2, "qkv_hidden_size": 24,
    "patch_size": 2, "init_pos_emb_height": 4, "init_pos_emb_width": 4, "merge_kernel_size": [2, 2],
    "mm_hidden_size": 16, "text_hidden_size": 64,
}  # fmt: skip


def config(**changes) -> K3Config:
    """Three layers: KDA and dense, KDA and routed, MLA and routed; widths that MXFP4 can pack."""
    values = {
        "num_hidden_layers": 3, "full_attention_layers": (3,), "kda_layers": (1, 2), "hidden_size": 64,
        "vocab_size": 96, "intermediate_size": 80, "num_attention_heads": 4, "q_lora_rank": 24, "kv_lora_rank": 16,
        "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8, "kda_num_heads": 4, "kda_head_dim": 16,
        "attn_res_block_size": 2, "moe_intermediate_size": 64, "routed_expert_hidden_size": 32, "num_experts": 4,
        "num_experts_per_token": 2, "max_position_embeddings": 256,
    }  # fmt: skip
    return K3Config(**(values | changes))


def release(folder: Path, experts: str = "mxfp4", vision: bool = False, seed: int = 0, **changes) -> Path:
    """Write a synthetic release of `config(**changes)` and return its folder."""
    from k3.hf_config import PUBLISHED_QUANTIZATION

    hf = config(**changes).to_hf()
    hf["text_config"].pop("quantization_config", None)
    if experts == "mxfp4":
        hf["text_config"]["quantization_config"] = PUBLISHED_QUANTIZATION
    if vision:
        hf["vision_config"] = VISION
    write_release(folder, hf, seed=seed)
    return folder


def model(dtype: torch.dtype = torch.float32, seed: int = 7, **changes) -> K3Model:
    """A model of `config(**changes)` with seeded weights whose pad row, vectors and biases are not zero."""
    built = K3Model(config(**changes), dtype=dtype)
    random = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for tensor in built.state_dict().values():
            tensor.copy_(torch.randn(tensor.shape, generator=random) * 0.05)
    return built


def raw(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a folder, read by safetensors alone, through the index."""
    weight_map = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    shards = {file: load_file(folder / file) for file in set(weight_map.values())}
    assert sum(map(len, shards.values())) == len(weight_map)
    return {name: shards[file][name] for name, file in weight_map.items()}


def of(structure: str, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors of one structure; at least one, or the claim would be empty."""
    pattern = re.compile(re.escape(LAYER) + r"\d+\." + STRUCTURES[structure])
    found = {name: tensor for name, tensor in tensors.items() if pattern.fullmatch(name)}
    assert found, structure
    return found


def as_loaded(tensors: dict[str, torch.Tensor], heads: int = 4) -> dict[str, torch.Tensor]:
    """Public tensors as the model's state: pairs decoded one code at a time, experts stacked, A_log cut."""
    plain = {}
    for name, tensor in tensors.items():
        if name.endswith("_packed"):
            plain[name.removesuffix("_packed")] = decode(tensor, tensors[name.removesuffix("_packed") + "_scale"])
        elif not name.endswith("_scale"):
            plain[name] = tensor
    return native_state(plain, heads)


def decode(packed: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """MXFP4 by table, in float64 and then bf16."""
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)
    codes = torch.stack([packed & 15, packed >> 4], -1).flatten(-2).long()
    signed = values[codes & 7] * torch.where(codes & 8 > 0, -1.0, 1.0)
    return (signed * torch.exp2(scale.double() - 127).repeat_interleave(32, -1)).bfloat16()


def assert_same_bytes(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    """Same names, dtypes, shapes and bits (signed zeros and NaN payloads included)."""
    assert sorted(found) == sorted(wanted)
    for name, tensor in wanted.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape), name
        same = torch.equal(found[name].contiguous().view(torch.uint8), tensor.contiguous().view(torch.uint8))
        assert same, f"{name} differs"
