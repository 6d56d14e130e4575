"""Public tensor names and what they are in the model: slices of stacked experts, the padded A_log, packed pairs.

Parameters keep their public names; only routed experts differ: `...experts.w1` [E, out, in] holds the public
`...experts.{e}.w1.weight` (or the pair `.weight_packed`, `.weight_scale`). Imports no torch.
"""

from __future__ import annotations

import re
from typing import Literal, NamedTuple

Part = Literal["weight", "packed", "scale"]

ROOT = "language_model."
LAYERS = ROOT + "model.layers."
EXPERTS = "block_sparse_moe.experts."
GLOBALS = ("model.embed_tokens", "lm_head", "model.norm", "model.output_attn_res_norm", "model.output_attn_res_proj")
# What a text model does not hold: read by nobody, listed in the load report, never an error.
IGNORED_PREFIXES = ("vision_tower.", "mm_projector.")

_EXPERT = re.compile(
    r"(?P<stack>language_model\.model\.layers\.\d+\.block_sparse_moe\.experts)"
    r"\.(?P<expert>\d+)\.(?P<which>w[123])\.weight(?:_(?P<part>packed|scale))?"
)
_STACK = re.compile(r"(?P<stack>language_model\.model\.layers\.\d+\.block_sparse_moe\.experts)\.(?P<which>w[123])")
_LAYER = re.compile(r"language_model\.model\.layers\.(\d+)\.")


class Native(NamedTuple):
    """Where a public tensor lives: the model's name, the row of an expert stack, and which part of a pair it is."""

    name: str
    expert: int | None = None
    part: Part = "weight"


def to_native(public: str) -> Native:
    """Return where the public tensor lives; names of anything but routed experts are their own."""
    match = _EXPERT.fullmatch(public)
    if match is None:
        return Native(public)
    return Native(f"{match['stack']}.{match['which']}", int(match["expert"]), match["part"] or "weight")


def to_public(name: str, expert: int | None = None, part: Part = "weight") -> str:
    """Return the public name of a native tensor, or of one expert of a stack."""
    match = _STACK.fullmatch(name)
    if match is None:
        return name
    if expert is None:
        raise ValueError(f"{name} is a stack of experts; say which expert's public name you want")
    return f"{match['stack']}.{expert}.{match['which']}.weight" + ("" if part == "weight" else f"_{part}")


def is_stack(name: str) -> bool:
    """True for the native name of stacked routed experts."""
    return _STACK.fullmatch(name) is not None


def layer_of(name: str) -> int | None:
    """Return the global layer index in a public or native name, or None outside the layers."""
    match = _LAYER.match(name)
    return int(match[1]) if match else None


def is_ignored(public: str) -> bool:
    """True for the tensors of a full release that the text model does not hold."""
    return public.startswith(IGNORED_PREFIXES)


def a_log_padded(num_heads: int, head_dim: int) -> int:
    """Return the stored length of A_log: the live heads first, zeros up to the head dim (128 for 96 heads)."""
    return max(num_heads, head_dim)
