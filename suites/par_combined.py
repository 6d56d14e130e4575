"""Several axes at once against one rank, and every single axis against the vendor's own golden gradients."""

import pytest

from k3.parallel import ParallelState, context_layout
from suites.goldens import Golden, close, relative
from suites.par_common import (
    BOTH,
    LIMIT,
    batch,
    check,
    check_experts,
    one_rank,
    par6,
    par6_golden,
    part,
    run_part,
    whole_gradients,
)

LAYOUTS = {
    "cp2_ep2": {"cp_size": 2, "ep_size": 2},
    "cp2_dp2_ep4": {"cp_size": 2, "dp_size": 2, "ep_size": 4},
    "tp2_cp2_ep2": {"tp_size": 2, "cp_size": 2, "ep_size": 2},
    "tp2_sp_cp2_ep2_etp2": {"tp_size": 2, "sequence_parallel": True, "cp_size": 2, "ep_size": 2, "etp_size": 2},
    "tp2_sp_dp2_ep2": {"tp_size": 2, "sequence_parallel": True, "dp_size": 2, "ep_size": 2},
}


def ranked(layouts):
    """Parameters of the layouts, each marked with the ranks it needs."""
    return [
        pytest.param(axes, marks=pytest.mark.ranks(ParallelState(**axes).world_size), id=name)
        for name, axes in layouts.items()
    ]


def compare(axes, mode, dtype):
    """Every dp rank takes one row of the batch, every cp rank its share of it."""
    config, state = par6(dtype)
    ids, labels = batch(config, length=32)
    wanted = one_rank(config, state, ids, labels)
    model = part(config, state, ParallelState(**axes))
    step = len(ids) // model.parallel.dp_size
    rows = slice(model.parallel.dp_rank * step, (model.parallel.dp_rank + 1) * step)
    layout = context_layout(model.parallel, mode, ids.shape[1])
    split = getattr(layout, "split", lambda x: x)

    def mine(x):
        return split(x[rows])

    found = run_part(model, mine(ids), mine(labels), layout=layout)
    check(model, found, wanted, LIMIT[dtype], mine)
    check_experts(found.experts, wanted.experts, lambda x: mine(x.unflatten(0, (len(ids), -1))).flatten(0, 1))


@pytest.mark.parametrize("axes", ranked(LAYOUTS))
@pytest.mark.parametrize("mode", ["headwise", "state"])
@pytest.mark.parametrize("dtype", BOTH)
def test_layout(axes, mode, dtype):
    """A layout of several axes gives one rank's logits, loss, experts and gradients."""
    compare(axes, mode, dtype)


GOLDEN = {
    "tp2": {"tp_size": 2},
    "tp4": {"tp_size": 4},
    "ep2": {"dp_size": 2, "ep_size": 2},
    "ep4": {"cp_size": 4, "ep_size": 4},
    "etp2": {"cp_size": 2, "etp_size": 2},
    "cp2": {"cp_size": 2},
    "cp4": {"cp_size": 4},
    "tp2_cp2_ep2": {"tp_size": 2, "cp_size": 2, "ep_size": 2},
}


def compare_golden(axes, mode, data_file):
    """Logits, loss and every handed gradient of par6 at 64 tokens, under the layout, in float32."""
    golden = Golden("par6")
    for path in golden.files:
        data_file(path)
    config, state = par6_golden()
    ids, labels = golden.inputs(64)
    model = part(config, state, ParallelState(**axes))
    step = len(ids) // model.parallel.dp_size
    rows = slice(model.parallel.dp_rank * step, (model.parallel.dp_rank + 1) * step)
    layout = context_layout(model.parallel, mode, 64)
    split = getattr(layout, "split", lambda x: x)
    found = run_part(model, split(ids[rows]), split(labels[rows]), layout=layout)
    wanted = golden.expected("f32", 64)
    close(found.logits.cpu(), split(wanted["logits"][rows]), 1e-3, "logits")
    close(found.loss.cpu().view(1), wanted["loss"], 1e-3, "loss")
    grads = whole_gradients(model)
    for name, gradient in golden.gradients(64).items():
        relative(grads[name].cpu(), gradient, 1e-3, name)


@pytest.mark.parametrize("axes", ranked(GOLDEN))
@pytest.mark.parametrize("mode", ["headwise", "state"])
def test_vendor_golden(axes, mode, data_file):
    """The vendor's logits, loss and gradients hold under the layout."""
    compare_golden(axes, mode, data_file)


@pytest.mark.ranks(8)
def test_vendor_golden_cp8_ep8(data_file):
    """The vendor's numbers hold on eight ranks with eight tokens and one expert each, some without a token."""
    compare_golden({"cp_size": 8, "ep_size": 8}, "state", data_file)
