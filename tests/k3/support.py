"""The tiny model every user tries first, and what the tests of `k3` need around it."""

from __future__ import annotations

import torch

from k3 import K3Config, K3Model

TINY = {
    "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 32, "intermediate_size": 24,
    "q_lora_rank": 8, "kv_lora_rank": 4, "qk_nope_head_dim": 4, "qk_rope_head_dim": 4, "v_head_dim": 4,
    "kda_head_dim": 4, "kda_num_heads": 2, "kda_short_conv_kernel_size": 2, "full_attention_layers": (2,),
    "kda_layers": (1,), "attn_res_block_size": 2, "first_k_dense_replace": 1, "moe_intermediate_size": 6,
    "routed_expert_hidden_size": 8, "num_experts": 4, "num_experts_per_token": 2, "num_shared_experts": 2,
    "max_position_embeddings": 16,
}  # fmt: skip


def tiny(**changes) -> K3Config:
    """The tiny config, with some fields changed."""
    return K3Config(**(TINY | changes))


def lively(config: K3Config, dtype=torch.float64, seed: int = 0) -> K3Model:
    """A model whose every parameter matters: pseudo-queries, norms, gates and biases away from their initial values."""
    torch.manual_seed(seed)
    model = K3Model(config, dtype=dtype)
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            tensor.add_(torch.randn_like(tensor) * (0.02 if "e_score" in name else 0.3))
    return model


def ids(batch: int, length: int, vocab: int = 32, seed: int = 1) -> torch.Tensor:
    """Token ids [batch, length], the pad id 0 excluded."""
    return torch.randint(1, vocab, (batch, length), generator=torch.Generator().manual_seed(seed))
