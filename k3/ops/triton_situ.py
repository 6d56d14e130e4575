"""SiTU as one Triton pass forward and one backward; `k3.ops.situ` owns the definition and the choice of backend.

Bytes are the floor: three tensors are touched forward, five backward, each once. Arithmetic is fp32 with one rounding.
"""

import torch
import triton
import triton.language as tl

_BLOCK, _WARPS = 2048, 8


@triton.jit
def _tanh(y):
    """tanh through one exponential; the odd series near zero avoids the cancellation in (1 - t) / (1 + t)."""
    t = tl.exp(-2.0 * tl.abs(y))
    far = (1.0 - t) / (1.0 + t)
    near = tl.abs(y) * (1.0 - y * y * (1.0 / 3.0))
    size = tl.where(tl.abs(y) < 0.02, near, far)
    return tl.where(y < 0, -size, size)


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
    value = cap * _tanh(g / cap) * tl.sigmoid(g) * (linear_cap * _tanh(u / linear_cap))
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
    s, tg, tu = tl.sigmoid(g), _tanh(g / cap), _tanh(u / linear_cap)
    capped_gate, capped_up = cap * tg * s, linear_cap * tu
    dg = d * capped_up * ((1.0 - tg * tg) * s + capped_gate * (1.0 - s))
    du = d * capped_gate * (1.0 - tu * tu)
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
