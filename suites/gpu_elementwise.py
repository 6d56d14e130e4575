"""Everything on a GPU that works token by token or a few tokens back: SiTU, short convolution, norms, loss, MXFP4.

Each kernel is compared with the product's own definition in float64, fed the same rounded inputs. Limits in bfloat16:
one rounding of the result is 2^-9 per element, 1.7e-3 in L2; gradients pass through one more.
"""

import pytest
import torch
from torch.func import functional_call

from k3.layers import RMSNorm
from k3.loss import lm_loss
from k3.ops import mxfp4
from k3.ops.cross_entropy import cross_entropy
from k3.ops.gated_norm import gated_norm
from k3.ops.kda import l2_normalize
from k3.ops.short_conv import short_conv, short_conv_normed
from k3.ops.situ import situ
from k3.paths import listen
from suites.gpu_common import Draw, exact_float32, gradients, leaves, on_gpu, paired, within  # noqa: F401

pytestmark = on_gpu
ONE_ROUNDING, TWO_ROUNDINGS = 2.5e-3, 5e-3
LENGTHS = [1000, 65, 64, 63, 3, 2, 1]  # the longest first: fla's kernels tune themselves at the first they meet
DOCUMENTS = [1, 2, 3, 63, 1, 64, 65, 3, 2, 796]


def both(function, reference, inputs: dict[str, torch.Tensor], limit: float, gradient_limit: float) -> None:
    """Compare value and gradients of `function` on the inputs with `reference` on their float64 copies."""
    x, y = leaves(inputs), leaves(inputs, torch.float64)
    found, wanted = function(**x), reference(**y)
    upstream = Draw(77).normal(*found.shape).to(found.dtype)
    found_all = {"out": found} | gradients(found, x, upstream)
    wanted_all = {"out": wanted} | gradients(wanted, y, upstream.double())
    within(paired(found_all, wanted_all), dict.fromkeys(found_all, gradient_limit) | {"out": limit})


# --- SiTU ------------------------------------------------------------------------------------------------------


def situ_in(backend):
    return lambda gate, up: situ(gate, up, 4.0, 25.0, backend=backend)


@pytest.mark.parametrize("shape", [(1, 3072), (3, 63, 1000), (2, 4096, 6144)])
def test_situ(shape):
    """SiTU and both gradients, over five decades of size, at full and odd widths."""
    make = Draw(sum(shape))
    decade = 10.0 ** (make.integers(5, *shape) - 3)
    inputs = {"gate": make.normal(*shape) * decade.bfloat16(), "up": make.normal(*shape) * decade.bfloat16()}
    both(situ_in("triton"), situ_in("torch"), inputs, ONE_ROUNDING, ONE_ROUNDING)


def test_situ_float32():
    """In float32 the kernel's own tanh and sigmoid keep six digits, for tiny inputs too."""
    make = Draw(8)
    inputs = {"gate": make.normal(1, 4099, scale=2.0).float(), "up": make.normal(1, 4099, scale=20.0).float()}
    both(situ_in("triton"), situ_in("torch"), inputs, 1e-6, 1e-6)
    tiny = {name: 1e-4 * tensor for name, tensor in inputs.items()}
    both(situ_in("triton"), situ_in("torch"), tiny, 1e-6, 1e-6)


def test_situ_of_halves():
    """The halves of a fused projection are read in place and give what their copies give."""
    gate, up = Draw(9).normal(7, 33, 2 * 640).chunk(2, dim=-1)
    assert torch.equal(situ(gate, up, 4.0, 25.0), situ(gate.contiguous(), up.contiguous(), 4.0, 25.0))


# --- short convolution -------------------------------------------------------------------------------------------


def convolution_inputs(length: int, batch: int = 1, heads: int = 96):
    make = Draw(length + heads)
    return {"x": make.normal(batch, length, heads * 128), "weight": make.normal(heads * 128, 1, 4, dtype=torch.float32)}


def conv_in(backend, cu_seqlens=None):
    return lambda x, weight: short_conv(x, weight, cu_seqlens=cu_seqlens, backend=backend)


def normed_reference(cu_seqlens=None):
    """The definition of the fused form: silu rounded to bfloat16 as the layer rounds it, then the norm of a head."""

    def reference(x, weight):
        y = short_conv(x, weight, cu_seqlens=cu_seqlens, backend="torch")
        y = y + (y.bfloat16().double() - y).detach()  # rounded, with the gradient of the identity
        return l2_normalize(y.unflatten(-1, (-1, 128))).flatten(-2)

    return reference


