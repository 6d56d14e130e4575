"""Kimi Delta Attention as one operation: normalisation, gate and recurrence, by an explicit backend.

`kda_naive.recurrent` is the definition; `chunked` is the same recurrence in closed form over chunks of tokens.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from k3.ops.fla_kda import SAFE_BOUND, fla_chunk, fla_recurrent, flash_kda
from k3.ops.kda_naive import recurrent
from k3.paths import announce
from k3.precision import at_least_fp32

CHUNK = 16  # tokens; with a decay of -5 per token, exp stays within e^+-40 around the middle of a chunk
LOWEST_BOUND = -10.0  # below it the factors of one chunk would leave the range of float32
RECURRENT_UP_TO = 64  # tokens for which "auto" takes the definition on a CPU
FLA_RECURRENT_UP_TO = 8  # tokens for which "auto" decodes with the recurrent kernel on a GPU


def kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    A_log: Tensor,
    dt_bias: Tensor,
    lower_bound: float,
    cu_seqlens: Tensor | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    qk_normalised: bool = False,
    backend: str = "auto",
) -> tuple[Tensor, Tensor | None]:
    """The gated delta rule of spec c.3.3-c.3.6, differentiable in every tensor argument.

    q, k, g [B, T, H, K] (after the convolution, before the l2 norm unless `qk_normalised`; g is the raw gate);
    v [B, T, H, V];
    beta [B, T, H] after the sigmoid; A_log [H]; dt_bias [H*K]; initial_state [N, H, K, V] with N = B, or the number
    of documents when cu_seqlens [N+1] packs them in one row (zeros if None).
    backend: "auto" or a key of `BACKENDS`. Returns o [B, T, H, V] in v's dtype and the final state [N, H, K, V]
    (at least fp32), None unless `output_final_state`. Naive twin: the backend "torch_recurrent".
    """
    backend = choose_backend(q, lower_bound) if backend == "auto" else backend
    if backend not in BACKENDS:
        raise ValueError(f"KDA backend={backend!r} is unknown; use one of auto, {', '.join(BACKENDS)}")
    _check(q, v, cu_seqlens, initial_state)
    options = {"lower_bound": lower_bound, "cu_seqlens": cu_seqlens, "initial_state": initial_state}
    o, state = BACKENDS[backend](q, k, v, g, beta, A_log, dt_bias, qk_normalised=qk_normalised, **options)
    return o, state if output_final_state else None


def _check(q: Tensor, v: Tensor, cu_seqlens: Tensor | None, initial_state: Tensor | None) -> None:
    """Refuse what would broadcast silently: several packed rows, or states for another number of sequences."""
    B, _, H, K = q.shape
    if cu_seqlens is not None and B != 1:
        raise ValueError(f"cu_seqlens with batch {B}; pack all documents into one row, [1, T]")
    wanted = (B if cu_seqlens is None else len(cu_seqlens) - 1, H, K, v.shape[-1])
    if initial_state is not None and initial_state.shape != wanted:
        raise ValueError(
            f"initial_state {tuple(initial_state.shape)} must be {wanted}: one [K, V] per sequence and head"
        )


def choose_backend(q: Tensor, lower_bound: float) -> str:
    """What "auto" means for queries of this device, dtype and length; fp32 stays with the exact torch forms."""
    if q.is_cuda and q.dtype == torch.bfloat16 and q.shape[-1] % 64 == 0 and SAFE_BOUND <= lower_bound < 0:
        return "fla_recurrent" if q.shape[1] <= FLA_RECURRENT_UP_TO and not torch.is_grad_enabled() else "fla_chunk"
    return "torch_recurrent" if q.shape[1] <= RECURRENT_UP_TO else "torch_chunk"


def log_decay(g: Tensor, A_log: Tensor, dt_bias: Tensor, lower_bound: float) -> Tensor:
    """lower_bound * sigmoid(exp(A_log) * (g + dt_bias)): [B, T, H, K], at least fp32, in (lower_bound, 0)."""
    rate = at_least_fp32(A_log).exp().unsqueeze(-1)  # [H, 1]
    shifted = at_least_fp32(g) + at_least_fp32(dt_bias).unflatten(0, (-1, g.shape[-1]))
    return lower_bound * torch.sigmoid(rate * shifted)


def l2_normalize(x: Tensor) -> Tensor:
    """x / sqrt(sum(x^2) + 1e-6) over the last axis, at least fp32 and not cast back (spec c.3.3)."""
    x = at_least_fp32(x)
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


def chunked(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """The recurrence over chunks; arguments and results as in its naive twin `kda_naive.recurrent`.

    Inside a chunk the updates u solve the unit lower triangular system
    (I + diag(beta) tril(K K^T decayed, -1)) u = beta (v - K decayed S), by substitution: a power series of the
    inverse loses all accuracy under slow decay.
    """
    T = q.shape[1]
    q, k, v, g, beta = (_to_chunks(x) for x in (q, k, v, g, beta.unsqueeze(-1)))  # [B, H, N, C, *]
    total = g.cumsum(-2)  # [B, H, N, C, K], log decay since the chunk began
    centred = total - total[..., CHUNK // 2 - 1 : CHUNK // 2, :]
    grown, shrunk = k * (-centred).exp(), centred.exp()
    among_keys = ((k * shrunk) @ grown.mT).tril(-1)  # [B, H, N, C, C]
    # the diagonal knows no decay: taken apart, it leaves no rounding in the gradient of a fast gate
    among_queries = ((q * shrunk) @ grown.mT).tril(-1) + torch.diag_embed((q * k).sum(-1))
    from_start = total.exp()
    right = torch.cat([beta * v, beta * k * from_start], dim=-1)
    solved = torch.linalg.solve_triangular(beta * among_keys, right, upper=False, unitriangular=True)
    update_v, update_state = solved.split([v.shape[-1], k.shape[-1]], dim=-1)
    until_end = F.pad(g[..., 1:, :], (0, 0, 0, 1)).flip(-2).cumsum(-2).flip(-2)
    q_start, k_end, decay = q * from_start, k * until_end.exp(), from_start[..., -1, :, None]
    outputs = []
    for n in range(q.shape[2]):
        update = update_v[:, :, n] - update_state[:, :, n] @ state
        outputs.append(q_start[:, :, n] @ state + among_queries[:, :, n] @ update)
        state = decay[:, :, n] * state + k_end[:, :, n].mT @ update
    return torch.cat(outputs, dim=2).transpose(1, 2)[:, :T], state


def _to_chunks(x: Tensor) -> Tensor:
    """[B, T, H, *] -> [B, H, N, CHUNK, *]; the padding changes neither state (beta = 0, g = 0) nor earlier tokens."""
    x = F.pad(x, (0, 0, 0, 0, 0, -x.shape[1] % CHUNK))
    return x.transpose(1, 2).unflatten(2, (-1, CHUNK))


def _torch_backend(path: str, run: Callable) -> Callable:
    """A backend from a recurrence on normalised queries and keys."""

    def backend(q, k, v, g, beta, A_log, dt_bias, *, lower_bound, cu_seqlens, initial_state, qk_normalised):
        announce(path)
        if lower_bound < LOWEST_BOUND:
            raise ValueError(f"lower_bound={lower_bound} leaves float32; use a bound of {LOWEST_BOUND} or more")
        decay = log_decay(g, A_log, dt_bias, lower_bound)
        normalise = at_least_fp32 if qk_normalised else l2_normalize
        tensors = (normalise(q) * q.shape[-1] ** -0.5, normalise(k), at_least_fp32(v), decay, at_least_fp32(beta))
        if cu_seqlens is None:
            state = _start(tensors, initial_state, q.shape[0])
            o, state = run(*tensors, state)
        else:
            o, state = _by_document(run, tensors, initial_state, cu_seqlens.tolist())
        return o.to(v.dtype), state

    return backend


def _start(tensors: tuple[Tensor, ...], initial_state: Tensor | None, N: int) -> Tensor:
    _, k, v, *_ = tensors
    if initial_state is None:
        return v.new_zeros(N, v.shape[2], k.shape[3], v.shape[3])
    return initial_state.to(v.dtype)


def _by_document(run: Callable, tensors: tuple[Tensor, ...], initial_state: Tensor | None, bounds: list[int]):
    states = _start(tensors, initial_state, len(bounds) - 1)
    spans = list(zip(bounds, bounds[1:], strict=False))
    done = [run(*(x[:, a:b] for x in tensors), states[i : i + 1]) for i, (a, b) in enumerate(spans) if b > a]
    final = iter([state for _, state in done])
    kept = [next(final) if b > a else states[i : i + 1] for i, (a, b) in enumerate(spans)]
    return torch.cat([o for o, _ in done], dim=1), torch.cat(kept)


BACKENDS: dict[str, Callable] = {
    "torch_recurrent": _torch_backend("torch.kda_recurrent", recurrent),
    "torch_chunk": _torch_backend("torch.kda_chunk", chunked),
    "fla_chunk": fla_chunk,
    "fla_recurrent": fla_recurrent,
    "flash_kda": flash_kda,
}
