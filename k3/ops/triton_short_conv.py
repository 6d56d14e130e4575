"""Short convolution, silu and the optional per-head l2 norm as one Triton pass each way.

A program walks a segment of time with the last W inputs of a few heads in registers, so forward reads and writes each
element once and backward reads x and dy and writes dx: the normalised and pre-norm activations are never stored.
Backward walks against time, three steps past its segment, and leaves one weight-gradient partial per segment.
The definition is c.3.2 and c.3.3 of the model description; the naive twin is the convolution of `k3.ops.kda_naive`.
"""

import torch
import triton
import triton.language as tl

_SEGMENT = 64  # tokens a program walks
_TILE, _WARPS = 256, 2  # channels of a program, and its warps
_WIDTH = 4


@triton.jit
def _silu_head(x3, x2, x1, x0, w3, w2, w1, w0, ACT: tl.constexpr):
    """Pre-activation and silu in the activation dtype; x0 is the current token, x3 the oldest."""
    z = w0 * x3 + w1 * x2 + w2 * x1 + w3 * x0
    return z, (z * tl.sigmoid(z)).to(ACT).to(tl.float32)


@triton.jit
def _tap(x, at, t, back, first, channels):
    """The input `back` tokens before t, or zero before the document's first token."""
    inside = (t - back >= first) & (t - back >= 0)
    return tl.load(x + at, mask=inside & channels, other=0.0).to(tl.float32)


@triton.jit
def _keep(value, ok):
    """value where the document reaches that far back, else zero."""
    return tl.where(ok, value, 0.0)


