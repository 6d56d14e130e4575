"""KDA as an operation: the chunked form against the definition, states, documents, and what must not change."""

import pytest
import torch

from k3.kda import KDAState, kda_core
from k3.ops.kda import kda
from k3.ops.short_conv import short_conv
from k3.paths import listen
from tests.k3.support import lively, tiny

B, H, K, V = 2, 3, 8, 5
DECAYS = {"slow": -12.0, "middle": -2.0, "fast": 4.0}
NAMES = ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "initial_state")


def draw(length, decay="middle", dtype=torch.float64):
    """Inputs with per-head gates that differ; keys point one way, which makes an inverse ill-conditioned."""
    rng = torch.Generator().manual_seed(length)

    def normal(*shape):
        return torch.randn(*shape, generator=rng, dtype=torch.float64)

    x = {"q": normal(B, length, H, K), "k": normal(B, length, H, K) + 2, "v": normal(B, length, H, V)}
    x |= {"g": normal(B, length, H, K), "beta": 0.8 + 0.2 * torch.rand(B, length, H, generator=rng).double()}
    x |= {"A_log": torch.tensor([0.0, 0.3, -0.4]).double(), "dt_bias": DECAYS[decay] + 0.1 * normal(H * K)}
    x["initial_state"] = normal(B, H, K, V)
    return {name: x[name].to(dtype).requires_grad_() for name in NAMES}


def run(x, backend, **options):
    """Output and final state."""
    return kda(**x, lower_bound=-5.0, output_final_state=True, backend=backend, **options)


def gradients(x, backend):
    """Output, final state and the gradient of every input."""
    o, state = run(x, backend)
    weight = torch.linspace(-1, 1, o.numel(), dtype=o.dtype).view_as(o)
    loss = (o * weight).sum() + state.square().sum()
    return [o.detach(), state.detach(), *torch.autograd.grad(loss, list(x.values()))]


@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("length", [1, 15, 16, 63, 130])
def test_chunked_equals_recurrence(length, decay):
    """In float64 outputs, states and all gradients agree to rounding, whatever the length and the decay."""
    x = draw(length, decay)
    found, wanted = gradients(x, "torch_chunk"), gradients(x, "torch_recurrent")
    for name, a, b in zip(("o", "state", *NAMES), found, wanted, strict=True):
        assert (a - b).norm() <= 1e-12 * b.norm(), name


@pytest.mark.parametrize("decay", DECAYS)
def test_float32_is_safe(decay):
    """In float32 neither slow nor fast decay costs accuracy, forward or backward: 2e-5 of the float64 recurrence.

    A power series of the inverse fails the slow case, a decay taken against the chunk's start the fast one.
    """
    wanted = gradients(draw(1000, decay), "torch_recurrent")
    found = gradients(draw(1000, decay, torch.float32), "torch_chunk")
    for name, a, b in zip(("o", "state", *NAMES), found, wanted, strict=True):
        assert (a.double() - b).norm() <= 2e-5 * b.norm(), name


@pytest.mark.parametrize("backend", ["torch_recurrent", "torch_chunk"])
def test_gradcheck(backend):
    """Gradients are those of finite differences, through initial and final state."""
    x = {k: t.detach()[:1].requires_grad_() if t.ndim > 2 else t for k, t in draw(3).items()}
    assert torch.autograd.gradcheck(lambda *t: run(dict(zip(NAMES, t, strict=True)), backend), tuple(x.values()))


def test_wrong_states_are_refused():
    """States for another number of sequences, and packed rows in a batch, do not broadcast: they are refused."""
    x = draw(4)
    with pytest.raises(ValueError, match=r"initial_state \(1, 3, 8, 5\) must be \(2, 3, 8, 5\)"):
        run(x | {"initial_state": x["initial_state"][:1]}, "torch_chunk")
    with pytest.raises(ValueError, match="one row"):
        run(x, "torch_recurrent", cu_seqlens=torch.tensor([0, 4]))