@pytest.mark.parametrize("backend", ["triton", "fla"])
@pytest.mark.parametrize("length", LENGTHS)
def test_short_conv(length, backend):
    """Convolution and silu with float32 weights, value and gradients, around the segment of 64."""
    both(conv_in(backend), conv_in("torch"), convolution_inputs(length), ONE_ROUNDING, TWO_ROUNDINGS)


@pytest.mark.parametrize("length", LENGTHS)
def test_short_conv_normed(length):
    """The same with the l2 norm of each head in the kernel, in a batch of two."""
    inputs = convolution_inputs(length, batch=2)
    fused = lambda x, weight: short_conv_normed(x, weight, 128)  # noqa: E731
    both(fused, normed_reference(), inputs, ONE_ROUNDING, TWO_ROUNDINGS)


@pytest.mark.parametrize("normed", [False, True])
def test_short_conv_of_documents(normed):
    """No document of 1 to 796 tokens sees the one before it, forward or backward."""
    bounds = torch.tensor([0, *DOCUMENTS], device="cuda").cumsum(0).int()
    inputs = convolution_inputs(1000, heads=5)
    fused = lambda x, weight: short_conv_normed(x, weight, 128, cu_seqlens=bounds)  # noqa: E731
    pair = (fused, normed_reference(bounds)) if normed else (conv_in("triton", bounds), conv_in("torch", bounds))
    both(*pair, inputs, ONE_ROUNDING, TWO_ROUNDINGS)


def test_short_conv_of_views():
    """A view into a fused projection is read in place and gives what its copy gives."""
    inputs = convolution_inputs(130, heads=6)
    left, _ = inputs["x"].chunk(2, dim=-1)
    weight = inputs["weight"][: left.shape[-1]]
    copied = short_conv_normed(left.contiguous(), weight, 128)
    assert torch.equal(short_conv_normed(left, weight, 128), copied)


@pytest.mark.parametrize("length", [65, 2, 1])
def test_short_conv_history(length):
    """fla's kernel continues from the last three inputs; the Triton kernel refuses instead of forgetting them."""
    inputs = convolution_inputs(length + 3)
    whole = short_conv(**inputs, backend="torch")[:, 3:]
    past, rest = inputs["x"][:, :3], inputs["x"][:, 3:]
    found = short_conv(rest, inputs["weight"], history=past, backend="fla")
    within({"out": (found, whole)}, ONE_ROUNDING)
    with pytest.raises(ValueError, match="zero history"):
        short_conv(rest, inputs["weight"], history=past, backend="triton")


# --- norms -------------------------------------------------------------------------------------------------------


def gated_norm_in(backend):
    return lambda o, gate, weight: gated_norm(o, gate, weight, 1e-5, backend=backend)


@pytest.mark.parametrize("length", [1000, 63, 1])
def test_gated_norm(length):
    """Norm per head, weight, sigmoid gate in one rounding; small heads decide whether epsilon is in the right place."""
    make = Draw(length)
    size = torch.logspace(-4, 1, 96, device="cuda").bfloat16()[:, None]
    inputs = {
        "o": make.normal(1, length, 96, 128) * size, "gate": make.normal(1, length, 96, 128, scale=3.0),
        "weight": make.normal(128, dtype=torch.float32),
    }  # fmt: skip
    both(gated_norm_in("fla"), gated_norm_in("torch"), inputs, ONE_ROUNDING, TWO_ROUNDINGS)


@pytest.mark.parametrize("eps", [1e-5, 1e-6])
def test_rms_norm(eps):
    """The model's RMS norm on the GPU casts before the weight, as its CPU form does, and has its gradients."""
    make, norm = Draw(4), RMSNorm(7168, eps, device="cuda", dtype=torch.bfloat16)
    inputs = {"x": make.normal(70, 7168, scale=3e-3), "weight": make.normal(7168)}
    found = lambda x, weight: functional_call(norm, {"weight": weight}, (x,))  # noqa: E731
    wanted = lambda x, weight: weight * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps))  # noqa: E731
    both(found, wanted, inputs, TWO_ROUNDINGS, TWO_ROUNDINGS)


