"""SiTU as one Triton pass forward and one backward; `k3.ops.situ` owns the definition and the choice of backend.

Bytes are the floor: three tensors are touched forward, five backward, each once. Arithmetic is fp32 with one rounding.
"""

import torch
import triton
import triton.language as tl

_FORWARD_BLOCK, _BACKWARD_BLOCK, _WARPS = 2048, 1024, 4


@triton.jit
def _exp2(x, FAST: tl.constexpr):
    """2^x in one instruction on a GPU: the flushed form needs no rescue of subnormals, which SiTU cannot show."""
    if FAST:
        return tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, True, 1)
    return tl.exp2(x)


@triton.jit
def _reciprocal(x, FAST: tl.constexpr):
    if FAST:
        return tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, True, 1)
    return 1.0 / x


@triton.jit
def _rise(y, t, EXACT: tl.constexpr):
    """1 - t for t = exp(-2y), y >= 0, so that tanh y = _rise / (1 + t); near zero the series, which cannot cancel."""
    near = y * (1.0 + t)
    if EXACT:
        near = near * (1.0 - y * y * (1.0 / 3.0))
    return tl.where(y < 0.01, near, 1.0 - t)


@triton.jit
def _signed(size, x):
    """size, its sign turned where x is negative."""
    bits = size.to(tl.int32, bitcast=True) ^ (x.to(tl.int32, bitcast=True) & -2147483648)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _powers(g, u, cap, linear_cap, FAST: tl.constexpr):
    """|g| / cap, |u| / linear_cap, exp(-2 of each) and exp(-|g|): the three exponentials that both passes need."""
    y, x = tl.abs(g) * (1.0 / cap), tl.abs(u) * (1.0 / linear_cap)
    ty, tx = _exp2(y * -2.8853900817779268, FAST), _exp2(x * -2.8853900817779268, FAST)
    return y, x, ty, tx, _exp2(tl.abs(g) * -1.4426950408889634, FAST)


@triton.jit
def _parts(g, u, cap, linear_cap, FAST: tl.constexpr, EXACT: tl.constexpr):
    """sigmoid(g), sigmoid(-g), tanh(g / cap), tanh(u / linear_cap) and both 1 - tanh^2, none by cancellation.

    One reciprocal serves all of them; the product they share lies within [1, 8].
    """
    y, x, ty, tx, e = _powers(g, u, cap, linear_cap, FAST)
    a, b, c = 1.0 + e, 1.0 + ty, 1.0 + tx
    inverse = _reciprocal(a * b * c, FAST)
    over_a, over_b, over_c = b * c * inverse, a * c * inverse, a * b * inverse
    tanh_y, tanh_x = _signed(_rise(y, ty, EXACT) * over_b, g), _signed(_rise(x, tx, EXACT) * over_c, u)
    s, rest = tl.where(g < 0, e, 1.0) * over_a, tl.where(g < 0, 1.0, e) * over_a
    return s, rest, tanh_y, tanh_x, 4.0 * ty * over_b * over_b, 4.0 * tx * over_c * over_c


