"""Attention Residuals around the two halves of a decoder layer."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from k3.kda import KDA
from k3.layers import MLP, RMSNorm, linear, local
from k3.mla import MLA
from k3.moe import LatentMoE
from k3.ops.attnres import attnres_mix
from k3.precision import without_autocast


@without_autocast
def mix(prefix: Tensor, bank: Sequence[Tensor], proj: nn.Linear, norm: RMSNorm) -> Tensor:
    """Softmax over depth: the snapshots in `bank` and the live `prefix`, each [B, T, D] -> [B, T, D]."""
    return attnres_mix([*bank, prefix], local(norm, "weight"), local(proj, "weight"), norm.eps)


class DecoderLayer(nn.Module):
    """One layer of spec c.7; `prefix` is the residual since the last snapshot, `bank` the snapshots."""

    def __init__(self, config, index: int, *, device=None, dtype=None):
        super().__init__()
        D, eps, factory = config.hidden_size, config.rms_norm_eps, {"device": device, "dtype": dtype}
        self.index, self.starts_block = index, index % config.attn_res_block_size == 0
        mixer = KDA if config.attention_type(index) == "kda" else MLA
        self.self_attn = mixer(config, index, **factory)
        self.ffn_name = "block_sparse_moe" if config.is_moe(index) else "mlp"
        ffn = LatentMoE(config, **factory) if config.is_moe(index) else MLP(config, config.intermediate_size, **factory)
        self.add_module(self.ffn_name, ffn)
        self.input_layernorm = RMSNorm(D, eps, **factory)
        self.post_attention_layernorm = RMSNorm(D, eps, **factory)
        self.self_attention_res_norm, self.self_attention_res_proj = RMSNorm(D, eps, **factory), linear(D, 1, **factory)
        self.mlp_res_norm, self.mlp_res_proj = RMSNorm(D, eps, **factory), linear(D, 1, **factory)

    def forward(self, prefix: Tensor, bank: Sequence[Tensor], layout=None, cache=None) -> tuple[Tensor, list[Tensor]]:
        x, bank = prefix, list(bank)
        if bank:  # empty before layer 0 alone, whose self_attention_res tensors exist and are never used
            x = mix(prefix, bank, self.self_attention_res_proj, self.self_attention_res_norm)
        attended = self.self_attn(self.input_layernorm(x), layout=layout, cache=cache)
        if self.starts_block:
            bank.append(prefix)
            prefix = attended
        else:
            prefix = prefix + attended
        x = mix(prefix, bank, self.mlp_res_proj, self.mlp_res_norm)
        return prefix + self.ffn(self.post_attention_layernorm(x)), bank

    @property
    def ffn(self) -> nn.Module:
        return getattr(self, self.ffn_name)
