"""Expert parallelism (ep, and etp inside an expert) against one rank."""

import pytest
import torch

from k3 import K3Model
from k3.moe import LocalDispatcher
from k3.parallel import ParallelState, collectives
from suites.par_common import BOTH, DOUBLE, LIMIT, batch, check, check_experts, one_rank, par6, part, run_part
from suites.ranks import device


@pytest.fixture
def tiny(dtype):
    """The par6 proxy, a batch of eight rows, and its one-rank run."""
    config, state = par6(dtype)
    ids, labels = batch(config, length=6, rows=8)
    return config, state, ids, labels, one_rank(config, state, ids, labels)


def compare(tiny, parallel, dtype):
    """Give each dp rank its rows, run this rank's part, and compare everything with one rank."""
    config, state, ids, labels, wanted = tiny
    model = part(config, state, parallel)
    step = len(ids) // parallel.dp_size
    rows = slice(model.parallel.dp_rank * step, (model.parallel.dp_rank + 1) * step)
    found = run_part(model, ids[rows], labels[rows])
    check(model, found, wanted, LIMIT[dtype], lambda x: x[rows])
    length = ids.shape[1]
    check_experts(found.experts, wanted.experts, lambda x: x[rows.start * length : rows.stop * length])


@pytest.mark.ranks(2)
@pytest.mark.parametrize("dtype", BOTH)
def test_ep2(tiny, dtype):
    """Experts over two ranks, each with its own tokens, give one rank's results."""
    compare(tiny, ParallelState(dp_size=2, ep_size=2), dtype)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("dtype", BOTH)
def test_ep4(tiny, dtype):
    """Experts over four ranks give one rank's results."""
    compare(tiny, ParallelState(dp_size=4, ep_size=4), dtype)


@pytest.mark.ranks(8)
@pytest.mark.parametrize("dtype", DOUBLE)
def test_ep8(tiny, dtype):
    """One expert a rank, some without a token, give one rank's results."""
    compare(tiny, ParallelState(dp_size=8, ep_size=8), dtype)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("dtype", DOUBLE)
def test_ep2_with_two_replicas(tiny, dtype):
    """Expert shards stored twice sum their gradients over the replicas."""
    compare(tiny, ParallelState(dp_size=4, ep_size=2), dtype)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("dtype", BOTH)
def test_etp2(tiny, dtype):
    """Each expert's width over two ranks, its parts summed before the norm, gives one rank's results."""
    compare(tiny, ParallelState(dp_size=2, etp_size=2), dtype)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("dtype", DOUBLE)
def test_ep2_etp2(tiny, dtype):
    """Experts over two ranks and each expert's width over two give one rank's results."""
    compare(tiny, ParallelState(dp_size=4, ep_size=2, etp_size=2), dtype)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("dtype", DOUBLE)
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_tp2_ep4(tiny, dtype, sequence_parallel):
    """Experts over all ranks of a tp2 x dp2 stage: a token reaches its experts once, from one tp rank."""
    compare(tiny, ParallelState(tp_size=2, dp_size=2, ep_size=4, sequence_parallel=sequence_parallel), dtype)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("chosen", [[0, 1], [6, 7], [0, 7]])
def test_all_tokens_on_one_expert(chosen):
    """Every token of every rank on the same experts, so that other ranks get nothing, equals one rank's experts."""
    config, state = par6()
    model = part(config, state, ParallelState(dp_size=4, ep_size=4))
    whole = K3Model(config, dtype=torch.float64)
    whole.load_state_dict(state)
    torch.manual_seed(model.parallel.dp_rank)
    z = torch.randn(5, config.routed_expert_hidden_size, dtype=torch.float64)
    idx, weight = torch.tensor(chosen).expand(5, 2), torch.rand(5, 2, dtype=torch.float64)
    found = model.decoder.layers["2"].ffn
    wanted = LocalDispatcher()(z, idx, weight, whole.decoder.layers["2"].ffn.experts)
    got = found.dispatcher(z, idx, weight, found.experts)
    assert torch.allclose(got, wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.ranks(4)
def test_same_bits_every_time():
    """Two dispatches of the same tokens give the same bits: the order of every sum is fixed."""
    config, state = par6(torch.float32)
    ffn = part(config, state, ParallelState(dp_size=4, ep_size=4)).decoder.layers["3"].ffn
    torch.manual_seed(0)
    x = torch.randn(2, 9, config.hidden_size)
    assert torch.equal(ffn(x), ffn(x))


@pytest.mark.ranks(2)
def test_dispatch_moves_latents():
    """What crosses ranks is the latent: at most k * L elements a token each way."""
    config, state = par6(torch.float32)
    ffn = part(config, state, ParallelState(dp_size=2, ep_size=2)).decoder.layers["3"].ffn
    with collectives.count() as moves:
        ffn(torch.randn(1, 10, config.hidden_size, device=device()))
    there, back = (move for move in moves if move.tag == "experts")
    assert there.path == back.path == f"{torch.distributed.get_backend()}.all_to_all"
    latent_bytes = config.routed_expert_hidden_size * 4
    assert 0 < there.size_bytes <= 10 * config.num_experts_per_token * latent_bytes
    assert there.size_bytes % latent_bytes == 0
