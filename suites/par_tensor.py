"""Tensor parallelism, with and without sequence parallelism, against one rank."""

import pytest

from k3.parallel import ParallelState
from suites.par_common import BOTH, DOUBLE, LIMIT, batch, check, check_experts, one_rank, par6, part, run_part


@pytest.fixture
def tiny(dtype):
    """The par6 proxy, a batch, and its one-rank run."""
    config, state = par6(dtype)
    ids, labels = batch(config)
    return config, state, ids, labels, one_rank(config, state, ids, labels)


def compare(tiny, parallel, dtype):
    """Run this rank's part of the layout and compare everything with one rank."""
    config, state, ids, labels, wanted = tiny
    model = part(config, state, parallel)
    found = run_part(model, ids, labels)
    check(model, found, wanted, LIMIT[dtype])
    return found, wanted


@pytest.mark.ranks(2)
@pytest.mark.parametrize("dtype", BOTH)
def test_tp2(tiny, dtype):
    """Two tensor-parallel ranks give one rank's logits, loss, experts and gradients."""
    found, wanted = compare(tiny, ParallelState(tp_size=2), dtype)
    check_experts(found.experts, wanted.experts)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("dtype", DOUBLE)
def test_tp4(tiny, dtype):
    """Four tensor-parallel ranks, one head each, give one rank's logits, loss, experts and gradients."""
    found, wanted = compare(tiny, ParallelState(tp_size=4), dtype)
    check_experts(found.experts, wanted.experts)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("dtype", BOTH)
def test_tp2_sequence_parallel(tiny, dtype):
    """The residual stream split over two ranks along tokens changes nothing."""
    compare(tiny, ParallelState(tp_size=2, sequence_parallel=True), dtype)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("dtype", DOUBLE)
def test_tp4_sequence_parallel(tiny, dtype):
    """The residual stream split over four ranks along tokens changes nothing."""
    compare(tiny, ParallelState(tp_size=4, sequence_parallel=True), dtype)
