"""Data parallelism: replicated and FSDP2, alone and with other axes, clipping, and equal values on all replicas."""

import pytest
import torch

from k3 import K3Model
from k3.parallel import (
    ParallelState,
    clip_gradients,
    connect,
    context_layout,
    fully_shard_model,
    parallelize_model,
    sync_gradients,
)
from k3.parallel.data import sharded_by_fsdp
from k3.parallel.pipeline import Pipeline
from k3.parallel.tensor import whole_parameter
from suites.goldens import relative
from suites.par_common import BOTH, DOUBLE, LIMIT, batch, load_part, one_rank, par6, part, run_part

LAYOUTS = {
    "dp2": {"dp_size": 2},
    "cp2": {"cp_size": 2},
    "ep2_replicated": {"dp_size": 4, "ep_size": 2},
    "ep2": {"dp_size": 2, "ep_size": 2},
    "etp2_replicated": {"dp_size": 4, "etp_size": 2},
    "tp2": {"tp_size": 2, "dp_size": 2},
    "tp2_sp": {"tp_size": 2, "dp_size": 2, "sequence_parallel": True},
    "tp2_cp2_ep2": {"tp_size": 2, "cp_size": 2, "ep_size": 2},
}


def ranked(layouts):
    """Parameters of the layouts, each marked with the ranks it needs."""
    return [
        pytest.param(axes, marks=pytest.mark.ranks(ParallelState(**axes).world_size), id=name)
        for name, axes in layouts.items()
    ]


@pytest.fixture
def tiny(dtype):
    """The par6 proxy, four rows with unequal numbers of labels, and their one-rank run."""
    config, state = par6(dtype)
    ids, labels = batch(config, length=8, rows=4)
    labels[3, 2:] = -100
    return config, state, ids, labels, one_rank(config, state, ids, labels)


def compare_whole(model, wanted, limit):
    """Every whole gradient equals one rank's; none is missing. Collective."""
    names = [name for name, parameter in model.named_parameters() if parameter.grad is not None]
    missing = [name for name, _ in model.named_parameters() if name not in names and name in wanted.grads]
    assert not missing and names, f"no gradient for {missing}"
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            relative(whole_parameter(parameter.grad).cpu(), wanted.grads[name], limit, f"gradient of {name}")


def mine(model, x):
    """The rows of this dp rank and the tokens of this cp rank."""
    step = len(x) // model.parallel.dp_size
    rows = x[model.parallel.dp_rank * step : (model.parallel.dp_rank + 1) * step]
    layout = context_layout(model.parallel, "headwise", x.shape[1])
    return layout.split(rows) if model.parallel.cp_size > 1 else rows


def run(model, ids, labels):
    """One forward and backward of this rank's share of the batch."""
    layout = context_layout(model.parallel, "headwise", ids.shape[1])
    return run_part(model, mine(model, ids), mine(model, labels), layout)


@pytest.mark.parametrize("axes", ranked(LAYOUTS))
@pytest.mark.parametrize("dtype", BOTH)
def test_fsdp(tiny, axes, dtype):
    """FSDP2 over dp x cp (experts over their replicas) gives one rank's loss and summed gradients."""
    config, state, ids, labels, wanted = tiny
    model = part(config, state, ParallelState(**axes))
    fully_shard_model(model)
    assert any(sharded_by_fsdp(parameter) for parameter in model.parameters())
    relative(run(model, ids, labels).loss.cpu(), wanted.loss, LIMIT[dtype], "loss")
    compare_whole(model, wanted, LIMIT[dtype])


@pytest.mark.ranks(2)
@pytest.mark.parametrize("dtype", DOUBLE)
def test_replicated(tiny):
    """Replicas with unequal label counts give the gradient of the mean over all labels."""
    config, state, ids, labels, wanted = tiny
    model = part(config, state, ParallelState(dp_size=2))
    relative(run(model, ids, labels).loss, wanted.loss, 1e-12, "loss")
    compare_whole(model, wanted, 1e-9)


