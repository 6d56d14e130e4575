"""MLA: the latent norms' epsilon, the shared tail, causality, and both forms of attention."""

import pytest
import torch

from k3.ops.attention import attention, visible
from k3.paths import listen
from tests.k3.support import lively, tiny


def draw(length=11, keys=11, dtype=torch.float64):
    """q, k, v of unequal widths [2, *, 3, 6 | 6 | 4]."""
    rng = torch.Generator().manual_seed(0)
    shapes = ((2, length, 3, 6), (2, keys, 3, 6), (2, keys, 3, 4))
    return [torch.randn(*shape, generator=rng, dtype=torch.float64).to(dtype).requires_grad_() for shape in shapes]


@pytest.mark.parametrize("length", [1, 4, 11])
def test_sdpa_equals_eager(length):
    """Outputs and gradients of torch's fused attention are those of the written-out softmax, decode included."""
    q, k, v = draw(length)
    results = []
    for backend in ("torch_eager", "torch_sdpa"):
        o = attention(q, k, v, backend=backend)
        weight = torch.linspace(-1, 1, o.numel(), dtype=o.dtype).view_as(o)
        results.append([o, *torch.autograd.grad((o * weight).sum(), (q, k, v))])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, atol=1e-12, rtol=0)


def test_last_query_is_a_plain_softmax():
    """The last token sees every key with scale 1/sqrt(K), written out here per head."""
    q, k, v = draw()
    found = attention(q, k, v)[1, -1, 2]
    scores = (k[1, :, 2] @ q[1, -1, 2]) / 6**0.5
    torch.testing.assert_close(found, scores.softmax(0) @ v[1, :, 2])


def test_visibility():
    """A query sees no later key and no other document; positions may come in any order."""
    q, k, _ = draw(length=3, keys=5)
    seen = visible(q, k, torch.tensor([4, 0, 3]), torch.tensor([0, 3, 5]))
    wanted = [[0, 0, 0, 1, 1], [1, 0, 0, 0, 0], [0, 0, 0, 1, 0]]
    assert seen.int().tolist() == wanted


@pytest.mark.parametrize("backend", ["torch_eager", "torch_sdpa"])
def test_documents(backend):
    """Packed documents attend within themselves: equal to one call per document, empty ones skipped."""
    q, k, v = (x[:1] for x in draw())
    found = attention(q, k, v, cu_seqlens=torch.tensor([0, 4, 4, 11]), backend=backend)
    parts = [attention(q[:, s], k[:, s], v[:, s]) for s in (slice(0, 4), slice(4, 11))]
    torch.testing.assert_close(found, torch.cat(parts, 1))


def test_bfloat16_rounds_where_the_vendor_does():
    """In bfloat16 the eager form rounds scores, then probabilities, and sums the softmax in float32."""
    q, k, v = (x.detach() for x in draw(dtype=torch.bfloat16))
    scores = torch.einsum("bthk,bshk->bhts", q, k) * 6**-0.5
    assert scores.dtype == torch.bfloat16
    weights = scores.float().masked_fill(~visible(q, k), float("-inf")).softmax(-1).bfloat16()
    assert torch.equal(attention(q, k, v), torch.einsum("bhts,bshv->bthv", weights, v))


def test_latent_epsilon_and_tail():
    """Both latent norms use 1e-6, not rms_norm_eps, and the tail reaches the keys as it is, the same for all heads."""
    layer = lively(tiny(rms_norm_eps=1e-2)).decoder.layers["1"].self_attn
    assert layer.q_a_layernorm.eps == layer.kv_a_layernorm.eps == 1e-6
    latent = torch.randn(1, 5, 8, dtype=torch.float64)
    k, v = layer.expand(latent)
    assert k.shape == (1, 5, 2, 8) and v.shape == (1, 5, 2, 4)
    assert torch.equal(k[..., 4:], latent[:, :, None, 4:].expand(1, 5, 2, 4))


def test_announced():
    """Each dispatch says which form ran, and an unknown one is refused."""
    heard, (q, k, v) = [], draw()
    with listen(heard.append):
        for backend in ("auto", "torch_sdpa"):
            attention(q, k, v, backend=backend)
    assert heard == ["torch.attention_eager", "torch.sdpa"]
    with pytest.raises(ValueError, match="'flash9' is unknown"):
        attention(q, k, v, backend="flash9")
