"""The delta rule token by token in float64 on a GPU, forward and backward, for any length: the centre of GPU limits.

Written from the equations as one small Triton kernel each way; states of all tokens are kept, so backward recomputes
nothing in another order. `gpu_kda.py` checks it against autograd on the product's definition before relying on it.
"""

import torch
import triton
import triton.language as tl


@triton.jit
def _forward(q, k, v, g, beta, o, states, T, H, K: tl.constexpr, V: tl.constexpr, BV: tl.constexpr):
    h, ks = tl.program_id(0).to(tl.int64), tl.arange(0, K)
    vs = tl.program_id(1) * BV + tl.arange(0, BV)
    block = ks[:, None] * V + vs[None, :]
    S = tl.load(states + h * K * V + block)
    for t in range(T):
        row = h * 0 + t * H + h
        key = tl.load(k + row * K + ks)
        S = tl.exp(tl.load(g + row * K + ks))[:, None] * S
        u = tl.load(beta + row) * (tl.load(v + row * V + vs) - tl.sum(S * key[:, None], axis=0))
        S += key[:, None] * u[None, :]
        tl.store(o + row * V + vs, tl.sum(S * tl.load(q + row * K + ks)[:, None], axis=0))
        tl.store(states + (row + H) * K * V + block, S)


@triton.jit
def _backward(
    q, k, v, g, beta, states, do, dstate, dq, dk, dv, dg, dbeta, dstart, T, H,
    K: tl.constexpr, V: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    h, ks = tl.program_id(0).to(tl.int64), tl.arange(0, K)
    vs = tl.program_id(1) * BV + tl.arange(0, BV)
    part = tl.program_id(1).to(tl.int64) * T * H
    block = ks[:, None] * V + vs[None, :]
    G = tl.load(dstate + h * K * V + block)
    for step in range(T):
        t = T - 1 - step
        row = h * 0 + t * H + h
        key, b = tl.load(k + row * K + ks), tl.load(beta + row)
        decay = tl.exp(tl.load(g + row * K + ks))[:, None]
        before = tl.load(states + row * K * V + block)
        d = tl.load(do + row * V + vs)
        tl.store(dq + (part + row) * K + ks, tl.sum(tl.load(states + (row + H) * K * V + block) * d[None, :], axis=1))
        G += tl.load(q + row * K + ks)[:, None] * d[None, :]
        decayed = decay * before
        error = tl.load(v + row * V + vs) - tl.sum(decayed * key[:, None], axis=0)
        du = tl.sum(G * key[:, None], axis=0)
        tl.store(dv + row * V + vs, b * du)
        tl.store(dbeta + part + row, tl.sum(du * error, axis=0))
        dkey = tl.sum(G * (b * error)[None, :], axis=1) - tl.sum(decayed * (b * du)[None, :], axis=1)
        tl.store(dk + (part + row) * K + ks, dkey)
        G -= key[:, None] * (b * du)[None, :]
        G = decay * G
        tl.store(dg + (part + row) * K + ks, tl.sum(G * before, axis=1))
    tl.store(dstart + h * K * V + block, G)


class _ByToken(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, g, beta, start):
        (T, H, K), V = q.shape, v.shape[-1]
        o, states = torch.empty_like(v), q.new_empty(T + 1, H, K, V)  # states[0] is the start
        states[0] = start
        _forward[(H, V // 16)](q, k, v, g, beta, o, states, T, H, K=K, V=V, BV=16)
        ctx.save_for_backward(q, k, v, g, beta, states)
        return o, states[-1].clone()

    @staticmethod
    def backward(ctx, do, dstate):
        q, k, v, g, beta, states = ctx.saved_tensors
        (T, H, K), V = q.shape, v.shape[-1]
        blocks = V // 16
        dq, dk, dg = (q.new_empty(blocks, T, H, K) for _ in range(3))
        dv, dbeta, dstart = torch.empty_like(v), q.new_empty(blocks, T, H), torch.empty_like(states[0])
        gradients = (dq, dk, dv, dg, dbeta, dstart)
        inputs = (q, k, v, g, beta, states, do.contiguous(), dstate.contiguous())
        _backward[(H, blocks)](*inputs, *gradients, T, H, K=K, V=V, BV=16)
        return dq.sum(0), dk.sum(0), dv, dg.sum(0), dbeta.sum(0), dstart


def delta_rule(q, k, v, g, beta, start):
    """o [T, H, V] and the last state [H, K, V] of one document; arguments float64, as in `kda_naive.recurrent`."""
    return _ByToken.apply(*(x.contiguous() for x in (q, k, v, g, beta, start)))