# --- loss ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("vocab", [1000, 163840])
def test_cross_entropy(vocab):
    """Each token's loss and gradient; an ignored one's are zero; neither pass writes into the logits."""
    make = Draw(vocab)
    x = leaves({"logits": make.normal(65, vocab, scale=3.0)})
    y, before = leaves(x, torch.float64), x["logits"].detach().clone()
    labels = make.integers(vocab, 65)
    labels[[0, 30, 64]], labels[1], labels[2] = -100, vocab - 1, 0
    found, wanted = (cross_entropy(*z.values(), labels, backend=b) for z, b in ((x, "fla"), (y, "torch")))
    upstream = make.normal(65, dtype=torch.float32)
    mine, exact = gradients(found, x, upstream), gradients(wanted, y, upstream.double())
    within({"loss": (found, wanted)} | paired(mine, exact), {"loss": 1e-5, "dlogits": ONE_ROUNDING})
    assert not found[labels == -100].any() and not mine["dlogits"][labels == -100].any()
    assert torch.equal(x["logits"], before)


def test_cross_entropy_memory():
    """Forward keeps no second copy of the logits, in no precision."""
    x, labels = leaves({"logits": Draw(1).normal(512, 163840)}), Draw(2).integers(163840, 512)
    cross_entropy(x["logits"], labels)  # compiled before memory is watched
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    cross_entropy(x["logits"], labels)
    peak = torch.cuda.max_memory_allocated() - before
    assert peak < 0.01 * x["logits"].nbytes, f"{peak} bytes at the peak for logits of {x['logits'].nbytes}"


@pytest.mark.parametrize("kept", [0.0, 0.5, 1.0])
def test_loss_of_masks(kept):
    """The model's loss in bfloat16: labels ignored, tokens weighed, nothing left to learn from; by the fused path."""
    make, seen = Draw(5), []
    x = leaves({"logits": make.normal(2, 33, 1024)})
    y, labels = leaves(x, torch.float64), make.integers(1024, 2, 33)
    labels[1, 20:] = -100
    mask = kept * (make.integers(3, 2, 33) / 2.0)
    with listen(seen.append):
        found = lm_loss(x["logits"], labels, mask)
    wanted = lm_loss(y["logits"], labels, mask)
    mine, exact = gradients(found, x, None), gradients(wanted, y, None)
    assert seen == ["fla.cross_entropy"]
    if kept:
        within({"loss": (found, wanted)} | paired(mine, exact), {"loss": 1e-5, "dlogits": ONE_ROUNDING})
    assert kept or (found == 0 and not mine["dlogits"].any())


def test_cross_entropy_refuses():
    """The kernel computes in float32, so it takes no float64 logits."""
    with pytest.raises(ValueError, match="float64; use backend='torch'"):
        cross_entropy(torch.zeros(1, 4, device="cuda").double(), torch.zeros(1, dtype=torch.long), backend="fla")


# --- MXFP4 -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_mxfp4_decodes_every_byte(dtype):
    """All 65536 pairs of a packed byte and a scale byte decode to the table's bits, NaN scales and subnormals too."""
    packed = torch.arange(256, dtype=torch.uint8).repeat(256).view(256 * 16, 16)
    scale = torch.arange(256, dtype=torch.uint8).repeat_interleave(16).view(-1, 1)
    found = mxfp4.unpack(packed.cuda(), scale.cuda(), dtype, backend="triton").cpu()
    wanted = mxfp4.unpack_naive(packed, scale, dtype)
    assert torch.equal(found.isnan(), wanted.isnan())
    as_bits = torch.int16 if dtype == torch.bfloat16 else torch.int32
    assert torch.equal(found.nan_to_num(7.0).view(as_bits), wanted.nan_to_num(7.0).view(as_bits))


@pytest.mark.parametrize("rule", ["floor", "even", "ceil6"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_mxfp4_encodes(rule, dtype):
    """Scales and codes equal the definition's bytes: ties, zeros of both signs, saturation, infinities, subnormals."""
    make = Draw(12)
    size = torch.logspace(-42, 38, 1024, device="cuda")[:, None]
    weight = (make.normal(1024, 96, dtype=torch.float32) * size).to(dtype)
    halves = make.integers(25, 64, 96) / 2.0 - 6.0  # ties between codes, and both zeros
    weight = torch.cat([weight, halves.to(dtype), -halves.to(dtype)])
    weight[3, 5], weight[4, 40], weight[5, 90] = float("inf"), float("-inf"), float("nan")
    packed, scale = mxfp4.pack(weight, rule, backend="triton")
    wanted_packed, wanted_scale = mxfp4.pack_naive(weight.cpu(), rule)
    assert torch.equal(scale.cpu(), wanted_scale)
    assert torch.equal(packed.cpu(), wanted_packed)
