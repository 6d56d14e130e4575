"""Moving token rows to experts and back with one pass over the bytes; `k3.ops.route` owns the definition.

`gather_sum` reads the k rows of a token and adds them in fp32, so the k-fold copy of the combine never exists; its
transpose writes each expert row once. Both are deterministic: no atomics.
"""

import torch
import triton
import triton.language as tl

_BLOCK = 1024


@triton.jit
def _gather_sum(rows, position, weight, out, L, k: tl.constexpr, WEIGHTED: tl.constexpr, BLOCK: tl.constexpr):
    n = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < L
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for j in tl.static_range(k):
        row = tl.load(position + n * k + j).to(tl.int64)
        value = tl.load(rows + row * L + column, mask=inside, other=0.0).to(tl.float32)
        if WEIGHTED:
            value = value * tl.load(weight + n * k + j)
        total += value
    tl.store(out + n * L + column, total.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _scatter_weighted(grad, rows, position, weight, grad_rows, grad_weight, L, k: tl.constexpr, BLOCK: tl.constexpr):
    choice = tl.program_id(0).to(tl.int64)
    row = tl.load(position + choice).to(tl.int64)
    w = tl.load(weight + choice)
    dot = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, L, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = column < L
        g = tl.load(grad + (choice // k) * L + column, mask=inside, other=0.0).to(tl.float32)
        dot += g * tl.load(rows + row * L + column, mask=inside, other=0.0).to(tl.float32)
        tl.store(grad_rows + row * L + column, (w * g).to(grad_rows.dtype.element_ty), mask=inside)
    tl.store(grad_weight + choice, tl.sum(dot, axis=0))


def _sum(rows: torch.Tensor, position: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
    (N, k), L = position.shape, rows.shape[1]
    out = torch.empty(N, L, dtype=rows.dtype, device=rows.device)
    if N:
        grid = (N, triton.cdiv(L, _BLOCK))
        _gather_sum[grid](rows, position, weight, out, L, k=k, WEIGHTED=weight is not None, BLOCK=_BLOCK, num_warps=4)
    return out


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx, z, source, position):
        ctx.save_for_backward(position)
        return z.index_select(0, source)

    @staticmethod
    def backward(ctx, grad):
        return _sum(grad.contiguous(), *ctx.saved_tensors, None), None, None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows, position, weight):
        rows, weight = rows.contiguous(), weight.contiguous()
        ctx.save_for_backward(rows, position, weight)
        return _sum(rows, position, weight)

    @staticmethod
    def backward(ctx, grad):
        rows, position, weight = ctx.saved_tensors
        grad_rows, grad_weight = torch.empty_like(rows), torch.empty_like(weight)
        if weight.numel():
            sizes = (rows.shape[1], position.shape[1])
            tensors = (grad.contiguous(), rows, position, weight, grad_rows, grad_weight)
            _scatter_weighted[(weight.numel(),)](*tensors, *sizes, BLOCK=_BLOCK, num_warps=4)
        return grad_rows, None, grad_weight


def spread(z: torch.Tensor, source: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
    """z[source]: rows [M, L] in expert order; position [N, k] says where token n's choices lie, for the gradient."""
    return _Spread.apply(z, source, position.contiguous())


def combine(rows: torch.Tensor, position: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """sum_j weight[n, j] * rows[position[n, j]], products and sum fp32, rounded once to rows' dtype: [N, L]."""
    return _Combine.apply(rows, position.contiguous(), weight)
