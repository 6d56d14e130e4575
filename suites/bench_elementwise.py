"""What bytes alone should bound: the mix over depth, SiTU, the loss, MXFP4. Peers: torch, eager and compiled."""

from itertools import cycle

import pytest
import torch

from k3.ops import mxfp4
from k3.ops.attnres import attnres_mix
from k3.ops.cross_entropy import cross_entropy
from k3.ops.situ import situ
from suites.gpu_common import ratio
from suites.timing import DEVICE, ON_GPU, race, timed  # noqa: F401

pytestmark = timed
TOKENS, D, F = (8192, 7168, 6144) if ON_GPU else (64, 128, 96)
DTYPE = torch.bfloat16 if ON_GPU else torch.float32
DTYPE_NAME = str(DTYPE).removeprefix("torch.")
AGREES = 5e-3


def randn(*shape) -> torch.Tensor:
    return torch.randn(*shape, device=DEVICE).to(DTYPE)


def over(function, sets):
    """A call that takes the next input set each time."""
    inputs = cycle(sets)
    return lambda: function(*next(inputs))


def backward_of(function, sets):
    """Backward alone: graphs are built once and kept, so one call is one pass of gradients."""
    built = []
    torch.manual_seed(11)  # every form receives the same gradient
    for inputs in sets:
        inputs = [x.requires_grad_() for x in inputs]
        out = function(*inputs)
        built.append((out, inputs, torch.randn_like(out)))
    return over(lambda out, inputs, grad: torch.autograd.grad(out, inputs, grad, retain_graph=True), built)


def mix(backend: str):
    return lambda *x: attnres_mix(x[:-2], x[-2], x[-1], 1e-5, backend=backend)


def mix_sets(count: int) -> list[tuple[torch.Tensor, ...]]:
    torch.manual_seed(count)
    return [(*(randn(1, TOKENS, D) for _ in range(count)), 1 + 0.1 * randn(D), 0.02 * randn(1, D)) for _ in range(2)]


def mix_contenders(count: int) -> dict:
    """Our kernel, the definition, at 9 sources a compiler's; fla's tunes itself for minutes and is left out."""
    if not ON_GPU:
        return {"torch.attnres": mix("torch"), "torch, eager": mix("torch")}
    found = {"triton.attnres": mix("triton"), "torch, eager": mix("torch")}
    return found | ({"torch.compile": torch.compile(mix("torch"), dynamic=False)} if count == 9 else {})


@pytest.mark.parametrize("count", [2, 5, 9])
def test_attnres_forward(race, count):  # noqa: F811
    """The mix forward; the floor reads every source once and writes one."""
    sets, forms = mix_sets(count), mix_contenders(count)
    with torch.no_grad():
        wanted = mix("torch")(*sets[0])
        assert all(ratio(form(*sets[0]), wanted) < AGREES for form in forms.values())
        contenders = {label: over(form, sets) for label, form in forms.items()}
        shape = f"sources={count} T={TOKENS} D={D}"
        race(contenders, shape=shape, dtype=DTYPE_NAME, rounds=20, floor_bytes=(count + 1) * sets[0][0].nbytes)


@pytest.mark.parametrize("count", [2, 5, 9])
def test_attnres_backward(race, count):  # noqa: F811
    """The mix backward; the floor reads sources and output gradient once and writes every source's gradient."""
    forms = {label: form for label, form in mix_contenders(count).items() if label != "torch.compile"}
    contenders = {label: backward_of(form, mix_sets(count)) for label, form in forms.items()}
    first = next(iter(contenders.values()))()
    wanted = contenders["torch, eager"]()
    assert all(ratio(a, b) < 2e-2 for a, b in zip(first, wanted, strict=True))
    shape, size = f"sources={count} T={TOKENS} D={D}", first[0].nbytes
    race(contenders, shape=shape, dtype=DTYPE_NAME, rounds=20, floor_bytes=(2 * count + 1) * size)


def situ_in(backend: str):
    return lambda gate, up: situ(gate, up, 4.0, 25.0, backend=backend)


def situ_forms() -> dict:
    plain = situ_in("torch")
    if not ON_GPU:
        return {"torch.situ": plain}
    compiled = torch.compile(plain, dynamic=False)
    return {"triton.situ": situ_in("triton"), "torch, eager": plain, "torch.compile": compiled}


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_situ(race, direction):  # noqa: F811
    """SiTU of the shared experts' width; the floor touches three tensors forward and five backward."""
    torch.manual_seed(1)
    sets, forms = [(2 * randn(4 * TOKENS, F), 9 * randn(4 * TOKENS, F)) for _ in range(2)], situ_forms()
    wanted = situ_in("torch")(*sets[0])
    assert all(ratio(form(*sets[0]), wanted) < AGREES for form in forms.values())
    shape, size = f"{4 * TOKENS} x {F}", sets[0][0].nbytes
    if direction == "forward":
        with torch.no_grad():
            contenders = {label: over(form, sets) for label, form in forms.items()}
            race(contenders, shape=shape, dtype=DTYPE_NAME, floor_bytes=3 * size)
    else:
        contenders = {label: backward_of(form, sets) for label, form in forms.items()}
        race(contenders, shape=shape, dtype=DTYPE_NAME, floor_bytes=5 * size)


def test_cross_entropy(race):  # noqa: F811
    """The loss over the whole vocabulary and its gradient; the floor reads the logits twice and writes theirs."""
    torch.manual_seed(3)
    tokens, vocab = (TOKENS, 163840) if ON_GPU else (TOKENS, 1000)
    sets = [(randn(tokens, vocab).requires_grad_(), torch.randint(vocab, (tokens,), device=DEVICE)) for _ in range(2)]

    def step(backend):
        def call(logits, labels):
            return torch.autograd.grad(cross_entropy(logits, labels, backend=backend).mean(), logits)[0]

        return over(call, sets)

    kernel = "fla" if ON_GPU else "torch"
    assert ratio(step(kernel)(), step("torch")()) < AGREES
    contenders = {f"{kernel}.cross_entropy": step(kernel), "torch, eager": step("torch")}
    race(contenders, shape=f"{tokens} x {vocab}", dtype=DTYPE_NAME, rounds=8, floor_bytes=3 * sets[0][0].nbytes)


@pytest.mark.parametrize("direction", ["unpack", "pack"])
def test_mxfp4(race, direction):  # noqa: F811
    """MXFP4 of one layer's experts' worth of weights; the floor is packed, scale and bfloat16 bytes once."""
    torch.manual_seed(2)
    rows = 32 * 3072 if ON_GPU else 64
    weights = [torch.randn(rows, 3584, device=DEVICE, dtype=torch.bfloat16) for _ in range(2)]
    packed = [mxfp4.pack(weight) for weight in weights]
    assert torch.equal(mxfp4.unpack(*packed[0]), mxfp4.unpack(*packed[0], backend="torch"))
    sets = packed if direction == "unpack" else [(weight,) for weight in weights]
    run = mxfp4.unpack if direction == "unpack" else mxfp4.pack
    kernel = "triton" if ON_GPU else "torch"
    contenders = {f"{kernel}.mxfp4_{direction}": over(lambda *x: run(*x, backend=kernel), sets)}
    if ON_GPU:
        contenders["torch"] = over(lambda *x: run(*x, backend="torch"), sets)
    moved = weights[0].nbytes + packed[0][0].nbytes + packed[0][1].nbytes
    race(contenders, shape=f"{rows} x 3584", dtype="bfloat16", rounds=10, floor_bytes=moved)