@triton.jit
def _offsets(row_stride, columns, BLOCK: tl.constexpr, FLAT: tl.constexpr):
    """Flat element offsets of this program's slice, in the input and in the output, and the mask of those inside.

    Contiguous tensors are one row (FLAT) and need no division, which costs more than SiTU itself.
    """
    if FLAT:
        at_in = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        at_out, inside = at_in, at_in < columns
    else:
        blocks = tl.cdiv(columns, BLOCK)
        row = (tl.program_id(0) // blocks).to(tl.int64)
        column = (tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)
        at_in, at_out, inside = row * row_stride + column, row * columns + column, column < columns
    return at_in, at_out, inside


@triton.jit
def _situ_forward(
    gate, up, out, columns, gate_stride, up_stride, cap, linear_cap,
    BLOCK: tl.constexpr, FLAT: tl.constexpr, FAST: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    at_gate, at_out, inside = _offsets(gate_stride, columns, BLOCK, FLAT)
    at_up, at_out, inside = _offsets(up_stride, columns, BLOCK, FLAT)
    g = tl.load(gate + at_gate, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(up + at_up, mask=inside, other=0.0).to(tl.float32)
    y, x, ty, tx, e = _powers(g, u, cap, linear_cap, FAST)
    inverse = _reciprocal((1.0 + e) * (1.0 + ty) * (1.0 + tx), FAST) * (cap * linear_cap)
    size = tl.where(g < 0, e, 1.0) * _rise(y, ty, EXACT) * _rise(x, tx, EXACT) * inverse
    tl.store(out + at_out, _signed(_signed(size, g), u).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _situ_backward(
    gate, up, grad, grad_gate, grad_up, columns, gate_stride, up_stride, cap, linear_cap,
    BLOCK: tl.constexpr, FLAT: tl.constexpr, FAST: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    at_gate, at_out, inside = _offsets(gate_stride, columns, BLOCK, FLAT)
    at_up, at_out, inside = _offsets(up_stride, columns, BLOCK, FLAT)
    g = tl.load(gate + at_gate, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(up + at_up, mask=inside, other=0.0).to(tl.float32)
    d = tl.load(grad + at_out, mask=inside, other=0.0).to(tl.float32)
    s, rest, tg, tu, slope_g, slope_u = _parts(g, u, cap, linear_cap, FAST, EXACT)
    capped_gate, capped_up = cap * tg * s, linear_cap * tu
    dg = d * capped_up * (slope_g * s + capped_gate * rest)
    du = d * capped_gate * slope_u
    tl.store(grad_gate + at_out, dg.to(grad_gate.dtype.element_ty), mask=inside)
    tl.store(grad_up + at_out, du.to(grad_up.dtype.element_ty), mask=inside)


def _rows(x: torch.Tensor) -> torch.Tensor:
    """x as rows of unit-stride columns: a view for the halves of a fused projection, a copy for stranger layouts."""
    flat = x.reshape(-1, x.shape[-1])
    return flat if flat.stride(-1) == 1 else flat.contiguous()


def _launch(kernel, block, gate, up, rest, cap, linear_cap) -> None:
    rows, columns, strides = 1, gate.numel(), (0, 0)
    if not (gate.is_contiguous() and up.is_contiguous()):
        gate, up = _rows(gate), _rows(up)
        (rows, columns), strides = gate.shape, (gate.stride(0), up.stride(0))
    if gate.numel():
        grid = (rows * triton.cdiv(columns, block),)
        sizes = {"BLOCK": block, "FLAT": rows == 1, "FAST": gate.is_cuda, "EXACT": gate.dtype == torch.float32}
        kernel[grid](gate, up, *rest, columns, *strides, float(cap), float(linear_cap), **sizes, num_warps=_WARPS)


class _Situ(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate, up, cap, linear_cap):
        ctx.save_for_backward(gate, up)
        ctx.caps = cap, linear_cap
        out = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
        _launch(_situ_forward, _FORWARD_BLOCK, gate, up, (out,), cap, linear_cap)
        return out

    @staticmethod
    def backward(ctx, grad):
        gate, up = ctx.saved_tensors
        grad_gate = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
        grad_up = torch.empty_like(grad_gate)
        rest = (grad.contiguous(), grad_gate, grad_up)
        _launch(_situ_backward, _BACKWARD_BLOCK, gate, up, rest, *ctx.caps)
        return grad_gate, grad_up, None, None


def situ(gate: torch.Tensor, up: torch.Tensor, *, beta: float, linear_beta: float) -> torch.Tensor:
    """SiTU of gate and up [..., F] in one kernel each way; naive twin: the backend "torch" of `k3.ops.situ`."""
    if gate.shape != up.shape or gate.dtype != up.dtype:
        raise ValueError(
            f"gate is {tuple(gate.shape)} {gate.dtype} and up is {tuple(up.shape)} {up.dtype}; "
            "SiTU is elementwise: pass equal shapes and dtypes"
        )
    return _Situ.apply(gate, up, beta, linear_beta)