@pytest.mark.parametrize("first", ["torch_recurrent", "torch_chunk"])
def test_continuation_equals_one_pass(first):
    """Two calls joined by the state give what one call gives, also across the two forms."""
    x = draw(50)
    whole, state = run(x, "torch_recurrent")
    head, tail = (
        {k: t[:, s] if t.ndim > 2 and k != "initial_state" else t for k, t in x.items()}
        for s in (slice(37), slice(37, 50))
    )
    o1, middle = run(head, first)
    o2, end = run(tail | {"initial_state": middle}, "torch_chunk")
    torch.testing.assert_close(torch.cat([o1, o2], 1), whole, atol=1e-12, rtol=0)
    torch.testing.assert_close(end, state, atol=1e-12, rtol=0)


@pytest.mark.parametrize("backend", ["torch_recurrent", "torch_chunk"])
def test_documents_do_not_mix(backend):
    """Packed documents, an empty one among them, give their own outputs and final states."""
    x, bounds = draw(40), [0, 17, 17, 18, 40]
    row = {k: t[:1] if t.ndim > 2 else t for k, t in x.items()}
    starts = torch.randn(4, H, K, V, dtype=torch.float64)
    o, states = run(row | {"initial_state": starts}, backend, cu_seqlens=torch.tensor(bounds))
    for i, (a, b) in enumerate(zip(bounds, bounds[1:], strict=False)):
        if a == b:
            assert torch.equal(states[i], starts[i])
            continue
        alone = {k: t[:, a:b] if t.ndim > 2 else t for k, t in row.items()} | {"initial_state": starts[i : i + 1]}
        wanted, state = run(alone, "torch_recurrent")
        torch.testing.assert_close(o[:, a:b], wanted, atol=1e-12, rtol=0)
        torch.testing.assert_close(states[i : i + 1], state, atol=1e-12, rtol=0)


def test_backends_are_announced_and_named():
    """Each dispatch says which form ran; an unknown backend is refused with the known ones."""
    heard = []
    with listen(heard.append):
        for backend, length in (("torch_chunk", 4), ("torch_recurrent", 4), ("auto", 64), ("auto", 65)):
            run(draw(length), backend)
    assert heard == ["torch.kda_chunk", "torch.kda_recurrent", "torch.kda_recurrent", "torch.kda_chunk"]
    with pytest.raises(ValueError, match="'warp' is unknown.*torch_chunk"):
        run(draw(4), "warp")


def test_convolution_against_torch():
    """The short convolution is torch's own depthwise conv1d with left zeros, then silu; taps in file order."""
    x, w = torch.randn(2, 9, 6).double(), torch.randn(6, 1, 4, dtype=torch.float64)
    wanted = torch.nn.functional.conv1d(torch.nn.functional.pad(x.mT, (3, 0)), w, groups=6).mT
    torch.testing.assert_close(short_conv(x, w), torch.nn.functional.silu(wanted))


def test_core_continues_across_calls():
    """Histories and state carry the core over a cut shorter than the taps, with packed documents after it."""
    layer = lively(tiny(kda_short_conv_kernel_size=4)).decoder.layers["0"].self_attn
    x = torch.randn(1, 12, 16, dtype=torch.float64)
    q, k, v = layer.q_proj(x), layer.k_proj(x), layer.v_proj(x)
    z, beta, options = layer.f_b_proj(layer.f_a_proj(x)), layer.b_proj(x), {"head_dim": 4, "lower_bound": -5.0}
    parts = (q, k, v, z, beta)
    whole, _ = kda_core(*parts, layer.weights(), **options, cu_seqlens=torch.tensor([0, 7, 12]))
    o1, state = kda_core(*(t[:, :2] for t in parts), layer.weights(), **options)
    state = KDAState(*state[:3], torch.cat([state.S, torch.zeros_like(state.S)]))
    o2, _ = kda_core(
        *(t[:, 2:] for t in parts), layer.weights(), **options, state=state, cu_seqlens=torch.tensor([0, 5, 10])
    )
    torch.testing.assert_close(torch.cat([o1, o2], 1), whole, atol=1e-12, rtol=0)