@pytest.mark.parametrize("axes", [pytest.param({"pp_size": 2, "dp_size": 2}, marks=pytest.mark.ranks(4), id="pp2_dp2")])
@pytest.mark.parametrize("dtype", DOUBLE)
def test_fsdp_in_a_pipeline(tiny, axes):
    """Stages sharded by FSDP2 give one rank's loss and whole gradients."""
    config, state, ids, labels, wanted = tiny
    chunk = load_part(config, state, connect(ParallelState(**axes)))
    pipeline = Pipeline([chunk], microbatches=2, rows=1, tokens=8, fully_shard=True)
    relative(pipeline.step(mine(chunk, ids), mine(chunk, labels)), wanted.loss, 1e-9, "loss")
    sync_gradients(chunk)
    compare_whole(chunk, wanted, 1e-9)


@pytest.mark.ranks(2)
def test_pinned_parameters_stay_fp32():
    """Under FSDP2 with bfloat16 compute the pinned parameters stay float32, in storage and in use."""
    config, state = par6(torch.float32)
    parallel = connect(ParallelState(dp_size=2))
    model = K3Model(config, parallel, dtype=torch.bfloat16)
    model.load_state_dict({name: state[name] for name in model.state_dict()})
    fully_shard_model(parallelize_model(model, parallel))
    ids, labels = batch(config, length=8, rows=2)
    run(model, ids, labels)
    attention = model.decoder.layers["0"].self_attn
    for parameter in (attention.A_log, attention.dt_bias, attention.q_conv1d.weight, attention.o_norm.weight):
        assert parameter.dtype == parameter.grad.dtype == torch.float32
    assert torch.equal(attention.A_log.detach(), state["language_model.model.layers.0.self_attn.A_log"])


CLIP = {**LAYOUTS, "pp2_tp2": {"pp_size": 2, "tp_size": 2}, "ep2_etp2": {"dp_size": 4, "ep_size": 2, "etp_size": 2}}


@pytest.mark.parametrize("axes", ranked(CLIP))
@pytest.mark.parametrize("fsdp", [False, True])
@pytest.mark.parametrize("dtype", DOUBLE)
def test_clip(tiny, axes, fsdp):
    """The norm counts every element of the whole model once, however many ranks store it, and scales all gradients."""
    config, state, _, _, wanted = tiny
    model = part(config, state, ParallelState(**axes))
    if fsdp:
        fully_shard_model(model)
    for name, parameter in model.named_parameters():
        if name in wanted.grads:
            parameter.grad = like(parameter, wanted.grads[name], name, model.parallel)
    norm = torch.stack([grad.square().sum() for grad in wanted.grads.values()]).sum().sqrt()
    relative(clip_gradients(model, float(norm) / 2), norm, 1e-9, "norm")
    relative(clip_gradients(model, float("inf")), norm / 2, 1e-6, "norm after clipping")


def like(parameter, whole, name, parallel):
    """The whole gradient as this parameter stores it."""
    from torch.distributed.tensor import DTensor, distribute_tensor

    from k3.sharding import local_slices

    if not isinstance(parameter, DTensor):
        return whole[local_slices(name, whole.shape, parallel)].clone()
    return distribute_tensor(whole.clone(), parameter.device_mesh, parameter.placements)


@pytest.mark.ranks(4)
def test_replicas_start_equal():
    """Ranks that drew different weights hold equal ones after the layout is applied."""
    config, _ = par6()
    torch.manual_seed(torch.distributed.get_rank())
    parallel = connect(ParallelState(dp_size=2, tp_size=2))
    model = parallelize_model(K3Model(config, parallel, dtype=torch.float64), parallel)
    ids, labels = batch(config, length=8, rows=2)
    found = model(ids, labels=labels)["loss"]
    losses = [torch.zeros_like(found) for _ in range(4)]
    torch.distributed.all_gather(losses, found.detach())
    assert len({float(loss) for loss in losses}) == 1
