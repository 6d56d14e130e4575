"""Every collective of `k3.parallel.collectives` on real ranks: forward and backward against the undivided computation.

Each rank contributes different numbers, runs have unequal lengths, and the split axis is not always the first, so that
a wrong order, a missing sum or a transposed exchange changes the result.
"""

import pytest
import torch
import torch.distributed as dist

from k3.parallel import collectives
from suites.goldens import close
from suites.ranks import device

RANKS = [pytest.param(n, marks=pytest.mark.ranks(n), id=f"x{n}") for n in (2, 4)]
on_ranks = pytest.mark.parametrize("n", RANKS)


def draw(*shape, seed: int):
    """The same float64 numbers on every rank, on its device."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(device())


def mine(pieces):
    """This rank's piece, as a leaf of its own."""
    return pieces[dist.get_rank()].clone().requires_grad_()


@on_ranks
def test_copy_then_reduce(n):
    """A column-then-row split product equals the whole one, and so do the gradients of input and both weights."""
    x, first, second = draw(3, 5, seed=1), draw(4 * n, 5, seed=2), draw(7, 4 * n, seed=3)
    group, local_x = dist.group.WORLD, x.clone().requires_grad_()
    w1, w2 = mine(first.chunk(n, 0)), mine(second.chunk(n, 1))
    hidden = torch.tanh(collectives.copy_to_ranks(local_x, group, "t") @ w1.T)
    y = collectives.reduce_from_ranks(hidden @ w2.T, group, "t")
    y.square().sum().backward()
    whole = [tensor.clone().requires_grad_() for tensor in (x, first, second)]
    wanted = torch.tanh(whole[0] @ whole[1].T) @ whole[2].T
    wanted.square().sum().backward()
    close(y, wanted, 1e-12, "output")
    close(local_x.grad, whole[0].grad, 1e-12, "input gradient")
    close(w1.grad, whole[1].grad.chunk(n, 0)[dist.get_rank()], 1e-12, "column gradient")
    close(w2.grad, whole[2].grad.chunk(n, 1)[dist.get_rank()], 1e-12, "row gradient")


@on_ranks
@pytest.mark.parametrize("dim", [0, 1])
def test_gather_then_scatter(n, dim):
    """Sequence-parallel work: gathered pieces, a different weight on each rank, a scattered sum; gradients follow."""
    x, weights = draw(2 * n, 3 * n, seed=4), draw(n, 3 * n, 3 * n, seed=5)
    piece, weight, rank = mine(x.chunk(n, dim)), mine(weights), dist.get_rank()
    gathered = collectives.gather_pieces(piece, dim, dist.group.WORLD, "t")
    y = collectives.scatter_sum(torch.sin(gathered @ weight), dim, dist.group.WORLD, "t")
    (y * (rank + 1)).sum().backward()
    whole, all_weights = x.clone().requires_grad_(), weights.clone().requires_grad_()
    wanted = sum(torch.sin(whole @ w) for w in all_weights)
    sum((part * (r + 1)).sum() for r, part in enumerate(wanted.chunk(n, dim))).backward()
    close(y, wanted.chunk(n, dim)[rank], 1e-12, "output")
    close(piece.grad, whole.grad.chunk(n, dim)[rank], 1e-12, "input gradient")
    close(weight.grad, all_weights.grad[rank], 1e-12, "weight gradient")


@on_ranks
@pytest.mark.parametrize("dim", [0, 1])
def test_take_then_join(n, dim):
    """Work on a piece of something whole, joined again: output and gradient are those of the undivided work."""
    x = draw(3 * n, 2 * n, seed=6).requires_grad_()
    factor = draw(3 * n, 2 * n, seed=7)
    piece = collectives.take_piece(x, dim, dist.group.WORLD, "t")
    y = collectives.join_pieces(piece.exp() * factor.chunk(n, dim)[dist.get_rank()], dim, dist.group.WORLD, "t")
    y.square().sum().backward()
    found = x.grad.clone()
    x.grad = None
    wanted = x.exp() * factor
    wanted.square().sum().backward()
    close(y, wanted, 1e-12, "output")
    close(found, x.grad, 1e-10, "gradient")


@on_ranks
def test_all_to_all(n):
    """Unequal runs reach the right rank in rank order, and their gradients come back to the rows they left."""
    rank, counts = dist.get_rank(), [[(3 * a + 2 * b) % 4 for b in range(n)] for a in range(n)]  # counts[from][to]
    sent = [[draw(counts[a][b], 2, seed=10 * a + b) for b in range(n)] for a in range(n)]
    rows = torch.cat(sent[rank]).requires_grad_()
    incoming = [counts[a][rank] for a in range(n)]
    received = collectives.all_to_all(rows, counts[rank], incoming, dist.group.WORLD, "t")
    close(received, torch.cat([sent[a][rank] for a in range(n)]), 0, "received rows")
    (received.square() * (rank + 1)).sum().backward()
    wanted = torch.cat([2 * sent[rank][b] * (b + 1) for b in range(n)])
    close(rows.grad, wanted, 1e-12, "gradient")


@on_ranks
def test_sums_and_maxima(n):
    """Plain sums and maxima over ranks, and bfloat16 sums that are rounded once."""
    parts = draw(n, 6, seed=8)
    close(collectives.sum_ranks(parts[dist.get_rank()], dist.group.WORLD, "t"), parts.sum(0), 1e-12, "sum")
    close(collectives.max_ranks(parts[dist.get_rank()], dist.group.WORLD, "t"), parts.amax(0), 0, "maximum")
    half = parts.bfloat16()
    found = collectives.sum_ranks(half[dist.get_rank()], dist.group.WORLD, "t")
    assert torch.equal(found, half.float().sum(0).bfloat16())


@on_ranks
def test_traffic(n):
    """What is counted is what this rank sends to others, forward and backward, under the backend's own name."""
    x = draw(n, 8, seed=9).requires_grad_()
    with collectives.count() as moves:
        collectives.gather_pieces(x, 0, dist.group.WORLD, "here").sum().backward()
    backend = dist.get_backend()
    sent = (n - 1) * n * 8 * 8
    assert [(m.path, m.tag, m.backward, m.size_bytes) for m in moves] == [
        (f"{backend}.all_gather", "here", False, sent), (f"{backend}.reduce_scatter", "here", True, sent)
    ]  # fmt: skip
