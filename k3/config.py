"""`K3Config`: every number the model needs, validated once. `config_rules` judges; `hf_config` has the public form."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from os import PathLike
from typing import Any, Literal

from k3 import hf_config
from k3.config_rules import LAYER_LISTS, ConfigError, Fault, faults

PUBLIC_LAYERS = 93
PUBLIC_FULL_ATTENTION = (*range(4, PUBLIC_LAYERS, 4), PUBLIC_LAYERS)  # counted from 1
PUBLIC_KDA = tuple(i for i in range(1, PUBLIC_LAYERS + 1) if i not in PUBLIC_FULL_ATTENTION)
PUBLIC_PAD = 163839


@dataclass(frozen=True, kw_only=True)
class K3Config:
    """The Kimi K3 text model; the defaults are the public one. Layer lists count from 1, every method from 0.

    A left-out `num_key_value_heads` equals `num_attention_heads`; a left-out `pad_token_id` beyond a smaller
    vocabulary means no padding row. Raises one ValueError that names every fault.
    """

    num_hidden_layers: int = PUBLIC_LAYERS
    hidden_size: int = 7168
    num_attention_heads: int = 96
    num_key_value_heads: int | None = None
    vocab_size: int = 163840
    intermediate_size: int = 33792
    max_position_embeddings: int = 1048576  # informational: there is no positional table
    rms_norm_eps: float = 1e-5
    hidden_act: str = "situ"
    activation_situ_beta: float = 4.0
    activation_situ_linear_beta: float = 25.0
    q_lora_rank: int = 1536
    kv_lora_rank: int = 512
    qk_nope_head_dim: int = 128
    qk_rope_head_dim: int = 64
    v_head_dim: int = 128
    mla_use_nope: bool = True
    mla_use_output_gate: bool = True
    kda_head_dim: int = 128
    kda_num_heads: int = 96
    kda_short_conv_kernel_size: int = 4
    kda_use_full_rank_gate: bool = True
    kda_gate_lower_bound: float = -5.0
    full_attention_layers: tuple[int, ...] = PUBLIC_FULL_ATTENTION
    kda_layers: tuple[int, ...] = PUBLIC_KDA
    attn_res_block_size: int = 12
    first_k_dense_replace: int = 1
    moe_intermediate_size: int = 3072
    routed_expert_hidden_size: int = 3584
    num_experts: int = 896
    num_experts_per_token: int = 16
    num_shared_experts: int = 2
    moe_router_activation_func: str = "sigmoid"
    moe_renormalize: bool = True
    routed_scaling_factor: float = 1.0
    num_expert_group: int = 1
    topk_group: int = 1
    topk_method: str = "noaux_tc"
    use_grouped_topk: bool = True  # stored and never read, as in the vendor's gate
    latent_moe_use_norm: bool = True
    moe_layer_freq: int = 1
    pad_token_id: int | None = PUBLIC_PAD
    initializer_range: float = 0.02
    source: Mapping[str, Any] | None = field(default=None, repr=False, compare=False)  # the public form it came from

    def __post_init__(self) -> None:
        if self.num_key_value_heads is None:
            object.__setattr__(self, "num_key_value_heads", self.num_attention_heads)
        if self.pad_token_id == PUBLIC_PAD and type(self.vocab_size) is int and self.vocab_size <= PUBLIC_PAD:
            object.__setattr__(self, "pad_token_id", None)
        for name in LAYER_LISTS:
            object.__setattr__(self, name, tuple(getattr(self, name) or ()))
        if found := faults(self):
            raise ConfigError(found)

    @property
    def layer_types(self) -> list[Literal["kda", "mla"]]:
        """The mixer of each layer, from layer 0."""
        return [self.attention_type(i) for i in range(self.num_hidden_layers)]

    def attention_type(self, index: int) -> Literal["kda", "mla"]:
        """The mixer of layer `index`, counted from 0 (the two lists count from 1)."""
        if not 0 <= index < self.num_hidden_layers:
            raise IndexError(f"layer {index} is outside 0..{self.num_hidden_layers - 1}; layers count from 0 here")
        return "kda" if index + 1 in self.kda_layers else "mla"

    def is_moe(self, index: int) -> bool:
        """Whether layer `index`, counted from 0, has routed experts."""
        return index >= self.first_k_dense_replace and index % self.moe_layer_freq == 0

    @classmethod
    def from_hf(cls, source: str | PathLike[str] | Mapping[str, Any]) -> K3Config:
        """From the public nested config: a dict, a config.json, or the folder that holds one."""
        public = hf_config.read(source)
        values, texts = hf_config.to_fields(public)
        found = [Fault((), text) for text in texts]
        try:
            config = cls(**values, source=public)
            if config.pad_token_id != values.get("pad_token_id", config.pad_token_id):
                found.append(Fault((), f"pad_token_id={values['pad_token_id']} exceeds vocab_size={config.vocab_size}"))
        except ConfigError as error:
            found += [fault for fault in error.faults if set(fault.fields) <= set(values)]
        if found:
            raise ConfigError(found)
        return config

    @classmethod
    def from_hf_config(cls, config: Any) -> K3Config:
        """From a transformers configuration object, anything else with `to_dict`, or the public nested dict."""
        return cls.from_hf(config.to_dict() if hasattr(config, "to_dict") else config)

    def to_hf(self) -> dict[str, Any]:
        """The public nested form; fields without a role here are those of `source`."""
        return hf_config.from_fields({f.name: getattr(self, f.name) for f in fields(self)}, self.source)
