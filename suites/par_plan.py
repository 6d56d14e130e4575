"""The traffic that `k3-layout plan` predicts is what the collectives send."""

import pytest
import torch

from k3.layout_plan import Workload, plan
from k3.parallel import ParallelState, collectives, connect, context_layout
from k3.parallel.pipeline import Pipeline
from suites.par_common import batch, load_part, par6, part, run_part
from suites.ranks import device

ROWS, TOKENS = 2, 32
WORK = {"tokens": TOKENS, "rows": ROWS, "microbatches": 1, "act_bytes": 4}
LAYOUTS = {
    "tp2": ({"tp_size": 2}, "headwise"),
    "tp2_sp": ({"tp_size": 2, "sequence_parallel": True}, "headwise"),
    "cp2_headwise": ({"cp_size": 2}, "headwise"),
    "cp2_state": ({"cp_size": 2}, "state"),
    "tp2_cp2_state": ({"tp_size": 2, "cp_size": 2}, "state"),
    "dp2": ({"dp_size": 2}, "headwise"),
}
TAGS = {"tp": ("attention", "mlp"), "cp": ("kda", "mla"), "dp": ("gradients",)}
RANKED = [
    pytest.param(axes, mode, marks=pytest.mark.ranks(ParallelState(**axes).world_size), id=name)
    for name, (axes, mode) in LAYOUTS.items()
]


@pytest.mark.parametrize("axes,mode", RANKED)
def test_predicted_bytes(axes, mode):
    """Bytes by axis of one forward and backward equal the prediction, but for 1 % (layer 0 mixes nothing)."""
    config, state = par6(torch.float32)
    model = part(config, state, ParallelState(**axes))
    ids, labels = batch(config, TOKENS, ROWS * model.parallel.dp_size)
    layout = context_layout(model.parallel, mode, TOKENS)
    split = getattr(layout, "split", lambda x: x)
    mine = slice(model.parallel.dp_rank * ROWS, (model.parallel.dp_rank + 1) * ROWS)
    with collectives.count() as moves:
        run_part(model, split(ids[mine]), split(labels[mine]), layout)
    predicted = plan(config, ParallelState(**axes), Workload(**WORK, kda_cp_mode=mode))[0].traffic
    for axis, tags in TAGS.items():
        sent = sum(move.size_bytes for move in moves if move.tag in tags)
        if axis != "dp" or model.parallel.tp_size == 1:  # the tp sums of replicated parameters carry the same tag
            assert sent == pytest.approx(predicted[axis], rel=0.01), axis


@pytest.mark.ranks(3)
def test_predicted_boundaries():
    """Boundary messages of a step, forward and backward, equal the prediction on every stage."""
    config, state = par6(torch.float32)
    parallel = connect(ParallelState(pp_size=3), device().type)
    pipeline = Pipeline([load_part(config, state, parallel)], microbatches=3, rows=ROWS, tokens=TOKENS)
    ids, labels = batch(config, TOKENS, 3 * ROWS)
    with collectives.count() as moves:
        pipeline.step(ids, labels)
    sent = sum(move.size_bytes for move in moves if move.tag == "boundary")
    work = Workload(**{**WORK, "microbatches": 3})
    assert sent == plan(config, ParallelState(pp_size=3), work)[parallel.pp_rank].traffic["pp"]


@pytest.mark.ranks(4)
def test_expert_traffic_is_near_even_routing():
    """What four expert ranks send is within a quarter of the prediction, which takes routing as even."""
    config, state = par6(torch.float32)
    axes = {"dp_size": 4, "ep_size": 4}
    model = part(config, state, ParallelState(**axes))
    ids, labels = batch(config, TOKENS, ROWS * 4)
    mine = slice(model.parallel.dp_rank * ROWS, (model.parallel.dp_rank + 1) * ROWS)
    with collectives.count() as moves:
        run_part(model, ids[mine], labels[mine])
    sent = torch.tensor(float(sum(move.size_bytes for move in moves if move.tag == "experts")))
    mean = collectives.sum_ranks(sent, torch.distributed.group.WORLD, "t") / 4
    assert float(mean) == pytest.approx(
        plan(config, ParallelState(**axes), Workload(**WORK))[0].traffic["ep"], rel=0.25
    )
