"""KDA on a GPU: fla's kernels at the public width against the token-by-token rule in float64.

All 96 heads run, each with its own gate; three are compared, since heads are independent. Head 0 forgets fast, most
heads slowly, as in the released model. Limits: operands are bfloat16, whose products err by 1e-3 to 1e-2 in L2; the
known wrong kernels (head 0's gate for all heads, a gate gradient short of a factor) are off by 1e-1 or more.
"""

import pytest
import torch

from k3.ops.kda import kda, l2_normalize, log_decay
from k3.ops.kda_naive import recurrent
from suites.gpu_common import Draw, exact_float32, gradients, leaves, on_gpu, paired, within  # noqa: F401

pytestmark = on_gpu
H, K, BOUND, HEADS = 96, 128, -5.0, [0, 41, 95]
FORWARD, BACKWARD = 1e-2, 3e-2
LENGTHS = [4096, 32768, 1000, 65, 64, 63, 2, 1]  # a long one first: whatever is not tuned yet tunes itself there
DOCUMENTS = [1, 2, 3, 63, 1, 64, 65, 3, 2, 796]
LIMITS = {"o": FORWARD, "state": FORWARD} | {
    f"d{name}": BACKWARD for name in ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "start")
}


def draw(length: int, documents: int = 1, extreme: bool = False) -> dict[str, torch.Tensor]:
    """Inputs [1, T, 96, 128]; per head another rate and shift, at the ends of the gate where `extreme`."""
    make = Draw(length + 7 * documents)
    shift = torch.tensor([2.0, -6.0, -9.0, -3.0], device="cuda").repeat(H // 4)
    rate = make.normal(H, scale=0.4, dtype=torch.float32) + (3.0 if extreme else 0.0)
    noise = make.normal(H, K, scale=3.0 if extreme else 0.3, dtype=torch.float32)
    return {
        "q": make.normal(1, length, H, K), "k": make.normal(1, length, H, K, scale=2.0),
        "v": make.normal(1, length, H, K), "g": make.normal(1, length, H, K),
        "beta": make.normal(1, length, H, scale=2.0, dtype=torch.float32).sigmoid(), "A_log": rate,
        "dt_bias": (shift[:, None] + noise).flatten(), "start": make.normal(documents, H, K, K, dtype=torch.float32),
    }  # fmt: skip


def run(x: dict[str, torch.Tensor], backend: str = "fla_chunk", bounds: list[int] | None = None):
    cu_seqlens = None if bounds is None else torch.tensor(bounds, device="cuda", dtype=torch.int32)
    tensors = [x[name] for name in ("q", "k", "v", "g", "beta")]
    gate = {"A_log": x["A_log"], "dt_bias": x["dt_bias"], "lower_bound": BOUND}
    state = {"initial_state": x["start"], "output_final_state": True}
    return kda(*tensors, **gate, **state, cu_seqlens=cu_seqlens, backend=backend)


def some_heads(x: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Float64 leaves of the compared heads, dt_bias as [heads, K]."""
    per_head = {"A_log": x["A_log"][HEADS], "dt_bias": x["dt_bias"].view(H, K)[HEADS], "start": x["start"][:, HEADS]}
    return leaves({name: x[name][0][:, HEADS] for name in ("q", "k", "v", "g", "beta")} | per_head, torch.float64)


def expected(y: dict[str, torch.Tensor], bounds: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """o [T, heads, V] and states [N, heads, K, V] of float64 leaves `y`, one document after another."""
    from suites.kda_by_token import delta_rule

    decay = log_decay(y["g"], y["A_log"], y["dt_bias"].flatten(), BOUND)
    tensors = (l2_normalize(y["q"]) * K**-0.5, l2_normalize(y["k"]), y["v"], decay, y["beta"])
    spans = list(zip(bounds, bounds[1:], strict=False))
    done = [delta_rule(*(t[a:b] for t in tensors), y["start"][i]) for i, (a, b) in enumerate(spans)]
    return torch.cat([o for o, _ in done]), torch.stack([state for _, state in done])


def compare(x: dict[str, torch.Tensor], bounds: list[int] | None = None) -> None:
    """Outputs, states and all gradients of the chunked kernels against `expected` on the compared heads."""
    make, whole = Draw(99), bounds or [0, x["q"].shape[1]]
    x, y = leaves(x), some_heads(x)
    o, state = run(x, bounds=bounds)
    do, dstate = make.normal(*o.shape), make.normal(*state.shape, dtype=torch.float32)
    found = {"o": o[0][:, HEADS], "state": state[:, HEADS]} | gradients((o, state), x, (do, dstate))
    for name in ("q", "k", "v", "g", "beta"):
        found[f"d{name}"] = found[f"d{name}"][0][:, HEADS]
    found["dA_log"], found["dstart"] = found["dA_log"][HEADS], found["dstart"][:, HEADS]
    found["ddt_bias"] = found["ddt_bias"].view(H, K)[HEADS]
    wanted_o, wanted_state = expected(y, whole)
    upstream = (do[0][:, HEADS].double(), dstate[:, HEADS].double())
    wanted = {"o": wanted_o, "state": wanted_state} | gradients((wanted_o, wanted_state), y, upstream)
    within(paired(found, wanted), LIMITS)


def test_reference():
    """The float64 rule these tests lean on equals autograd on the product's definition, gradients included."""
    from suites.kda_by_token import delta_rule

    make = Draw(3)
    shapes = {"q": (33, 2, K), "k": (33, 2, K), "v": (33, 2, K), "g": (33, 2, K), "beta": (33, 2), "start": (2, K, K)}
    x = {name: make.normal(*shape, scale=0.3, dtype=torch.float64) for name, shape in shapes.items()}
    x = leaves(x | {"g": -x["g"].abs(), "beta": x["beta"].sigmoid()})
    o, state = delta_rule(*x.values())
    batched = [tensor.unsqueeze(0) for tensor in x.values()]
    wanted_o, wanted_state = recurrent(*batched)
    upstream = (torch.randn_like(o), torch.randn_like(state))
    found = {"o": o, "state": state} | gradients((o, state), x, upstream)
    plain = gradients((wanted_o[0], wanted_state[0]), x, upstream)
    within(paired(found, {"o": wanted_o[0], "state": wanted_state[0]} | plain), 1e-12)


@pytest.mark.parametrize("length", LENGTHS)
def test_chunk(length):
    """Outputs, the final state and every gradient from a given state, around the chunk of 64 and up to 32768 tokens."""
    compare(draw(length))


def test_chunk_at_the_ends_of_the_gate():
    """Gates that saturate at -5 and at 0 keep finite outputs and gradients (0 * inf in the gate's backward)."""
    compare(draw(300, extreme=True))


def test_packed_documents():
    """Documents of 1 to 796 tokens in one row each start from their own state and receive their own gradients."""
    bounds = [0, *torch.tensor(DOCUMENTS).cumsum(0).tolist()]
    compare(draw(bounds[-1], documents=len(DOCUMENTS)), bounds)


@pytest.mark.parametrize("cut", [300, 64, 999])
def test_continuation(cut):
    """A sequence in two pieces, the state handed over, equals the uncut one; the hand-over is the only difference."""
    x = draw(1000)
    whole, last = run(x)
    first = {name: x[name][:, :cut] for name in ("q", "k", "v", "g", "beta")}
    second = {name: x[name][:, cut:] for name in ("q", "k", "v", "g", "beta")}
    o, state = run(x | first)
    rest, state = run(x | second | {"start": state})
    within({"o": (torch.cat([o, rest], dim=1), whole), "state": (state, last)}, FORWARD)


def test_strided_inputs():
    """Views into a fused projection give the very same numbers as their contiguous copies."""
    x = draw(130)
    fused = torch.cat([x[name] for name in "qkvg"], dim=-1)
    views = dict(zip("qkvg", fused.split(K, dim=-1), strict=True))
    assert not views["k"].is_contiguous()
    for found, wanted in zip(run(x | views), run(x), strict=True):
        assert torch.equal(found, wanted)


@pytest.mark.parametrize("length", [65, 2, 1])
def test_recurrent(length):
    """The decode kernel continues a state as the rule does; it keeps the normalised keys in float32."""
    x = draw(length)
    with torch.no_grad():
        o, state = run(x, "fla_recurrent")
        wanted_o, wanted_state = expected(some_heads(x), [0, length])
    pairs = {"o": (o[0][:, HEADS], wanted_o), "state": (state[:, HEADS], wanted_state)}
    within(pairs, {"o": 4e-3, "state": 1e-5})  # one rounding of o; the state never leaves float32


def test_decode_batch():
    """One token for each of 64 sequences with their own states equals 64 separate calls."""
    make, x = Draw(5), draw(1)
    batch = {name: make.normal(64, *x[name].shape[1:]).to(x[name].dtype) for name in ("q", "k", "v", "g")}
    batch["beta"] = x["beta"].expand(64, -1, -1).contiguous()
    batch["start"] = make.normal(64, H, K, K, dtype=torch.float32)
    with torch.no_grad():
        o, state = run(x | batch, "fla_recurrent")
        for i in (0, 31, 63):
            alone, alone_state = run(x | {name: tensor[i : i + 1] for name, tensor in batch.items()}, "fla_recurrent")
            assert torch.equal(o[i], alone[0]) and torch.equal(state[i], alone_state[0])


def test_auto_chooses_the_kernels():
    """On a GPU "auto" takes the chunked kernel to train and the recurrent one to decode, and says so."""
    from k3.paths import listen

    seen = []
    with listen(seen.append):
        run(draw(65), "auto")
        with torch.no_grad():
            run(draw(1), "auto")
    assert seen == ["fla.chunk_kda", "fla.fused_recurrent_kda"]


def test_refuses():
    """A request a kernel cannot serve is an error that names a backend that can; nothing falls back."""
    x = draw(2)
    with pytest.raises(ValueError, match="has no backward; use fla_chunk"):
        run(leaves(x), "fla_recurrent")
    with pytest.raises(ValueError, match="use torch_chunk"):
        run({name: tensor.cpu() for name, tensor in x.items()}, "fla_chunk")
    with pytest.raises(ValueError, match="head dim"):
        run(x | {name: x[name][..., :24] for name in "qkg"} | {"start": x["start"][:, :, :24]}, "fla_chunk")