@triton.jit
def _forward(
    x, weight, first_of, y, T, H, stride_b, stride_t, eps,
    K: tl.constexpr, R: tl.constexpr, SEGMENT: tl.constexpr, NORM: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(2).to(tl.int64)
    head = tl.program_id(1) * R + tl.arange(0, R)
    channel = head[:, None] * K + tl.arange(0, K)[None, :]
    channels = (head < H)[:, None]
    ACT: tl.constexpr = y.dtype.element_ty
    p_w = weight + channel * 4
    w0, w1 = tl.load(p_w, mask=channels, other=0.0), tl.load(p_w + 1, mask=channels, other=0.0)
    w2, w3 = tl.load(p_w + 2, mask=channels, other=0.0), tl.load(p_w + 3, mask=channels, other=0.0)
    start = tl.program_id(0).to(tl.int64) * SEGMENT
    base = b * stride_b + channel
    x1 = _tap(x, base + (start - 1) * stride_t, start, 1, 0, channels)
    x2 = _tap(x, base + (start - 2) * stride_t, start, 2, 0, channels)
    x3 = _tap(x, base + (start - 3) * stride_t, start, 3, 0, channels)
    ahead = tl.load(x + base + start * stride_t, mask=channels, other=0.0)
    for t in range(start, tl.minimum(start + SEGMENT, T)):
        first = 0
        if PACKED:
            first = tl.load(first_of + t)
        at = b * 0 + t  # 64 bits wide
        x0 = ahead.to(tl.float32)
        ahead = tl.load(x + base + (at + 1) * stride_t, mask=channels & (t + 1 < T), other=0.0)
        o1, o2, o3 = _keep(x1, t - 1 >= first), _keep(x2, t - 2 >= first), _keep(x3, t - 3 >= first)
        z, s = _silu_head(o3, o2, o1, x0, w3, w2, w1, w0, ACT)
        if NORM:
            s = s * (1.0 / tl.sqrt(tl.sum(s * s, axis=1) + eps))[:, None]
        tl.store(y + (b * T + at) * H * K + channel, s.to(ACT), mask=channels)
        x3, x2, x1 = x2, x1, x0


@triton.jit
def _backward(
    x, weight, first_of, dy, dx, dw, T, H, stride_b, stride_t, eps,
    K: tl.constexpr, R: tl.constexpr, SEGMENT: tl.constexpr, NORM: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(2).to(tl.int64)
    head = tl.program_id(1) * R + tl.arange(0, R)
    channel = head[:, None] * K + tl.arange(0, K)[None, :]
    channels = (head < H)[:, None]
    ACT: tl.constexpr = dx.dtype.element_ty
    p_w = weight + channel * 4
    w0, w1 = tl.load(p_w, mask=channels, other=0.0), tl.load(p_w + 1, mask=channels, other=0.0)
    w2, w3 = tl.load(p_w + 2, mask=channels, other=0.0), tl.load(p_w + 3, mask=channels, other=0.0)
    start = tl.program_id(0).to(tl.int64) * SEGMENT
    stop = tl.minimum(start + SEGMENT, T)
    last = tl.minimum(stop + 3, T) - 1
    base = b * stride_b + channel
    x0 = _tap(x, base + last * stride_t, last, 0, 0, channels)
    x1 = _tap(x, base + (last - 1) * stride_t, last, 1, 0, channels)
    x2 = _tap(x, base + (last - 2) * stride_t, last, 2, 0, channels)
    zero = tl.zeros([R, K], dtype=tl.float32)
    a0, a1, a2 = zero, zero, zero  # gradient owed to tokens t, t-1, t-2 by the tokens after t
    g0, g1, g2, g3 = zero, zero, zero, zero
    ahead = tl.load(x + base + (last - 3) * stride_t, mask=channels & (last >= 3), other=0.0)
    d_ahead = tl.load(dy + (b * T + last) * H * K + channel, mask=channels, other=0.0)
    for step in range(last - start + 1):
        t = last - step
        first = 0
        if PACKED:
            first = tl.load(first_of + t)
        at = b * 0 + t  # 64 bits wide
        x3, d = ahead.to(tl.float32), d_ahead.to(tl.float32)
        ahead = tl.load(x + base + (at - 4) * stride_t, mask=channels & (t >= 4), other=0.0)
        d_ahead = tl.load(dy + (b * T + at - 1) * H * K + channel, mask=channels & (t >= 1), other=0.0)
        o1, o2, o3 = _keep(x1, t - 1 >= first), _keep(x2, t - 2 >= first), _keep(x3, t - 3 >= first)
        z, s = _silu_head(o3, o2, o1, x0, w3, w2, w1, w0, ACT)
        if NORM:
            r = (1.0 / tl.sqrt(tl.sum(s * s, axis=1) + eps))[:, None]
            d = r * d - s * (r * r * r * tl.sum(s * d, axis=1)[:, None])
        gate = tl.sigmoid(z)
        dz = d * gate * (1.0 + z * (1.0 - gate))
        if t < stop:
            tl.store(dx + (b * T + at) * H * K + channel, (a0 + w3 * dz).to(ACT), mask=channels)
            g0, g1, g2, g3 = g0 + dz * o3, g1 + dz * o2, g2 + dz * o1, g3 + dz * x0
        a0 = a1 + _keep(w2 * dz, t - 1 >= first)
        a1 = a2 + _keep(w1 * dz, t - 2 >= first)
        a2 = _keep(w0 * dz, t - 3 >= first)
        x0, x1, x2 = x1, x2, x3
    p_dw = dw + ((b * tl.num_programs(0) + tl.program_id(0)) * H * K + channel) * 4
    tl.store(p_dw, g0, mask=channels)
    tl.store(p_dw + 1, g1, mask=channels)
    tl.store(p_dw + 2, g2, mask=channels)
    tl.store(p_dw + 3, g3, mask=channels)


def _firsts(cu_seqlens: torch.Tensor, tokens: int) -> torch.Tensor:
    """For every packed token, the index of its document's first token: int32 [T]."""
    index = torch.arange(tokens, device=cu_seqlens.device, dtype=cu_seqlens.dtype)
    document = torch.searchsorted(cu_seqlens, index, right=True) - 1
    return cu_seqlens[document].to(torch.int32)


class _ShortConv(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, first_of, heads, eps):
        B, T, D = x.shape
        x = x if x.stride(-1) == 1 else x.contiguous()
        weight = weight.reshape(D, _WIDTH).contiguous()
        ctx.save_for_backward(x, weight, first_of)
        ctx.plan = heads, D // heads, eps
        y = torch.empty(B, T, D, dtype=x.dtype, device=x.device)
        _launch(_forward, x, weight, first_of, (y,), ctx.plan)
        return y

    @staticmethod
    def backward(ctx, dy):
        x, weight, first_of = ctx.saved_tensors
        B, T, D = x.shape
        dx = torch.empty(B, T, D, dtype=x.dtype, device=x.device)
        partials = torch.empty(B * triton.cdiv(T, _SEGMENT), D, _WIDTH, dtype=torch.float32, device=x.device)
        _launch(_backward, x, weight, first_of, (dy.contiguous(), dx, partials), ctx.plan)
        return dx, partials.sum(0).unsqueeze(1), None, None, None


def _launch(kernel, x, weight, first_of, rest, plan) -> None:
    heads, head_dim, eps = plan
    B, T, _ = x.shape
    rows = max(1, min(triton.next_power_of_2(heads), _TILE // head_dim))
    grid = (triton.cdiv(T, _SEGMENT), triton.cdiv(heads, rows), B)
    sizes = {"K": head_dim, "R": rows, "SEGMENT": _SEGMENT, "NORM": eps is not None, "PACKED": first_of is not None}
    kernel[grid](x, weight, first_of, *rest, T, heads, x.stride(0), x.stride(1), eps or 0.0, **sizes, num_warps=_WARPS)


def short_conv(
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    heads: int,
    l2_eps: float | None = None,
    cu_seqlens: torch.Tensor | None = None,
) -> torch.Tensor:
    """silu(causal depthwise convolution) of x [B, T, H*K], fp32 weight [H*K, 1, 4]; l2-normalised per head if asked.

    cu_seqlens int [N+1] (with B = 1) starts every document from zero history. Sums, silu and norm are fp32; the silu
    is rounded to x's dtype before the norm, as the unfused layer rounds it. Raises ValueError for shapes outside this.
    """
    B, T, D = x.shape
    if weight.shape[-1] != _WIDTH or weight.numel() != D * _WIDTH or weight.dtype != torch.float32:
        raise ValueError(
            f"weight is {tuple(weight.shape)} {weight.dtype}; this kernel takes float32 [{D}, 1, {_WIDTH}]"
        )
    head_dim = D // heads
    if head_dim * heads != D or head_dim & (head_dim - 1):
        raise ValueError(f"{D} channels in {heads} heads; this kernel takes a power-of-two head dim")
    if cu_seqlens is not None and B != 1:
        raise ValueError(f"x has batch {B} with cu_seqlens; pack the documents into batch 1")
    return _ShortConv.apply(x, weight, None if cu_seqlens is None else _firsts(cu_seqlens, T), heads, l2_eps)
