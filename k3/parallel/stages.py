"""Which decoder layers a pipeline stage holds, and what crosses the boundaries between stages. Pure arithmetic.

A stage layout is a list of rows, one per stage, of the tokens `embedding`, `decoder` and `loss`. Without an explicit
layout, stages take whole Attention Residual blocks, so that the number of snapshots is constant inside a stage.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence

Rows = Sequence[Sequence[str]]
TOKENS = ("embedding", "decoder", "loss")


def block_sizes(layers: int, block: int) -> list[int]:
    """Return the Attention Residual blocks as layer counts: full blocks, then what is left."""
    return [min(block, layers - start) for start in range(0, layers, block)]


def deal(items: Sequence[int], stages: int) -> list[int]:
    """Return the sum of each of `stages` consecutive runs of `items`; runs that are one longer come last."""
    base, extra = divmod(len(items), stages)
    sums, start = [], 0
    for stage in range(stages):
        count = base + (stage >= stages - extra)
        sums.append(sum(items[start : start + count]))
        start += count
    return sums


def aligned(layers: int, block: int, stages: int) -> list[int]:
    """Return decoder layers per stage, by whole blocks; with more stages than blocks, by single layers and a warning.

    Raises ValueError when there are more stages than layers.
    """
    if stages > layers:
        raise ValueError(f"{stages} pipeline stages exceed the {layers} decoder layers; use at most {layers} stages")
    blocks = block_sizes(layers, block)
    if stages <= len(blocks):
        return deal(blocks, stages)
    warnings.warn(
        f"{stages} pipeline stages exceed the {len(blocks)} Attention Residual blocks of {block} layers: "
        f"stages leave block alignment; use at most {len(blocks)} stages to keep it",
        stacklevel=2,
    )
    return deal([1] * layers, stages)


def row_faults(rows: Rows, layers: int | None = None) -> list[str]:
    """Return what is wrong with an explicit layout: unknown tokens, order, empty stages, coverage."""
    flat = [token for row in rows for token in row]
    faults = [
        f"pp_layout token {token!r} is unknown; use embedding, decoder or loss" for token in set(flat) - {*TOKENS}
    ]
    for index, row in enumerate(rows):
        if "decoder" not in row:
            faults.append(f"pp_layout stage {index} has no decoder; give every stage at least one layer")
    if flat[:1] != ["embedding"] or flat.count("embedding") != 1:
        faults.append("pp_layout needs exactly one 'embedding', first in the first stage")
    if flat[-1:] != ["loss"] or flat.count("loss") != 1:
        faults.append("pp_layout needs exactly one 'loss', last in the last stage")
    if layers is not None and flat.count("decoder") != layers:
        faults.append(f"pp_layout covers {flat.count('decoder')} decoder layers of {layers}; list every layer once")
    return faults


def counts(layers: int, block: int, stages: int, rows: Rows | None = None) -> list[int]:
    """Return decoder layers per stage, from an explicit layout or by whole blocks. Raises ValueError on all faults."""
    if rows is None:
        return aligned(layers, block, stages)
    faults = row_faults(rows, layers)
    if len(rows) != stages:
        faults.append(f"pp_layout has {len(rows)} stages for {stages}; give one row per stage")
    if faults:
        raise ValueError("; ".join(faults))
    return [list(row).count("decoder") for row in rows]


def starts(per_stage: Sequence[int]) -> list[int]:
    """Return the first layer of each stage."""
    return [sum(per_stage[:stage]) for stage in range(len(per_stage))]


def snapshots(first_layer: int, block: int) -> int:
    """Return how many snapshots exist before `first_layer` runs: one per block start below it."""
    return -(-first_layer // block)


def efficiency(per_stage: Sequence[int]) -> float:
    """Return mean over bottleneck layers per stage: the share of time a stage works, to first order."""
    return sum(per_stage) / (len(per_stage) * max(per_stage))


def boundary_snapshots(per_stage: Sequence[int], block: int) -> list[int]:
    """Return the snapshots that cross each boundary, K of the (1 + K) hidden-wide pieces."""
    return [snapshots(first, block) for first in starts(per_stage)[1:]]
