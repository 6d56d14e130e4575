"""What makes a `K3Config` valid: types, the values that are implemented, and the rules between fields."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import fields
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from k3.config import K3Config

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
MAY_BE_ZERO = ("first_k_dense_replace",)
LAYER_LISTS = ("kda_layers", "full_attention_layers")


class Fault(NamedTuple):
    """A broken rule: the fields it is about, and `value, rule, remedy`."""

    fields: tuple[str, ...]
    text: str


class ConfigError(ValueError):
    """Every fault of a configuration at once."""

    def __init__(self, faults: list[Fault]):
        self.faults = faults
        super().__init__("K3Config: " + "; ".join(fault.text for fault in faults))


def faults(config: K3Config) -> list[Fault]:
    """Every rule the values break. A rule between fields is judged only if each of them is sound by itself."""
    single = [
        Fault((f.name,), f"{f.name}={getattr(config, f.name)!r} {text}")
        for f in fields(config)
        if (text := _single_fault(f.name, f.type, getattr(config, f.name)))
    ]
    broken = {name for fault in single for name in fault.fields}
    judged = [(names, rule(config)) for names, rule in _RULES if not broken & set(names)]
    return [*single, *(Fault(names, text) for names, text in judged if text)]


def _single_fault(name: str, kind: str, value: Any) -> str | None:
    """What is wrong with one field, or None; `kind` is its annotation."""
    if name in ONLY_VALUE:
        only = ONLY_VALUE[name]
        return None if value == only else f"is not implemented; the public model has {only!r}"
    if name == "kda_gate_lower_bound":
        sound = _is_number(value) and -5 <= value < 0
        return None if sound else "must lie in [-5, 0); no bound (the softplus gate) is not implemented"
    if name in LAYER_LISTS:
        return None if all(type(i) is int for i in value) else "must hold layer numbers, counted from 1"
    if kind == "int":
        lowest = 0 if name in MAY_BE_ZERO else 1
        return None if type(value) is int and value >= lowest else f"must be an integer of at least {lowest}"
    if kind == "float":
        return None if _is_number(value) and 0 < value < math.inf else "must be a positive number"
    return "must be true or false" if kind == "bool" and type(value) is not bool else None


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


Rule = Callable[["K3Config"], str | None]
_RULES: list[tuple[tuple[str, ...], Rule]] = []


def _rule(*names: str) -> Callable[[Rule], Rule]:
    def register(rule: Rule) -> Rule:
        _RULES.append((names, rule))
        return rule

    return register


@_rule("num_key_value_heads", "num_attention_heads")
def _key_value_heads(c: K3Config) -> str | None:
    if c.num_key_value_heads == c.num_attention_heads:
        return None
    return f"num_key_value_heads={c.num_key_value_heads} must equal num_attention_heads={c.num_attention_heads}"


@_rule("num_hidden_layers", *LAYER_LISTS)
def _layer_lists(c: K3Config) -> str | None:
    named = sorted((*c.kda_layers, *c.full_attention_layers))
    wanted = range(1, c.num_hidden_layers + 1)
    if named == list(wanted):
        return None
    missing, strange = sorted({*wanted} - {*named}), sorted({*named} - {*wanted})
    twice = sorted({i for i in named if named.count(i) > 1})
    return (
        f"kda_layers and full_attention_layers must name each of num_hidden_layers={c.num_hidden_layers} once, "
        f"counting from 1: missing {_few(missing)}, beyond {_few(strange)}, twice {_few(twice)}"
    )


def _few(numbers: list[int]) -> str:
    return "none" if not numbers else ", ".join(map(str, numbers[:4])) + (", ..." if len(numbers) > 4 else "")


@_rule("num_experts", "num_experts_per_token")
def _experts_per_token(c: K3Config) -> str | None:
    if c.num_experts_per_token <= c.num_experts:
        return None
    return f"num_experts_per_token={c.num_experts_per_token} exceeds num_experts={c.num_experts}; choose fewer"


@_rule("num_experts", "num_experts_per_token", "num_expert_group", "topk_group")
def _expert_groups(c: K3Config) -> str | None:
    groups, kept, experts = c.num_expert_group, c.topk_group, c.num_experts
    if experts % groups:
        return f"num_expert_group={groups} must divide num_experts={experts}"
    if kept > groups:
        return f"topk_group={kept} exceeds num_expert_group={groups}; keep at most all groups"
    if kept < groups and (experts // groups < 2 or kept * experts // groups < c.num_experts_per_token):
        return (
            f"topk_group={kept} of num_expert_group={groups} groups of {experts // groups} experts is too few: a group "
            f"needs 2, and those kept need num_experts_per_token={c.num_experts_per_token}"
        )
    return None


@_rule("pad_token_id", "vocab_size")
def _padding_row(c: K3Config) -> str | None:
    if c.pad_token_id is None or (type(c.pad_token_id) is int and 0 <= c.pad_token_id < c.vocab_size):
        return None
    return f"pad_token_id={c.pad_token_id!r} is not a row of vocab_size={c.vocab_size}; use None or a row"
