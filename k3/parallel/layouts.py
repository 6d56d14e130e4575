"""Which layout a batch has: whole sequences, or, where there are cp ranks, a share of their tokens.

Context parallelism is imported only where tokens are shared out: every other layout does without it.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from k3.sequence import SequenceLayout


def context_layout(
    parallel: Any,
    mode: str,
    total: int,
    cu_seqlens: Tensor | None = None,
    local_cp_size: int | None = None,
    head_groups: int | None = None,
) -> SequenceLayout:
    """Return the layout of a batch of `total` tokens a row, packed by the (padded) `cu_seqlens` if given.

    Raises ValueError naming value and rule; a plain SequenceLayout when cp_size is 1. `local_cp_size`: over how many
    ranks the packed batch was prepared, 1 (whole) or cp_size. `head_groups`: see `ContextLayout`; for mode "state".
    """
    size = parallel.cp_size
    if local_cp_size not in (None, 1, size):
        raise ValueError(
            f"local_cp_size={local_cp_size} is neither 1 nor cp_size={size}; prepare the batch for one of them"
        )
    if mode not in ("headwise", "state"):
        raise ValueError(f"kda_cp_mode={mode!r} is unknown; use one of headwise, state")
    if size == 1 or local_cp_size == 1:
        return SequenceLayout(cu_seqlens=cu_seqlens)
    return _share(parallel, mode, total, cu_seqlens, head_groups)


def _share(parallel: Any, mode: str, total: int, cu_seqlens: Tensor | None, head_groups: int | None):
    """Apart from its caller, so that a layout without cp ranks does not depend on context parallelism."""
    from k3.parallel.context import shared_layout

    return shared_layout(parallel, mode, total, cu_seqlens, head_groups)
