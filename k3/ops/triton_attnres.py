"""The Attention-Residual mix as one Triton kernel each way; `k3.ops.attnres` owns the definition and the choice.

A program holds one token and walks its sources: forward with the next ones on their way through shared memory,
backward with the next in registers. Every source is reached through its own pointer, read once forward and, backward,
once more from cache when the softmax gradient is known; nothing is stacked or copied. Gradients of the score weights
leave one partial row per program.
"""

import torch
import triton
import triton.language as tl

# Of the forms measured on an H200 the forward nearest to the floor over 2 to 9 sources: few warps, two sources ahead.
_FORWARD = {"num_warps": 4, "STAGES": 3}
# Registers for two programs on a multiprocessor, so that one loads while the other reduces.
_BACKWARD = {"num_warps": 8, "maxnreg": 128}
_PROGRAMS = 264  # of the persistent backward: two for each multiprocessor of an H200


@triton.jit
def _pick(pointers, i, COUNT: tl.constexpr):
    """pointers[i], chosen at run time: an unrolled choice would load all sources at once and spill."""
    pointer = pointers[0]
    for j in tl.static_range(1, COUNT):
        pointer = tl.where(i == j, pointers[j], pointer)
    return tl.multiple_of(pointer, 16)


@triton.jit
def _load(pointers, i, at, inside, COUNT: tl.constexpr):
    """Source i at offsets `at`, zeros past the last."""
    return tl.load(_pick(pointers, i, COUNT) + at, mask=inside & (i < COUNT), other=0.0)


@triton.jit
def _at(values, lane, i):
    """values[i] of a small vector."""
    return tl.sum(tl.where(lane == i, values, 0.0), axis=0)


@triton.jit
def _add2(a0, a1, b0, b1):
    return a0 + b0, a1 + b1


@triton.jit
def _mix(
    sources, norm, proj, out, stats, D, eps,
    COUNT: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BLOCK)
    inside = d < D
    query = tl.load(norm + d, mask=inside, other=0.0).to(tl.float32) * tl.load(proj + d, mask=inside, other=0.0)
    top, total = -float("inf"), 0.0
    blend = tl.zeros([BLOCK], dtype=tl.float32)
    for i in tl.range(0, COUNT, num_stages=STAGES):
        v = tl.load(_pick(sources, i, COUNT) + (n * D + d), mask=inside, other=0.0).to(tl.float32)
        square, along = tl.reduce((v * v, v * query), 0, _add2)  # both sums cross the warps together
        rms = tl.rsqrt(square / D + eps)
        score = along * rms
        tl.store(stats + (n * COUNT + i) * 2, score)
        tl.store(stats + (n * COUNT + i) * 2 + 1, rms)
        higher = tl.maximum(top, score)
        keep, share = tl.exp(top - higher), tl.exp(score - higher)
        blend = blend * keep + share * v
        total, top = total * keep + share, higher
    tl.store(out + n * D + d, (blend * (1.0 / total)).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _mix_backward(
    sources, grads, norm, proj, grad, stats, partial, count, N, D,
    COUNT: tl.constexpr, LANES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    d, lane = tl.arange(0, BLOCK), tl.arange(0, LANES)
    inside, live = d < D, lane < COUNT
    query = tl.load(norm + d, mask=inside, other=0.0).to(tl.float32) * tl.load(proj + d, mask=inside, other=0.0)
    query_grad = tl.zeros([BLOCK], dtype=tl.float32)
    for token in range(tl.program_id(0), N, tl.num_programs(0)):
        n = tl.program_id(0).to(tl.int64) * 0 + token  # 64 bits wide
        score = tl.load(stats + (n * COUNT + lane) * 2, mask=live, other=-float("inf"))
        inverse_rms = tl.load(stats + (n * COUNT + lane) * 2 + 1, mask=live, other=0.0)
        share = tl.exp(score - tl.max(score, axis=0))
        share = share / tl.sum(share, axis=0)
        ahead = _load(sources, 0, n * D + d, inside, COUNT)
        g = tl.load(grad + n * D + d, mask=inside, other=0.0).to(tl.float32)
        dot = tl.zeros([LANES], dtype=tl.float32)
        for i in range(count):
            v = ahead.to(tl.float32)
            ahead = _load(sources, tl.where(i + 1 < count, i + 1, 0), n * D + d, inside, COUNT)
            dot = tl.where(lane == i, tl.sum(v * g, axis=0), dot)
        score_grad = share * (dot - tl.sum(share * dot, axis=0))
        along_query = score_grad * inverse_rms
        along_source = tl.where(live, -along_query * inverse_rms * score / D, 0.0)
        for i in range(count):
            v = ahead.to(tl.float32)
            ahead = _load(sources, i + 1, n * D + d, inside, COUNT)
            b = _at(along_query, lane, i)
            value = (_at(share, lane, i) * g + b * query + _at(along_source, lane, i) * v).to(grad.dtype.element_ty)
            query_grad += b * v
            tl.store(_pick(grads, i, COUNT) + n * D + d, value, mask=inside)
    tl.store(partial + tl.program_id(0).to(tl.int64) * D + d, query_grad, mask=inside)


class _Mix(torch.autograd.Function):
    @staticmethod
    def forward(ctx, norm, proj, eps, *sources):
        D, count = sources[0].shape[-1], len(sources)
        N = sources[0].numel() // D
        out = torch.empty_like(sources[0])
        stats = torch.empty(N, count, 2, dtype=torch.float32, device=out.device)  # score and 1 / rms
        sizes = {"COUNT": count, "BLOCK": triton.next_power_of_2(D)}
        if N:
            _mix[(N,)](sources, norm, proj, out, stats, D, eps, **sizes, **_FORWARD)
        ctx.save_for_backward(norm, proj, stats, *sources)
        return out

    @staticmethod
    def backward(ctx, grad):
        norm, proj, stats, *sources = ctx.saved_tensors
        N, count, _ = stats.shape
        D, programs = grad.shape[-1], min(_PROGRAMS, N)
        grads = tuple(torch.empty_like(source) for source in sources)
        partial = torch.empty(programs, D, dtype=torch.float32, device=grad.device)
        sizes = {"COUNT": count, "LANES": triton.next_power_of_2(count), "BLOCK": triton.next_power_of_2(D)}
        if N:
            tensors = (tuple(sources), grads, norm, proj, grad.contiguous(), stats, partial)
            _mix_backward[(programs,)](*tensors, count, N, D, **sizes, **_BACKWARD)
        query = partial.sum(0)
        return (query * proj).to(norm.dtype), (query * norm).to(proj.dtype), None, *grads


def mix(sources: tuple[torch.Tensor, ...], norm: torch.Tensor, proj: torch.Tensor, eps: float) -> torch.Tensor:
    """Blend of contiguous sources [..., D] by softmax of their scores; norm, proj [D]. Twin: `k3.ops.attnres`."""
    return _Mix.apply(norm, proj, eps, *sources)
