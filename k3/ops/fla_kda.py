"""KDA through flash-linear-attention: chunked for training and prefill, recurrent for decode, FlashKDA where installed.

`k3.ops.kda` owns the signature and the choice; each function here serves a request fully or says why it cannot.
"""

from __future__ import annotations

from importlib.util import find_spec

import torch
from torch import Tensor

from k3.paths import announce

SAFE_BOUND = -5.0  # the lowest log decay whose 16-token products stay in range inside the kernels


def fla_chunk(
    q, k, v, g, beta, A_log, dt_bias, *, lower_bound, cu_seqlens=None, initial_state=None, qk_normalised=False
) -> tuple[Tensor, Tensor]:
    """`fla.ops.kda.chunk_kda`, differentiable; arguments and results as in `k3.ops.kda.kda`."""
    _check("fla_chunk", q, lower_bound)
    from fla.ops.kda import chunk_kda

    announce("fla.chunk_kda")
    gate = {"use_gate_in_kernel": True, "safe_gate": True, "lower_bound": lower_bound}
    return chunk_kda(
        q, k, v, g, beta, A_log=A_log, dt_bias=dt_bias, **gate, use_qk_l2norm_in_kernel=not qk_normalised,
        initial_state=_fp32(initial_state), output_final_state=True, cu_seqlens=_long(cu_seqlens),
    )  # fmt: skip


def fla_recurrent(
    q, k, v, g, beta, A_log, dt_bias, *, lower_bound, cu_seqlens=None, initial_state=None, qk_normalised=False
) -> tuple[Tensor, Tensor]:
    """`fla.ops.kda.fused_recurrent_kda`: token by token with the state in registers, forward only."""
    _check("fla_recurrent", q, lower_bound)
    if torch.is_grad_enabled() and any(t.requires_grad for t in (q, k, v, g, beta, A_log, dt_bias)):
        raise ValueError("backend='fla_recurrent' has no backward; use fla_chunk, or torch.no_grad() to decode")
    from fla.ops.kda import fused_recurrent_kda

    announce("fla.fused_recurrent_kda")
    return fused_recurrent_kda(
        q, k, v, g, beta, A_log=A_log, dt_bias=dt_bias, use_gate_in_kernel=True, lower_bound=lower_bound,
        use_qk_l2norm_in_kernel=not qk_normalised, initial_state=_fp32(initial_state), output_final_state=True,
        cu_seqlens=_long(cu_seqlens),
    )  # fmt: skip


def flash_kda(
    q, k, v, g, beta, A_log, dt_bias, *, lower_bound, cu_seqlens=None, initial_state=None, qk_normalised=False
) -> tuple[Tensor, Tensor]:
    """FlashKDA through fla's dispatch: forward only, K = V = 128, bfloat16; an error names what it refuses."""
    _check("flash_kda", q, lower_bound)
    if find_spec("flash_kda") is None:
        raise ValueError("backend='flash_kda' needs the package flash_kda; install it or use fla_chunk")
    if qk_normalised:
        raise ValueError("backend='flash_kda' normalises q and k itself; pass them before the l2 norm")
    from fla.ops.kda import chunk_kda
    from fla.ops.kda.backends.flash_kda import FlashKDABackend

    request = {
        "A_log": A_log, "dt_bias": dt_bias, "use_gate_in_kernel": True, "safe_gate": True, "lower_bound": lower_bound,
        "use_qk_l2norm_in_kernel": True, "use_beta_sigmoid_in_kernel": True, "state_v_first": True,
        "initial_state": None if initial_state is None else _fp32(initial_state).mT.contiguous(),
        "output_final_state": True, "cu_seqlens": _long(cu_seqlens),
    }  # fmt: skip
    tensors = (q, k, v, g, torch.logit(beta))  # the kernel takes logits and applies the sigmoid itself
    accepted, reason = FlashKDABackend().verify("chunk_kda", *tensors, **request)
    if not accepted:
        raise ValueError(f"backend='flash_kda' cannot serve this request: {reason}; use fla_chunk")
    announce("fla.flash_kda")
    o, state = chunk_kda(*tensors, **request)
    return o, state.mT


def _check(backend: str, q: Tensor, lower_bound: float) -> None:
    if not q.is_cuda:
        raise ValueError(f"backend={backend!r} runs on CUDA and q is on {q.device}; use torch_chunk")
    if q.shape[-1] % 16 or q.shape[-1] > 256:
        raise ValueError(f"backend={backend!r} takes a head dim of 16 to 256 in steps of 16, not {q.shape[-1]}")
    if not SAFE_BOUND <= lower_bound < 0:
        raise ValueError(f"backend={backend!r} takes lower_bound in [{SAFE_BOUND}, 0), not {lower_bound}")


def _fp32(state: Tensor | None) -> Tensor | None:
    return None if state is None else state.to(torch.float32)


def _long(cu_seqlens: Tensor | None) -> Tensor | None:
    return None if cu_seqlens is None else cu_seqlens.long()
