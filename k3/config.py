"""`K3Config`: every number the model needs, validated once. Torch-free; `hf_config` reads and writes the public form."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from os import PathLike
from typing import Any, Literal

from k3 import hf_config

PUBLIC_LAYERS = 93
PUBLIC_FULL_ATTENTION = (*range(4, 93, 4), 93)  # 1-based
PUBLIC_KDA = tuple(i for i in range(1, PUBLIC_LAYERS + 1) if i not in PUBLIC_FULL_ATTENTION)
PUBLIC_PAD = 163839

ONLY_VALUE: dict[str, Any] = {
    "hidden_act": "situ",
    "mla_use_nope": True,
    "mla_use_output_gate": True,
    "kda_use_full_rank_gate": True,
    "moe_router_activation_func": "sigmoid",
    "moe_renormalize": True,
    "latent_moe_use_norm": True,
    "topk_method": "noaux_tc",
}
MAY_BE_ZERO = {"first_k_dense_replace"}
FLOATS = ("rms_norm_eps", "activation_situ_beta", "activation_situ_linear_beta", "routed_scaling_factor")


@dataclass(frozen=True, kw_only=True)
class K3Config:
    """The Kimi K3 text model; the defaults are the public one. Layer lists count from 1, every method from 0.

    `num_key_value_heads` left out equals `num_attention_heads`; a left-out `pad_token_id` beyond a smaller vocabulary
    means no padding row.
    """

    num_hidden_layers: int = PUBLIC_LAYERS
    hidden_size: int = 7168
    num_attention_heads: int = 96
    num_key_value_heads: int | None = None
    vocab_size: int = 163840
    intermediate_size: int = 33792
    max_position_embeddings: int = 1048576
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
    use_grouped_topk: bool = True
    latent_moe_use_norm: bool = True
    moe_layer_freq: int = 1
    pad_token_id: int | None = PUBLIC_PAD
    source: Mapping[str, Any] | None = field(default=None, repr=False, compare=False)  # the public form it came from

    def __post_init__(self) -> None:
        if self.num_key_value_heads is None:
            object.__setattr__(self, "num_key_value_heads", self.num_attention_heads)
        if self.pad_token_id == PUBLIC_PAD and isinstance(self.vocab_size, int) and self.vocab_size <= PUBLIC_PAD:
            object.__setattr__(self, "pad_token_id", None)
        for name in ("full_attention_layers", "kda_layers"):
            object.__setattr__(self, name, tuple(getattr(self, name) or ()))
        raise_all(faults(self))

    @property
    def layer_types(self) -> list[Literal["kda", "mla"]]:
        """The mixer of each layer, from layer 0."""
        return [self.attention_type(i) for i in range(self.num_hidden_layers)]

    def attention_type(self, index: int) -> Literal["kda", "mla"]:
        """The mixer of layer `index`, from 0 (the lists count from 1)."""
        if not 0 <= index < self.num_hidden_layers:
            raise IndexError(f"layer {index} of {self.num_hidden_layers}; count from 0")
        return "kda" if index + 1 in self.kda_layers else "mla"

    def is_moe(self, index: int) -> bool:
        """Whether layer `index`, from 0, has routed experts."""
        return index >= self.first_k_dense_replace and index % self.moe_layer_freq == 0

    @classmethod
    def from_hf(cls, source: str | PathLike[str] | Mapping[str, Any]) -> K3Config:
        """From the public nested config: a dict, a config.json, or the folder that holds it."""
        public = hf_config.read(source)
        values, found = hf_config.to_fields(public)
        pad, vocab = values.get("pad_token_id"), values.get("vocab_size")
        if isinstance(pad, int) and isinstance(vocab, int) and not 0 <= pad < vocab:
            found.append(f"pad_token_id={pad} is not a row of vocab_size={vocab}; use null or a row")
            values["pad_token_id"] = None
        candidate = object.__new__(cls)
        for f in fields(cls):
            object.__setattr__(candidate, f.name, values.get(f.name, f.default))
        if found:
            known = [f for f in faults(candidate) if f.split("=", 1)[0] in values]
            raise_all([*found, *known])
        return cls(**values, source=public)

    @classmethod
    def from_hf_config(cls, config: Any) -> K3Config:
        """From a transformers configuration object (anything with `to_dict`)."""
        return cls.from_hf(config.to_dict() if hasattr(config, "to_dict") else dict(config))

    def to_hf(self) -> dict[str, Any]:
        """The public nested form; fields without a role here come from `source`, or from the public file."""
        return hf_config.from_fields({f.name: getattr(self, f.name) for f in fields(self)}, self.source)


def raise_all(found: list[str]) -> None:
    """One ValueError that names every fault."""
    if found:
        raise ValueError("K3Config: " + "; ".join(found))


def faults(config: K3Config) -> list[str]:
    """Every rule the values break, each as `value, rule, remedy`."""
    typed = _type_faults(config)
    broken = {fault.split("=", 1)[0] for fault in typed}
    only = [
        f"{name}={getattr(config, name)!r} is not implemented; the public model has {value!r}"
        for name, value in ONLY_VALUE.items()
        if name not in broken and getattr(config, name) != value
    ]
    return [*typed, *only, *_relation_faults(config, broken)]


def _type_faults(config: K3Config) -> list[str]:
    found = []
    for f in fields(config):
        value = getattr(config, f.name)
        if f.type == "int" and not (type(value) is int and value >= (f.name not in MAY_BE_ZERO)):
            found.append(
                f"{f.name}={value!r} must be {'an integer >= 0' if f.name in MAY_BE_ZERO else 'a positive integer'}"
            )
        elif f.type == "bool" and type(value) is not bool:
            found.append(f"{f.name}={value!r} must be true or false")
        elif f.name in FLOATS and not (_is_number(value) and 0 < value < float("inf")):
            found.append(f"{f.name}={value!r} must be a positive number")
    bound = config.kda_gate_lower_bound
    if not (_is_number(bound) and -5 <= bound < 0):
        found.append(f"kda_gate_lower_bound={bound!r} must lie in [-5, 0); None (the softplus gate) is not implemented")
    return found


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _relation_faults(c: K3Config, broken: set[str]) -> list[str]:
    """Rules between fields; a rule whose fields are broken already is not judged."""
    rules = [
        (
            ("num_key_value_heads", "num_attention_heads"),
            lambda: c.num_key_value_heads == c.num_attention_heads,
            lambda: (
                f"num_key_value_heads={c.num_key_value_heads} must equal num_attention_heads={c.num_attention_heads}"
            ),
        ),
        (
            ("num_experts", "num_experts_per_token"),
            lambda: c.num_experts_per_token <= c.num_experts,
            lambda: f"num_experts_per_token={c.num_experts_per_token} exceeds num_experts={c.num_experts}",
        ),
        (
            ("num_experts", "num_expert_group"),
            lambda: c.num_experts % c.num_expert_group == 0,
            lambda: f"num_expert_group={c.num_expert_group} must divide num_experts={c.num_experts}",
        ),
        (
            ("num_experts", "num_expert_group", "topk_group", "num_experts_per_token"),
            lambda: c.topk_group <= c.num_expert_group and _groups_suffice(c),
            lambda: (
                f"topk_group={c.topk_group} of num_expert_group={c.num_expert_group} must hold at least two experts "
                f"each and num_experts_per_token={c.num_experts_per_token} together"
            ),
        ),
        (
            ("num_hidden_layers",),
            lambda: sorted((*c.kda_layers, *c.full_attention_layers)) == list(range(1, c.num_hidden_layers + 1)),
            lambda: (
                f"kda_layers={c.kda_layers} and full_attention_layers={c.full_attention_layers} must name each of "
                f"the layers 1..{c.num_hidden_layers} once; they count from 1"
            ),
        ),
        (
            ("vocab_size",),
            lambda: c.pad_token_id is None or (type(c.pad_token_id) is int and 0 <= c.pad_token_id < c.vocab_size),
            lambda: f"pad_token_id={c.pad_token_id!r} is not a row of vocab_size={c.vocab_size}; use None or a row",
        ),
    ]
    return [message() for names, holds, message in rules if not broken & set(names) and not holds()]


def _groups_suffice(c: K3Config) -> bool:
    if c.num_expert_group == c.topk_group:
        return True
    size = c.num_experts // c.num_expert_group
    return size >= 2 and c.topk_group * size >= c.num_experts_per_token
