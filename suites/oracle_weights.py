"""Weights for the oracle: read a public-layout file, or draw every tensor of a config at a size that tests it.

Independent of `k3` on purpose: its own MXFP4 decoder and its own list of names and shapes.
"""

from __future__ import annotations

import torch
from safetensors import safe_open

MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
FP32_NAMES = ("A_log", "dt_bias", "conv1d.weight", "o_norm.weight", "e_score_correction_bias")


def read(path) -> dict[str, torch.Tensor]:
    """Every tensor of a public-layout safetensors file in float64; packed pairs decoded to `....weight`."""
    with safe_open(str(path), "pt") as file:
        raw = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (safe_open is not a mapping)
    plain = {name: tensor.double() for name, tensor in raw.items() if not name.endswith(("_packed", "_scale"))}
    packed = {name.removesuffix("_packed"): name for name in raw if name.endswith("_packed")}
    return plain | {name: decode(raw[key], raw[f"{name}_scale"]) for name, key in packed.items()}


def decode(packed, scale):
    """MXFP4 pair [R, C/2], [R, C/32] uint8 -> [R, C] float64: low nibble first, 2^(s-127) per 32, 255 is NaN."""
    codes = torch.stack([packed & 15, packed >> 4], dim=-1).flatten(-2).long()
    signed = torch.tensor([*MAGNITUDES, *(-m for m in MAGNITUDES)], dtype=torch.float64)[codes]
    power = torch.ldexp(torch.ones((), dtype=torch.float64), scale.double() - 127)
    power = power.masked_fill(scale == 255, float("nan"))
    return signed * power.repeat_interleave(32, dim=-1)


def shapes(text_config) -> dict[str, tuple[int, ...]]:
    """Every public tensor of the text model, experts one by one and unpacked, A_log unpadded."""
    c, found = text_config, {}
    d, vocab = c["hidden_size"], c["vocab_size"]
    found |= {"lm_head": (vocab, d), "model.embed_tokens": (vocab, d), "model.norm": (d,)}
    found |= {"model.output_attn_res_norm": (d,), "model.output_attn_res_proj": (1, d)}
    for i in range(c["num_hidden_layers"]):
        attention = _kda_shapes(c) if i + 1 in c["linear_attn_config"]["kda_layers"] else _mla_shapes(c)
        dense = i < c["first_k_dense_replace"] or i % c["moe_layer_freq"]
        parts = {f"self_attn.{name}": shape for name, shape in attention.items()}
        parts |= _mlp_shapes("mlp", c["intermediate_size"], d) if dense else _moe_shapes(c)
        parts |= dict.fromkeys(("input_layernorm", "post_attention_layernorm"), (d,))
        parts |= {f"{name}_res_norm": (d,) for name in ("self_attention", "mlp")}
        parts |= {f"{name}_res_proj": (1, d) for name in ("self_attention", "mlp")}
        found |= {f"model.layers.{i}.{name}": shape for name, shape in parts.items()}
    bare = ("A_log", "dt_bias", "e_score_correction_bias")
    return {f"language_model.{n}" + ("" if n.endswith(bare) else ".weight"): s for n, s in found.items()}


def _kda_shapes(c):
    d, heads, dim = c["hidden_size"], c["linear_attn_config"]["num_heads"], c["linear_attn_config"]["head_dim"]
    taps, wide = c["linear_attn_config"]["short_conv_kernel_size"], heads * dim
    found = {f"{n}_proj": (wide, d) for n in "qkvg"} | {f"{n}_conv1d": (wide, 1, taps) for n in "qkv"}
    found |= {"f_a_proj": (dim, d), "f_b_proj": (wide, dim), "b_proj": (heads, d), "o_proj": (d, wide)}
    return found | {"A_log": (heads,), "dt_bias": (wide,), "o_norm": (dim,)}


def _mla_shapes(c):
    d, heads, value = c["hidden_size"], c["num_attention_heads"], c["v_head_dim"]
    q_rank, kv_rank, content, tail = (
        c[n] for n in ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim")
    )
    return {
        "q_a_proj": (q_rank, d), "q_a_layernorm": (q_rank,), "q_b_proj": (heads * (content + tail), q_rank),
        "kv_a_proj_with_mqa": (kv_rank + tail, d), "kv_a_layernorm": (kv_rank,),
        "kv_b_proj": (heads * (content + value), kv_rank), "g_proj": (heads * value, d), "o_proj": (d, heads * value),
    }  # fmt: skip


def _mlp_shapes(prefix, inner, d):
    return {f"{prefix}.gate_proj": (inner, d), f"{prefix}.up_proj": (inner, d), f"{prefix}.down_proj": (d, inner)}


def _moe_shapes(c):
    d, latent, inner, experts = (
        c[n] for n in ("hidden_size", "routed_expert_hidden_size", "moe_intermediate_size", "num_experts")
    )
    found = {"gate": (experts, d), "gate.e_score_correction_bias": (experts,)}
    found |= {"routed_expert_down_proj": (latent, d), "routed_expert_norm": (latent,)}
    found |= {"routed_expert_up_proj": (d, latent)} | _mlp_shapes("shared_experts", inner * c["num_shared_experts"], d)
    for e in range(experts):
        found |= {f"experts.{e}.w1": (inner, latent), f"experts.{e}.w3": (inner, latent)}
        found |= {f"experts.{e}.w2": (latent, inner)}
    return {f"block_sparse_moe.{name}": shape for name, shape in found.items()}


def draw(text_config, seed: int) -> dict[str, torch.Tensor]:
    """Random float64 weights whose heads, channels and norms all differ; nothing is at its initial value."""
    generator = torch.Generator().manual_seed(seed)

    def normal(shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    def one(name, shape):
        if name.endswith("A_log"):
            return torch.linspace(-0.5, 1.5, shape[0], dtype=torch.float64)
        if "norm" in name:
            return 1 + 0.3 * normal(shape)
        if name.endswith(("bias", "conv1d.weight", "_res_proj.weight", "embed_tokens.weight")):
            return 0.5 * normal(shape)
        return normal(shape) / shape[-1] ** 0.5

    return {name: one(name, shape) for name, shape in shapes(text_config).items()}
