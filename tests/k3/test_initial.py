"""Initial values: which blocks a rank draws, and that a seed gives one model whatever was drawn before."""

import torch

from k3 import K3Model
from k3.initial import blocks
from tests.k3.support import tiny


def test_blocks_cover_a_slice():
    """Of a matrix a block is 1024 rows, of stacked experts one; those that meet the slice are visited, once."""
    assert list(blocks((3000, 8), slice(1500, 3000))) == [(1024, 2048), (2048, 3000)]
    assert list(blocks((4, 6, 8), slice(2, 4))) == [(2, 3), (3, 4)]
    assert list(blocks((48, 1, 4), slice(24, 48))) == [(0, 48)]


def test_a_seed_is_a_model():
    """The same seed gives the same bits; torch's generator gives a new model each time, and the same after its seed."""
    first, second = K3Model(tiny()), K3Model(tiny())
    assert not torch.equal(first.decoder.embed_tokens.weight, second.decoder.embed_tokens.weight)
    for model in (first, second):
        model.reset_parameters(7)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
    torch.manual_seed(1)
    again = [K3Model(tiny()).state_dict(), torch.manual_seed(1) and K3Model(tiny()).state_dict()]
    assert all(torch.equal(again[0][name], again[1][name]) for name in again[0])
