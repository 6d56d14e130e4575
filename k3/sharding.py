"""How every parameter is split: one table from name pattern to axis, dim and kind, and the slices it implies.

`parallelize`, the checkpoint reader and writer, the memory estimator and the suites all read `SHARDING`; nothing
else knows how a parameter is split. Imports no torch. Print the table with `python -m k3.sharding`.

Kinds, and who sums the gradient of a parameter over the tensor-parallel ranks:

- column, row, head, vocab: split over tp; each rank owns its part, nothing is summed.
- expert: the leading axis is split over ep and the inner width over etp; nothing is summed over those axes.
- shared: whole on every rank, used inside a region whose activations are split by head: always summed over tp.
- token: whole on every rank, applied token by token: summed over tp when tokens are split over tp (sequence parallel).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

LAYER = "language_model.model.layers.*."
ATTENTION = LAYER + "self_attn."
MOE = LAYER + "block_sparse_moe."


@dataclass(frozen=True)
class Placement:
    """Split `dim` of a parameter over `axis` (None: whole on every rank); `also` holds a second (axis, dim)."""

    axis: str | None
    dim: int | None
    kind: str
    also: tuple[tuple[str, int], ...] = ()

    @property
    def splits(self) -> tuple[tuple[str, int], ...]:
        """Every (axis, dim) the parameter is split over, outermost first."""
        return () if self.axis is None else ((self.axis, self.dim), *self.also)


COLUMN = Placement("tp", 0, "column")
ROW = Placement("tp", 1, "row")
HEAD = Placement("tp", 0, "head")
VOCAB = Placement("tp", 0, "vocab")
EXPERT_COLUMN = Placement("ep", 0, "expert", (("etp", 1),))
EXPERT_ROW = Placement("ep", 0, "expert", (("etp", 2),))
SHARED = Placement(None, None, "shared")
TOKEN = Placement(None, None, "token")

# Pattern -> placement; `*` is one dotted component. The first match wins.
SHARDING: dict[str, Placement] = {
    "language_model.model.embed_tokens.weight": VOCAB,
    "language_model.lm_head.weight": VOCAB,
    "language_model.model.norm.weight": TOKEN,
    "language_model.model.output_attn_res_norm.weight": TOKEN,
    "language_model.model.output_attn_res_proj.weight": TOKEN,
    LAYER + "input_layernorm.weight": TOKEN,
    LAYER + "post_attention_layernorm.weight": TOKEN,
    LAYER + "self_attention_res_norm.weight": TOKEN,
    LAYER + "self_attention_res_proj.weight": TOKEN,
    LAYER + "mlp_res_norm.weight": TOKEN,
    LAYER + "mlp_res_proj.weight": TOKEN,
    ATTENTION + "q_proj.weight": COLUMN,
    ATTENTION + "k_proj.weight": COLUMN,
    ATTENTION + "v_proj.weight": COLUMN,
    ATTENTION + "g_proj.weight": COLUMN,
    ATTENTION + "f_b_proj.weight": COLUMN,
    ATTENTION + "b_proj.weight": COLUMN,
    ATTENTION + "q_b_proj.weight": COLUMN,
    ATTENTION + "kv_b_proj.weight": COLUMN,
    ATTENTION + "o_proj.weight": ROW,
    ATTENTION + "q_conv1d.weight": HEAD,
    ATTENTION + "k_conv1d.weight": HEAD,
    ATTENTION + "v_conv1d.weight": HEAD,
    ATTENTION + "A_log": HEAD,
    ATTENTION + "dt_bias": HEAD,
    ATTENTION + "f_a_proj.weight": SHARED,
    ATTENTION + "o_norm.weight": SHARED,
    ATTENTION + "q_a_proj.weight": SHARED,
    ATTENTION + "q_a_layernorm.weight": SHARED,
    ATTENTION + "kv_a_proj_with_mqa.weight": SHARED,
    ATTENTION + "kv_a_layernorm.weight": SHARED,
    LAYER + "mlp.gate_proj.weight": COLUMN,
    LAYER + "mlp.up_proj.weight": COLUMN,
    LAYER + "mlp.down_proj.weight": ROW,
    MOE + "shared_experts.gate_proj.weight": COLUMN,
    MOE + "shared_experts.up_proj.weight": COLUMN,
    MOE + "shared_experts.down_proj.weight": ROW,
    MOE + "gate.weight": TOKEN,
    MOE + "gate.e_score_correction_bias": TOKEN,
    MOE + "routed_expert_down_proj.weight": TOKEN,
    MOE + "routed_expert_norm.weight": TOKEN,
    MOE + "routed_expert_up_proj.weight": TOKEN,
    MOE + "experts.w1": EXPERT_COLUMN,
    MOE + "experts.w3": EXPERT_COLUMN,
    MOE + "experts.w2": EXPERT_ROW,
}

_PATTERNS = [(re.compile(re.escape(pattern).replace(r"\*", r"[^.]+")), place) for pattern, place in SHARDING.items()]


_PARAMETRIZED = re.compile(r"\.parametrizations\.([^.]+)\.original$")


def canonical(name: str) -> str:
    """Return the model's name of a parameter that torch.nn.utils.parametrize has moved to `original`."""
    return _PARAMETRIZED.sub(r".\1", name)


def placement(name: str) -> Placement:
    """Return the placement of a native parameter or buffer name; raise KeyError for a name the table lacks."""
    plain = canonical(name)
    for pattern, place in _PATTERNS:
        if pattern.fullmatch(plain):
            return place
    raise KeyError(f"{name!r} is not in SHARDING; every parameter is placed by name, so add its pattern there")


def axis_slice(size: int, parts: int, index: int) -> slice:
    """Return part `index` of `size` rows cut into `parts` of ceil(size / parts), the last ones shorter."""
    step = -(-size // parts)
    return slice(min(index * step, size), min((index + 1) * step, size))


def local_slices(name: str, global_shape: tuple[int, ...], parallel: Any = None) -> tuple[slice, ...]:
    """Return, per dim, the slice of the whole parameter that this rank stores.

    `parallel` has `<axis>_size` and `<axis>_rank` for tp, ep and etp; None means one rank.
    """
    slices = [slice(0, size) for size in global_shape]
    for axis, dim in placement(name).splits if parallel is not None else ():
        parts, index = getattr(parallel, f"{axis}_size"), getattr(parallel, f"{axis}_rank")
        slices[dim] = axis_slice(global_shape[dim], parts, index)
    return tuple(slices)


def local_shape(name: str, global_shape: tuple[int, ...], parallel: Any = None) -> tuple[int, ...]:
    """Return the shape this rank stores."""
    return tuple(part.stop - part.start for part in local_slices(name, global_shape, parallel))


def table() -> str:
    """Return SHARDING as aligned text, one pattern a line."""
    rows = [("pattern", "split", "kind")]
    for pattern, place in SHARDING.items():
        split = ", ".join(f"{axis} on dim {dim}" for axis, dim in place.splits) or "whole"
        rows.append((pattern, split, place.kind))
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


if __name__ == "__main__":
    print(table())
