"""KDA by its definition: one token after another. Every faster form is measured against this one."""

from __future__ import annotations

import torch
from torch import Tensor


def recurrent(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """S <- diag(a) S; u = beta (v - S^T k); S <- S + k u^T; o = S^T q, token by token (spec c.3.6).

    q (normalised and scaled), k (normalised), g (log decay) [B, T, H, K]; v [B, T, H, V]; beta [B, T, H] after the
    sigmoid; state [B, H, K, V]; all of one dtype, at least fp32. Returns o [B, T, H, V] and the final state.
    """
    outputs = []
    for t in range(q.shape[1]):
        state = g[:, t].exp().unsqueeze(-1) * state
        prediction = torch.einsum("bhkv,bhk->bhv", state, k[:, t])
        update = beta[:, t].unsqueeze(-1) * (v[:, t] - prediction)
        state = state + k[:, t].unsqueeze(-1) * update.unsqueeze(-2)
        outputs.append(torch.einsum("bhkv,bhk->bhv", state, q[:, t]))
    return torch.stack(outputs, dim=1) if outputs else v.clone(), state
