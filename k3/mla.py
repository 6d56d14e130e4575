"""Gated latent attention without positions (NoPE MLA)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from k3.layers import RMSNorm, linear
from k3.ops.attention import attention
from k3.sequence import SequenceLayout

LATENT_EPS = 1e-6  # both latent norms; every other norm of the model uses rms_norm_eps (spec c.1)


class MLA(nn.Module):
    """Latent attention with an un-rotated shared key tail and a sigmoid output gate (spec c.4)."""

    def __init__(self, config, layer_index: int, *, device=None, dtype=None):
        super().__init__()
        H, D, factory = config.num_attention_heads, config.hidden_size, {"device": device, "dtype": dtype}
        self.layer_index, self.backend = layer_index, "auto"
        self.nope_dim, self.tail_dim, self.v_dim = config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim
        self.latent_dim = config.kv_lora_rank
        self.q_a_proj = linear(D, config.q_lora_rank, **factory)
        self.q_a_layernorm = RMSNorm(config.q_lora_rank, LATENT_EPS, **factory)
        self.q_b_proj = linear(config.q_lora_rank, H * (self.nope_dim + self.tail_dim), **factory)
        self.kv_a_proj_with_mqa = linear(D, self.latent_dim + self.tail_dim, **factory)
        self.kv_a_layernorm = RMSNorm(self.latent_dim, LATENT_EPS, **factory)
        self.kv_b_proj = linear(self.latent_dim, H * (self.nope_dim + self.v_dim), **factory)
        self.g_proj = linear(D, H * self.v_dim, **factory)
        self.o_proj = linear(H * self.v_dim, D, **factory)

    def forward(self, x: Tensor, layout: SequenceLayout | None = None, cache=None) -> Tensor:
        q = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x)))
        q = q.unflatten(-1, (-1, self.nope_dim + self.tail_dim))  # [B, T, H, nope + tail]
        compressed, tail = self.kv_a_proj_with_mqa(x).split([self.latent_dim, self.tail_dim], dim=-1)
        latent = torch.cat([self.kv_a_layernorm(compressed), tail], dim=-1)  # [B, T, latent + tail]
        if cache is not None:
            latent = cache.extend_mla(self.layer_index, latent)  # [B, S, latent + tail]
        o = (layout or SequenceLayout()).mla(self.core, q, latent).flatten(-2)  # [B, T, H*V]
        return self.o_proj(o * self.g_proj(x).sigmoid())

    def core(
        self, q: Tensor, latent: Tensor, *, cu_seqlens: Tensor | None = None, q_positions: Tensor | None = None
    ) -> Tensor:
        """Attention of q [B, T, H, nope + tail] over the keys and values in latent [B, S, latent + tail]."""
        k, v = self.expand(latent)
        return attention(q, k, v, cu_seqlens=cu_seqlens, q_positions=q_positions, backend=self.backend)

    def expand(self, latent: Tensor) -> tuple[Tensor, Tensor]:
        """Keys [B, S, H, nope + tail] and values [B, S, H, V] of this rank's heads."""
        compressed, tail = latent.split([self.latent_dim, self.tail_dim], dim=-1)
        kv = self.kv_b_proj(compressed).unflatten(-1, (-1, self.nope_dim + self.v_dim))
        key, value = kv.split([self.nope_dim, self.v_dim], dim=-1)
        tail = tail.unsqueeze(-2).expand(*key.shape[:-1], self.tail_dim)
        return torch.cat([key, tail], dim=-1), value
