"""Training state in torch's distributed checkpoint: save, resume, and reshard to another layout.

Every split parameter is a DTensor, so the checkpoint holds whole tensors under public names (experts stacked) whatever
the layout was; optimizer state follows its parameters. For interchange with other engines use `k3.checkpoint`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from os import PathLike
from typing import Any

import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.optim import Optimizer

# Layer 0 has no snapshot to mix, so these never get a gradient and an optimizer keeps no state for them.
UNUSED = "layers.0.self_attention_res_"
FLAT = StateDictOptions(flatten_optimizer_state_dict=True)  # keys by parameter name, so stages can move between ranks


def save_training_state(
    folder: str | PathLike[str],
    chunks: Sequence[nn.Module],
    optimizers: Sequence[Optimizer] = (),
    values: Mapping[str, Any] | None = None,
) -> None:
    """Write parameters, buffers, optimizer state (one optimizer per chunk) and plain values. Collective."""
    dcp.save(_state(chunks, optimizers, values or {}), checkpoint_id=folder)


def load_training_state(
    folder: str | PathLike[str],
    chunks: Sequence[nn.Module],
    optimizers: Sequence[Optimizer] = (),
    values: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Read into chunks and optimizers of any layout, in place; return the saved values of those names. Collective."""
    state = _state(chunks, optimizers, values or {})
    trained = {name: value for name, value in state["optimizer"].items() if UNUSED not in name}
    dcp.load({**state, "optimizer": trained}, checkpoint_id=folder)
    for chunk in chunks:
        names = get_model_state_dict(chunk)
        set_model_state_dict(chunk, {name: state["model"][name] for name in names})
    for chunk, optimizer in zip(chunks, optimizers, strict=False):
        names = get_optimizer_state_dict(chunk, optimizer, options=FLAT)
        set_optimizer_state_dict(chunk, optimizer, {name: state["optimizer"][name] for name in names}, options=FLAT)
    return dict(state["values"])


def _state(chunks, optimizers, values: Mapping[str, Any]) -> dict[str, Any]:
    """The chunks share one name space: layer names are global."""
    state: dict[str, Any] = {"model": {}, "optimizer": {}, "values": dict(values)}
    for chunk in chunks:
        state["model"] |= get_model_state_dict(chunk)
    for chunk, optimizer in zip(chunks, optimizers, strict=False):
        state["optimizer"] |= get_optimizer_state_dict(chunk, optimizer, options=FLAT)
    return state
