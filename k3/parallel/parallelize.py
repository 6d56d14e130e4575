"""The order in which a layout is applied to a freshly built stage, in one function."""

from __future__ import annotations

from typing import Any

from torch import nn

from k3.parallel.data import ParallelLoss, broadcast_replicas
from k3.parallel.expert import parallelize_experts
from k3.parallel.tensor import parallelize_tensor, place_parameters


def parallelize_model(model: nn.Module, parallel: Any) -> nn.Module:
    """Turn a whole `K3Model` stage into this rank's part of it, in place; replicas get equal values. Collective.

    Context parallelism enters later, per batch, through the layout that is handed to `forward`. Without a mesh (the
    meta device) only the parameters are cut; with one, a stage on the meta device is cut and wired, to be given memory
    for its own part by `to_empty` and values by `reset_parameters` or a checkpoint.
    """
    place_parameters(model, parallel)
    if parallel.mesh is None:
        return model
    if parallel.tp_size > 1:
        parallelize_tensor(model, parallel)
    if parallel.ep_size * parallel.etp_size > 1 or parallel.tp_size > 1:
        parallelize_experts(model, parallel)
    if parallel.tp_size * parallel.cp_size * parallel.dp_size > 1:
        model.loss_fn = ParallelLoss(parallel, model.config.vocab_size)
    if next(model.parameters()).device.type != "meta":
        broadcast_replicas(model, parallel)
    return model
