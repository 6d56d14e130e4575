"""A rank that dies or hangs inside any collective: all end in time, the right rank is blamed, nothing is green."""

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist

from k3.parallel import ParallelState, collectives, connect
from k3.parallel.pipeline import Pipeline
from suites.par_common import load_part, par6
from suites.ranks import GRACE_S, blame, require_passed, run_forked

RANKS, CULPRIT, TIMEOUT_S = 3, 1, 3.0
SLACK_S = 20.0  # for starting and killing processes on a busy machine; a hang lasts 60 s


def ones():
    return torch.ones(RANKS * 4, 2)


OPERATIONS = {
    "all_reduce": lambda: collectives.sum_ranks(ones(), dist.group.WORLD, "t"),
    "all_gather": lambda: collectives.all_gather(ones(), 0, dist.group.WORLD, "t"),
    "reduce_scatter": lambda: collectives.reduce_scatter(ones(), 0, dist.group.WORLD, "t"),
    "all_to_all": lambda: collectives.exchange(ones(), None, None, dist.group.WORLD, "t"),
    "barrier": dist.barrier,
}


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def hang():
    time.sleep(60)


def fail():
    raise RuntimeError("this rank is wrong")


FAULTS = {"killed": (die, "died"), "hung": (hang, "hung"), "raised": (fail, "raised")}


def watch(body) -> tuple[list, float]:
    """Outcomes of the ranks and the time until all had ended."""
    started = time.monotonic()
    outcomes = run_forked(body, RANKS, TIMEOUT_S)
    return outcomes, time.monotonic() - started


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("fault", FAULTS)
def test_collective(operation, fault):
    """Rank 1 fails where its peers wait in the collective: rank 1 is blamed, within the time-out, and nobody passes."""
    act, status = FAULTS[fault]

    def body():
        if dist.get_rank() == CULPRIT:
            act()
        OPERATIONS[operation]()

    outcomes, seconds = watch(body)
    culprit = blame(outcomes)
    assert (culprit.rank, culprit.status) == (CULPRIT, status)
    assert all(outcome.status != "passed" for outcome in outcomes)
    assert seconds < TIMEOUT_S + GRACE_S + SLACK_S
    with pytest.raises(AssertionError, match=f"rank {CULPRIT} {status}"):
        require_passed(outcomes)


@pytest.mark.parametrize("fault", FAULTS)
def test_pipeline(fault):
    """The middle stage fails inside a step: it is blamed, and its neighbours end within the time-out."""
    act, status = FAULTS[fault]

    def body():
        config, state = par6()
        chunk = load_part(config, state, connect(ParallelState(pp_size=RANKS)))
        if dist.get_rank() == CULPRIT:
            chunk.decoder.register_forward_pre_hook(lambda *_: act())
        pipeline = Pipeline([chunk], microbatches=RANKS, rows=1, tokens=4)
        ids = torch.ones(RANKS, 4, dtype=torch.int64)
        pipeline.step(ids, ids)

    outcomes, seconds = watch(body)
    assert (blame(outcomes).rank, blame(outcomes).status) == (CULPRIT, status)
    assert all(outcome.status != "passed" for outcome in outcomes)
    assert seconds < TIMEOUT_S + GRACE_S + SLACK_S


def test_early_exit_is_not_a_pass():
    """A rank that leaves with exit code 0 before its body ended has died."""
    outcomes, _ = watch(lambda: os._exit(0) if dist.get_rank() == CULPRIT else dist.barrier())
    assert (blame(outcomes).rank, blame(outcomes).status) == (CULPRIT, "died")
