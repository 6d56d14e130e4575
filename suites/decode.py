"""Decoding through a cache equals the full forward, however the tokens are cut."""

import pytest
import torch

from k3.decode import Cache, generate
from suites import proxies
from suites.goldens import close
from suites.models import build

CUTS = {"one by one": [1] * 23, "prefill then tokens": [17, 1, 1, 1, 1, 1, 1], "uneven": [2, 1, 9, 3, 8]}
LONG = {"past the chunk": [70, 1, 1, 2], "two long pieces": [37, 67]}


def decode(model, ids, cuts):
    """Logits of `ids` [B, T] fed in pieces of these lengths through one cache, and that cache."""
    cache = Cache()
    pieces = [model(piece, cache=cache)["logits"] for piece in ids.split(cuts, dim=1)]
    return torch.cat(pieces, dim=1), cache


@pytest.mark.parametrize("cut", [*CUTS, *LONG])
def test_equals_prefill(cut):
    """In float64 the logits of every position equal the uncut forward's."""
    cuts = (CUTS | LONG)[cut]
    model = build(proxies.ODD, proxies.odd(), torch.float64)
    ids, _ = proxies.tokens(sum(cuts))
    close(decode(model, ids, cuts)[0], model(ids)["logits"], 1e-9, cut)


@pytest.mark.parametrize("cut", CUTS)
def test_states_equal_prefill(cut):
    """What is remembered after the last token is the same as after one pass: histories, states, latents."""
    model = build(proxies.ODD, proxies.odd(), torch.float64)
    ids, _ = proxies.tokens(23)
    (_, found), (_, wanted) = decode(model, ids, CUTS[cut]), decode(model, ids, [23])
    assert found.kda.keys() == wanted.kda.keys() and found.mla.keys() == wanted.mla.keys()
    for i, state in wanted.kda.items():
        for name, value in state._asdict().items():
            close(getattr(found.kda[i], name), value, 1e-9, f"layer {i} {name}")
    for i, latent in wanted.mla.items():
        close(found.mla[i], latent, 1e-9, f"layer {i} latent")


def test_histories_are_raw_inputs():
    """The cache holds the last taps-1 projections before the convolution, and nothing of the residual bank."""
    model = build(proxies.ODD, proxies.odd(), torch.float64)
    ids, _ = proxies.tokens(9)
    _, cache = decode(model, ids, [9])
    assert set(vars(cache)) == {"kda", "mla"}
    taps = proxies.ODD_TEXT["linear_attn_config"]["short_conv_kernel_size"]
    assert all(x.shape == (2, taps - 1, 30) for state in cache.kda.values() for x in state[:3])
    assert all(latent.shape == (2, 9, 7 + 3) for latent in cache.mla.values())


def test_bfloat16_states():
    """In bfloat16 histories and latents keep the activation dtype and S stays float32."""
    model = build(proxies.ODD, proxies.odd(), torch.bfloat16)
    _, cache = decode(model, proxies.tokens(7)[0], [4, 3])
    for state in cache.kda.values():
        assert {x.dtype for x in state[:3]} == {torch.bfloat16} and state.S.dtype == torch.float32
    assert {latent.dtype for latent in cache.mla.values()} == {torch.bfloat16}


def test_generate():
    """Greedy generation gives the tokens that repeated full forwards give."""
    model = build(proxies.ODD, proxies.odd(), torch.float64)
    ids, _ = proxies.tokens(5)
    wanted = ids
    for _ in range(6):
        wanted = torch.cat([wanted, model(wanted)["logits"][:, -1:].argmax(-1)], dim=1)
    assert torch.equal(generate(model, ids, 6), wanted)
