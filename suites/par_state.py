"""Training state across layouts: save, reshard and resume give the run that was never interrupted."""

import shutil
import tempfile

import pytest
import torch
import torch.distributed as dist

from k3 import K3Model
from k3.parallel import (
    ParallelState,
    clip_gradients,
    context_layout,
    fully_shard_model,
    load_training_state,
    save_training_state,
)
from k3.parallel.tensor import whole_parameter
from suites.goldens import relative
from suites.par_common import batch, par6, part, run_part

STEPS = 2
# Where training starts, and the layout it resumes in.
MOVES = {
    "tp2_dp2_to_tp4": ({"tp_size": 2, "dp_size": 2}, False, {"tp_size": 4}, False),
    "ep4_to_ep2_etp2": ({"dp_size": 4, "ep_size": 4}, False, {"dp_size": 4, "ep_size": 2, "etp_size": 2}, False),
    "fsdp4_to_tp2_fsdp2": ({"dp_size": 4}, True, {"tp_size": 2, "dp_size": 2}, True),
    "cp4_to_fsdp_ep2": ({"cp_size": 4}, False, {"dp_size": 4, "ep_size": 2}, True),
}


@pytest.fixture
def folder():
    """A folder all ranks see: made before the ranks fork, or by rank 0 of a job."""
    path = [tempfile.mkdtemp()]
    yield path[0]
    shutil.rmtree(path[0], ignore_errors=True)


def shared(folder: str) -> str:
    """The folder of rank 0: in a job every rank made one of its own."""
    box = [folder]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def train(model, optimizer, steps, length=8, rows=4):
    """Some optimizer steps on this rank's share of fixed batches."""
    parallel = model.parallel
    layout = context_layout(parallel, "headwise", length) if parallel.cp_size > 1 else None
    for step in steps:
        ids, labels = batch(model.config, length=length, rows=rows)
        ids = (ids + step) % (model.config.vocab_size - 1) + 1
        share = rows // parallel.dp_size
        mine = slice(parallel.dp_rank * share, (parallel.dp_rank + 1) * share)
        ids, labels = (layout.split(x[mine]) if layout else x[mine] for x in (ids, labels))
        run_part(model, ids, labels, layout)
        clip_gradients(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()


def build(config, state, axes, fsdp):
    """This rank's part and an optimizer with momentum."""
    model = part(config, state, ParallelState(**axes))
    if fsdp:
        fully_shard_model(model)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("before,fsdp_before,after,fsdp_after", MOVES.values(), ids=MOVES)
def test_resume_in_another_layout(folder, before, fsdp_before, after, fsdp_after):
    """Two steps, a checkpoint, another layout, two more steps: the parameters of four steps on one rank."""
    folder = shared(folder)
    config, state = par6()
    whole, one = build(config, state, {"dp_size": 4}, False)
    train(whole, one, range(2 * STEPS))
    model, optimizer = build(config, state, before, fsdp_before)
    train(model, optimizer, range(STEPS))
    save_training_state(folder, [model], [optimizer], {"step": STEPS})
    blank = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    model, optimizer = build(config, blank, after, fsdp_after)
    values = load_training_state(folder, [model], [optimizer], {"step": 0})
    assert values == {"step": STEPS}
    train(model, optimizer, range(values["step"], 2 * STEPS))
    wanted = dict(whole.named_parameters())
    for name, parameter in model.named_parameters():
        relative(whole_parameter(parameter), wanted[name], 1e-9, name)
    assert not torch.equal(wanted["language_model.model.norm.weight"], state["language_model.model.norm.weight"])


def test_pipeline_stages_share_one_checkpoint(folder):
    """Two stages written from their own chunks read back as one whole model."""
    config, state = par6()
    stages = [K3Model(config, ParallelState(pp_size=2).at(rank), dtype=torch.float64) for rank in range(2)]
    for stage in stages:
        stage.load_state_dict({name: state[name] for name in stage.state_dict()})
    save_training_state(folder, stages)
    model = K3Model(config, dtype=torch.float64)
    load_training_state(folder, [model])
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
