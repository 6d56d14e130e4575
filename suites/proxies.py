"""Small public configs that no golden vector covers, with weights that make every equation visible."""

from __future__ import annotations

import torch

from suites import oracle_weights

# Every value differs from its neighbours and from the golden cases: 5 KDA heads against 3 MLA heads, three taps,
# blocks of three, two dense layers, groups of experts, a scaling factor, a lower bound of -3.
ODD_TEXT = {
    "model_type": "kimi_linear", "vocab_size": 53, "hidden_size": 21, "intermediate_size": 26, "num_hidden_layers": 7,
    "first_k_dense_replace": 2, "moe_layer_freq": 1, "hidden_act": "situ", "rms_norm_eps": 1e-5,
    "activation_situ_beta": 3.0, "activation_situ_linear_beta": 7.0, "attn_res_block_size": 3,
    "num_attention_heads": 3, "num_key_value_heads": 3, "q_lora_rank": 9, "kv_lora_rank": 7, "qk_nope_head_dim": 5,
    "qk_rope_head_dim": 3, "v_head_dim": 6, "mla_use_nope": True, "mla_use_output_gate": True,
    "linear_attn_config": {
        "kda_layers": [1, 2, 4, 5], "full_attn_layers": [3, 6, 7], "num_heads": 5, "head_dim": 6,
        "short_conv_kernel_size": 3, "gate_lower_bound": -3.0, "use_full_rank_gate": True,
    },
    "num_experts": 12, "num_experts_per_token": 3, "num_shared_experts": 3, "moe_intermediate_size": 11,
    "routed_expert_hidden_size": 13, "latent_moe_use_norm": True, "moe_router_activation_func": "sigmoid",
    "moe_renormalize": True, "routed_scaling_factor": 2.5, "num_expert_group": 4, "topk_group": 2,
    "use_grouped_topk": True, "topk_method": "noaux_tc", "max_position_embeddings": 64, "pad_token_id": 0,
    "tie_word_embeddings": False, "num_nextn_predict_layers": 0,
}  # fmt: skip
ODD = {"model_type": "kimi_k3", "text_config": ODD_TEXT}


def odd(seed: int = 5) -> dict[str, torch.Tensor]:
    """Weights of the odd proxy at ordinary size."""
    return oracle_weights.draw(ODD_TEXT, seed)


def faint(seed: int = 6) -> dict[str, torch.Tensor]:
    """The odd proxy with small latents and small q, k: the size at which each epsilon decides the result."""
    small = ("q_a_proj.weight", "kv_a_proj_with_mqa.weight", "self_attn.q_proj.weight", "self_attn.k_proj.weight")
    return {name: tensor * (2e-3 if name.endswith(small) else 1.0) for name, tensor in odd(seed).items()}


def tokens(length: int, vocab: int = ODD_TEXT["vocab_size"], seed: int = 9, batch: int = 2):
    """Token ids and aligned labels [batch, length]; the first and last labels are ignored where there are several."""
    generator = torch.Generator().manual_seed(seed + length)
    ids, labels = torch.randint(1, vocab, (2, batch, length), generator=generator)
    if length > 1:
        labels[0, 0] = labels[-1, -1] = -100
    return ids, labels
