"""Decoding with a cache equals the full forward, however the tokens are cut."""

import pytest
import torch

from k3.decode import Cache, generate
from k3.sequence import SequenceLayout
from tests.k3.support import ids, lively, tiny

MIXED = {
    "num_hidden_layers": 5,
    "full_attention_layers": (2, 4),
    "kda_layers": (1, 3, 5),
    "kda_short_conv_kernel_size": 4,
}


@pytest.mark.parametrize("cuts", [[1] * 9, [6, 1, 1, 1], [2, 1, 6], [70, 1, 2], [1, 66, 6]])
def test_equals_full_forward(cuts):
    """Every cut gives the logits of one pass in float64: pieces shorter than the taps, and longer than a chunk."""
    model, x, cache = lively(tiny(**MIXED)), ids(2, sum(cuts)), Cache()
    found = torch.cat([model(piece, cache=cache)["logits"] for piece in x.split(cuts, dim=1)], dim=1)
    torch.testing.assert_close(found, model(x)["logits"], atol=1e-11, rtol=0)


def test_cache_contents():
    """Per layer: the last taps-1 raw projections and a float32 state, or latents with tails; nothing of the bank."""
    model, cache = lively(tiny(**MIXED), torch.bfloat16), Cache()
    model(ids(2, 5), cache=cache)
    assert sorted(cache.kda) == [0, 2, 4] and sorted(cache.mla) == [1, 3]
    *histories, S = cache.kda[2]
    assert [h.shape for h in histories] == [(2, 3, 8)] * 3 and {h.dtype for h in histories} == {torch.bfloat16}
    assert S.shape == (2, 2, 4, 4) and S.dtype == torch.float32
    assert {h.untyped_storage().nbytes() for h in histories} == {2 * 3 * 8 * 2}  # copies: a long prefill is let go
    assert cache.mla[1].shape == (2, 5, 8) and cache.mla[1].dtype == torch.bfloat16


def test_generate():
    """Greedy generation through the cache is greedy generation without it."""
    model, x = lively(tiny(**MIXED)), ids(2, 3)
    wanted = x
    for _ in range(8):
        wanted = torch.cat([wanted, model(wanted)["logits"][:, -1:].argmax(-1)], dim=1)
    assert torch.equal(generate(model, x, 8), wanted)


def test_documents_are_refused():
    """A cache cannot follow packed documents, and says what to do instead."""
    layout = SequenceLayout(cu_seqlens=torch.tensor([0, 2, 4], dtype=torch.int32))
    with pytest.raises(NotImplementedError, match="batch of rows"):
        lively(tiny())(ids(1, 4), layout=layout, cache=Cache())
