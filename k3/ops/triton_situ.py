"""SiTU as one Triton pass forward and one backward; `k3.ops.situ` owns the definition and the choice of backend.

Bytes are the floor: three tensors are touched forward, five backward, each once. Arithmetic is fp32 with one rounding.
"""

import torch
import triton
import triton.language as tl

_BLOCK, _WARPS = 1024, 4


@triton.jit
def _rise(y, t):
    """(1 - t) where t = exp(-2|y|), so that tanh|y| is _rise / (1 + t); the odd series near zero does not cancel."""
    y = tl.abs(y)
    return tl.where(y < 0.02, y * (1.0 - y * y * (1.0 / 3.0)) * (1.0 + t), 1.0 - t)


@triton.jit
def _parts(g, u, cap, linear_cap):
    """sigmoid(g), sigmoid(-g), tanh(g / cap), tanh(u / linear_cap) and both 1 - tanh^2, none by cancellation.

    Three exponentials and one reciprocal serve all of them.
    """
    y, x = g * (1.0 / cap), u * (1.0 / linear_cap)
    ty, tx, e = tl.exp(-2.0 * tl.abs(y)), tl.exp(-2.0 * tl.abs(x)), tl.exp(-tl.abs(g))
    a, b, c = 1.0 + e, 1.0 + ty, 1.0 + tx
    root = tl.rsqrt(a * b * c)  # within [1, 8]
    inverse = root * root
    over_a, over_b, over_c = b * c * inverse, a * c * inverse, a * b * inverse
    tanh_y, tanh_x = _rise(y, ty) * over_b, _rise(x, tx) * over_c
    s, rest = tl.where(g < 0, e, 1.0) * over_a, tl.where(g < 0, 1.0, e) * over_a
    signed = (tl.where(g < 0, -tanh_y, tanh_y), tl.where(u < 0, -tanh_x, tanh_x))
    return s, rest, signed[0], signed[1], 4.0 * ty * over_b * over_b, 4.0 * tx * over_c * over_c


@triton.jit
def _offsets(row_stride, columns, BLOCK: tl.constexpr):
    """Flat element offsets of this program's slice of one row, and the mask of those inside it."""
    blocks = tl.cdiv(columns, BLOCK)
    program = tl.program_id(0).to(tl.int64)
    row = program // blocks
    column = (program % blocks) * BLOCK + tl.arange(0, BLOCK)
    return row * row_stride + column, row * columns + column, column < columns


@triton.jit
def _situ_forward(gate, up, out, columns, gate_stride, up_stride, cap, linear_cap, BLOCK: tl.constexpr):
    at_gate, at_out, inside = _offsets(gate_stride, columns, BLOCK)
    at_up, at_out, inside = _offsets(up_stride, columns, BLOCK)
    g = tl.load(gate + at_gate, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(up + at_up, mask=inside, other=0.0).to(tl.float32)
    s, _, tg, tu, _, _ = _parts(g, u, cap, linear_cap)
    value = (cap * linear_cap) * s * tg * tu
    tl.store(out + at_out, value.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _situ_backward(
    gate, up, grad, grad_gate, grad_up, columns, gate_stride, up_stride, cap, linear_cap, BLOCK: tl.constexpr
):
    at_gate, at_out, inside = _offsets(gate_stride, columns, BLOCK)
    at_up, at_out, inside = _offsets(up_stride, columns, BLOCK)
    g = tl.load(gate + at_gate, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(up + at_up, mask=inside, other=0.0).to(tl.float32)
    d = tl.load(grad + at_out, mask=inside, other=0.0).to(tl.float32)
    s, rest, tg, tu, slope_g, slope_u = _parts(g, u, cap, linear_cap)
    capped_gate, capped_up = cap * tg * s, linear_cap * tu
    dg = d * capped_up * (slope_g * s + capped_gate * rest)
    du = d * capped_gate * slope_u
    tl.store(grad_gate + at_out, dg.to(grad_gate.dtype.element_ty), mask=inside)
    tl.store(grad_up + at_out, du.to(grad_up.dtype.element_ty), mask=inside)


def _rows(x: torch.Tensor) -> torch.Tensor:
    """x as rows of unit-stride columns: a view for the halves of a fused projection, a copy for stranger layouts."""
    flat = x.reshape(-1, x.shape[-1])
    return flat if flat.stride(-1) == 1 else flat.contiguous()


def _launch(kernel, gate, up, rest, cap, linear_cap) -> None:
    rows, columns, strides = 1, gate.numel(), (0, 0)
    if not (gate.is_contiguous() and up.is_contiguous()):
        gate, up = _rows(gate), _rows(up)
        (rows, columns), strides = gate.shape, (gate.stride(0), up.stride(0))
    if gate.numel():
        grid = (rows * triton.cdiv(columns, _BLOCK),)
        kernel[grid](gate, up, *rest, columns, *strides, float(cap), float(linear_cap), BLOCK=_BLOCK, num_warps=_WARPS)


class _Situ(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate, up, cap, linear_cap):
        ctx.save_for_backward(gate, up)
        ctx.caps = cap, linear_cap
        out = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
        _launch(_situ_forward, gate, up, (out,), cap, linear_cap)
        return out

    @staticmethod
    def backward(ctx, grad):
        gate, up = ctx.saved_tensors
        grad_gate = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
        grad_up = torch.empty_like(grad_gate)
        _launch(_situ_backward, gate, up, (grad.contiguous(), grad_gate, grad_up), *ctx.caps)
        return grad_gate, grad_up, None, None


def situ(gate: torch.Tensor, up: torch.Tensor, *, beta: float, linear_beta: float) -> torch.Tensor:
    """SiTU of gate and up [..., F] in one kernel each way; naive twin: the backend "torch" of `k3.ops.situ`."""
    if gate.shape != up.shape or gate.dtype != up.dtype:
        raise ValueError(
            f"gate is {tuple(gate.shape)} {gate.dtype} and up is {tuple(up.shape)} {up.dtype}; "
            "SiTU is elementwise: pass equal shapes and dtypes"
        )
    return _Situ.apply(gate, up, beta, linear_beta)
