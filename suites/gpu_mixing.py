"""Mixing on a GPU: over depth (Attention Residuals) and over time (causal attention with 192-wide keys).

Limits in bfloat16: the depth mix is fp32 inside and rounds once; attention multiplies rounded probabilities, so it is
compared at the 1e-2 that bfloat16 products leave.
"""

import pytest
import torch

from k3.ops.attention import attention
from k3.ops.attnres import attnres_mix
from suites.gpu_common import Draw, exact_float32, gradients, leaves, on_gpu, paired, within  # noqa: F401

pytestmark = on_gpu
D, EPS = 7168, 1e-5
CASES = [("triton", count, tokens) for count in (2, 5, 9) for tokens in (1, 63, 1000)] + [("fla", 5, 63)]


def depth_inputs(count: int, tokens: int) -> dict[str, torch.Tensor]:
    """Sources of different size, and weights that spread the scores so that no source is negligible."""
    make = Draw(count + tokens)
    sources = {f"source{i}": make.normal(1, tokens, D, scale=10.0 ** (i % 4 - 2)) for i in range(count)}
    return sources | {"norm": 1 + make.normal(D, scale=0.2), "proj": make.normal(1, D, scale=0.02)}


def mix(x: dict[str, torch.Tensor], backend: str) -> torch.Tensor:
    sources = [tensor for name, tensor in x.items() if name.startswith("source")]
    return attnres_mix(sources, x["norm"], x["proj"], EPS, backend=backend)


@pytest.mark.parametrize(("backend", "count", "tokens"), CASES)
def test_depth_mix(backend, count, tokens):
    """The mix and the gradients of every source and both weights equal the definition in float64."""
    inputs = depth_inputs(count, tokens)
    x, y = leaves(inputs), leaves(inputs, torch.float64)
    found, wanted = mix(x, backend), mix(y, "torch")
    upstream = Draw(2).normal(*found.shape)
    mine, exact = gradients(found, x, upstream), gradients(wanted, y, upstream.double())
    within({"out": (found, wanted)} | paired(mine, exact), {"out": 2.5e-3} | dict.fromkeys(mine, 5e-3))


def test_sources_are_never_copied():
    """Forward allocates the output and statistics alone, and keeps the sources themselves for backward."""
    x = leaves(depth_inputs(9, 2048))
    mix(x, "triton")  # compiled before memory is watched
    pointers, kept = {tensor.data_ptr() for tensor in x.values()}, []
    pack = lambda tensor: kept.append((tensor.numel(), tensor.data_ptr())) or tensor  # noqa: E731
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = mix(x, "triton")
    peak = torch.cuda.max_memory_allocated() - before
    large = [pointer for size, pointer in kept if size >= 2048 * D]
    assert len(large) == 9 and set(large) <= pointers
    assert peak < 1.1 * out.nbytes, f"{peak} bytes at the peak for an output of {out.nbytes}"


def test_depth_mix_refuses():
    """A strided source would be copied, so the kernels refuse it by its index."""
    x = depth_inputs(3, 8)
    x["source1"] = torch.cat([x["source1"], x["source1"]], dim=-1)[..., :D]
    with pytest.raises(ValueError, match=r"sources \[1\] are strided"):
        mix(x, "triton")


def attention_inputs(queries: int, keys: int, heads: int = 96) -> dict[str, torch.Tensor]:
    make = Draw(queries + keys)
    return {
        "q": make.normal(1, queries, heads, 192), "k": make.normal(1, keys, heads, 192),
        "v": make.normal(1, keys, heads, 128),
    }  # fmt: skip


def compare_attention(inputs: dict[str, torch.Tensor], cu_seqlens=None) -> None:
    """Output and gradients of cuDNN's kernel against eager attention in float64."""
    x, y = leaves(inputs), leaves(inputs, torch.float64)
    found = attention(**x, cu_seqlens=cu_seqlens, backend="cudnn")
    wanted = attention(**y, cu_seqlens=cu_seqlens, backend="torch_eager")
    upstream = Draw(6).normal(*found.shape)
    mine, exact = gradients(found, x, upstream), gradients(wanted, y, upstream.double())
    within({"out": (found, wanted)} | paired(mine, exact), {"out": 5e-3} | dict.fromkeys(mine, 1.5e-2))


@pytest.mark.parametrize("tokens", [2, 63, 64, 65, 1000])
def test_attention(tokens):
    """Causal attention of 96 heads, 192 wide in the keys and 128 in the values, with all gradients."""
    compare_attention(attention_inputs(tokens, tokens))


def test_attention_long():
    """The same over 4096 tokens, on four heads."""
    compare_attention(attention_inputs(4096, 4096, heads=4))


def test_attention_of_documents():
    """No document of 1 to 500 tokens sees another, forward or backward."""
    bounds = [0, 2, 5, 68, 69, 132, 197, 697]
    inputs = attention_inputs(697, 697, heads=8)
    x, y = leaves(inputs), leaves(inputs, torch.float64)
    found = attention(**x, cu_seqlens=torch.tensor(bounds, device="cuda", dtype=torch.int32), backend="cudnn")
    spans = [slice(*pair) for pair in zip(bounds, bounds[1:], strict=False)]
    alone = [attention(**{name: t[:, span] for name, t in y.items()}, backend="torch_eager") for span in spans]
    wanted, upstream = torch.cat(alone, dim=1), Draw(6).normal(*found.shape)
    mine, exact = gradients(found, x, upstream), gradients(wanted, y, upstream.double())
    within({"out": (found, wanted)} | paired(mine, exact), {"out": 5e-3} | dict.fromkeys(mine, 1.5e-2))


@pytest.mark.parametrize("keys", [1, 2, 1000])
def test_attention_of_one_query(keys):
    """In decoding the one query is the last position and sees every key."""
    with torch.no_grad():
        inputs = attention_inputs(1, keys)
        found = attention(**inputs, backend="auto")
        wanted = attention(**{name: x.double() for name, x in inputs.items()}, backend="torch_eager")
    within({"out": (found, wanted)}, 5e-3)


def test_attention_refuses():
    """Queries at given positions need a mask that the kernel does not take."""
    inputs = attention_inputs(8, 16)
    with pytest.raises(ValueError, match="use torch_sdpa"):
        attention(**inputs, backend="cudnn")
    with pytest.raises(ValueError, match="use torch_sdpa"):
        attention(**attention_inputs(8, 8), q_positions=torch.arange(8, device="cuda"), backend="cudnn")
