"""The delta rule as an operation against the oracle's: both evaluations, states, packed documents, gradients.

Odd lengths around the chunk, heads whose decay, norm and key width differ, and slow decay, which breaks inexact
inverses of the chunk's triangular system.
"""

import pytest
import torch

from k3.ops.kda import kda
from suites import oracle
from suites.goldens import close, relative

BACKENDS = ["torch_recurrent", "torch_chunk"]
HEADS, K, V, BOUND = 3, 5, 7, -4.0
TIGHT = 1e-9  # float64


def draw(length: int, batch: int = 2, seed: int = 1):
    """Raw q, k, gate, v, beta logits and per-head gate parameters; head 0 forgets fast, head 2 hardly at all."""
    generator = torch.Generator().manual_seed(seed + length)

    def normal(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    shift = torch.tensor([2.0, -2.0, -9.0], dtype=torch.float64).repeat_interleave(K)
    return {
        "q": normal(batch, length, HEADS, K), "k": 3 * normal(batch, length, HEADS, K),
        "v": normal(batch, length, HEADS, V), "g": normal(batch, length, HEADS, K),
        "beta": normal(batch, length, HEADS).sigmoid(), "A_log": torch.tensor([0.3, -0.4, 0.1], dtype=torch.float64),
        "dt_bias": shift + 0.2 * normal(HEADS * K),
    }  # fmt: skip


def expected(x, state=None):
    """The same by the oracle: gate, norms and one token after another."""
    speed = x["A_log"].exp().unsqueeze(-1)
    log_decay = BOUND * torch.sigmoid(speed * (x["g"] + x["dt_bias"].view(HEADS, K)))
    q, k = oracle.l2_norm(x["q"]) * K**-0.5, oracle.l2_norm(x["k"])
    return oracle.delta_rule(q, k, x["v"], log_decay, x["beta"], state)


def run(x, backend, **options):
    tensors = {name: x[name] for name in ("A_log", "dt_bias")}
    return kda(
        x["q"], x["k"], x["v"], x["g"], x["beta"], **tensors, lower_bound=BOUND, output_final_state=True,
        backend=backend, **options,
    )  # fmt: skip


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("length", [1, 15, 16, 17, 63, 100])
def test_outputs_and_state(backend, length):
    """Outputs and final state from an empty state equal the token-by-token equations."""
    x = draw(length)
    outputs, state = run(x, backend)
    wanted_outputs, wanted_state = expected(x)
    close(outputs, wanted_outputs, TIGHT, "outputs")
    close(state, wanted_state, TIGHT, "state")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("length", [1, 33])
def test_initial_state(backend, length):
    """A given state is decayed, read and updated like one the sequence built itself."""
    x = draw(length)
    start = torch.randn(2, HEADS, K, V, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    outputs, state = run(x, backend, initial_state=start)
    wanted_outputs, wanted_state = expected(x, start)
    close(outputs, wanted_outputs, TIGHT, "outputs")
    close(state, wanted_state, TIGHT, "state")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("length", [19, 63])
def test_gradients(backend, length):
    """Gradients of every argument, the initial state's among them, equal autograd on the equations."""
    x = {name: tensor.requires_grad_() for name, tensor in draw(length).items()}
    start = torch.randn(2, HEADS, K, V, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    x["start"] = start.requires_grad_()
    gradients = []
    for outputs, state in (run(x, backend, initial_state=x["start"]), expected(x, x["start"])):
        value = (outputs * torch.linspace(-1, 1, V, dtype=torch.float64)).sum() + state.square().sum()
        gradients.append(dict(zip(x, torch.autograd.grad(value, list(x.values())), strict=True)))
    for name, wanted in gradients[1].items():
        relative(gradients[0][name], wanted, 1e-8, name)


@pytest.mark.parametrize("backend", BACKENDS)
def test_packed_documents(backend):
    """Every packed document starts from its own state and ends with its own, an empty one included."""
    bounds = [0, 5, 5, 23, 60]
    x = draw(bounds[-1], batch=1)
    start = torch.randn(len(bounds) - 1, HEADS, K, V, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    outputs, states = run(x, backend, cu_seqlens=torch.tensor(bounds, dtype=torch.int32), initial_state=start)
    for i, (a, b) in enumerate(zip(bounds, bounds[1:], strict=False)):
        part = {n: t if n in ("A_log", "dt_bias") else t[:, a:b] for n, t in x.items()}
        if a == b:
            close(states[i], start[i], 0, "state of an empty document")
            continue
        wanted_outputs, wanted_state = expected(part, start[i : i + 1])
        close(outputs[:, a:b], wanted_outputs, TIGHT, f"document {i}")
        close(states[i : i + 1], wanted_state, TIGHT, f"state {i}")


@pytest.mark.parametrize("length", [64, 200])
def test_float32_chunks(length):
    """In float32 the chunks lose no more than the recurrence itself under decay from e^-4 to almost none."""
    x = {name: tensor.float() for name, tensor in draw(length).items()}
    outputs, state = run(x, "torch_chunk")
    wanted_outputs, wanted_state = expected({name: tensor.double() for name, tensor in x.items()})
    assert outputs.dtype == state.dtype == torch.float32
    relative(outputs, wanted_outputs, 2e-5, "outputs")
    relative(state, wanted_state, 2e-5, "state")
