"""The KDA layer: projections, short convolution, gated delta rule, gated norm. Heads are counted from its tensors."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from k3.layers import GatedRMSNorm, linear, local
from k3.ops.kda import choose_backend, kda
from k3.ops.short_conv import fits_triton, last_inputs, short_conv, short_conv_normed
from k3.precision import PinnedFloat32, at_least_fp32, wide_dtype, without_autocast
from k3.sequence import SequenceLayout


class KDAWeights(NamedTuple):
    """The per-head tensors `kda_core` uses, head-major on their first axis."""

    q_conv: Tensor  # [H*K, 1, taps]
    k_conv: Tensor
    v_conv: Tensor
    A_log: Tensor  # [H]
    dt_bias: Tensor  # [H*K]


class KDAState(NamedTuple):
    """What a KDA layer remembers of the tokens before: histories in the activation dtype, S at least fp32."""

    q_conv: Tensor | None  # [B, taps-1, H*K], inputs of the convolution
    k_conv: Tensor | None
    v_conv: Tensor | None
    S: Tensor | None  # [B, H, K, V]


class ShortConv(PinnedFloat32):
    """The weight of one causal depthwise convolution, [H*K, 1, taps] in fp32."""

    pinned = ("weight",)

    def __init__(self, dim: int, taps: int, *, device=None, dtype=None):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(dim, 1, taps, device=device, dtype=wide_dtype(dtype)))


class KDA(PinnedFloat32):
    """Kimi Delta Attention (spec c.3)."""

    pinned = ("A_log", "dt_bias")

    def __init__(self, config, layer_index: int, *, device=None, dtype=None):
        super().__init__()
        H, K, D = config.kda_num_heads, config.kda_head_dim, config.hidden_size
        factory = {"device": device, "dtype": dtype}
        self.layer_index, self.head_dim, self.lower_bound = layer_index, K, config.kda_gate_lower_bound
        self.backend = "auto"
        self.q_proj, self.k_proj, self.v_proj = (linear(D, H * K, **factory) for _ in "qkv")
        taps = config.kda_short_conv_kernel_size
        self.q_conv1d, self.k_conv1d, self.v_conv1d = (ShortConv(H * K, taps, **factory) for _ in "qkv")
        self.f_a_proj, self.f_b_proj = linear(D, K, **factory), linear(K, H * K, **factory)
        self.b_proj, self.g_proj = linear(D, H, **factory), linear(D, H * K, **factory)
        wide = {"device": device, "dtype": wide_dtype(dtype)}
        self.A_log = nn.Parameter(torch.empty(H, **wide))
        self.dt_bias = nn.Parameter(torch.empty(H * K, **wide))
        self.o_norm = GatedRMSNorm(K, config.rms_norm_eps, **factory)
        self.o_proj = linear(H * K, D, **factory)

    def forward(self, x: Tensor, layout: SequenceLayout | None = None, cache=None) -> Tensor:
        q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)  # [B, T, H*K]
        z, beta = self.f_b_proj(self.f_a_proj(x)), self.b_proj(x)  # raw gate [B, T, H*K], logits [B, T, H]
        state = cache.kda_state(self.layer_index) if cache is not None else None
        core = partial(
            kda_core,
            head_dim=self.head_dim,
            lower_bound=self.lower_bound,
            backend=self.backend,
            keep_state=cache is not None,
        )
        o, state = (layout or SequenceLayout()).kda(core, q, k, v, z, beta, self.weights(), state)  # [B, T, H, V]
        if cache is not None:
            cache.store_kda(self.layer_index, state)
        gate = self.g_proj(x).unflatten(-1, (-1, self.head_dim))
        return self.o_proj(self.o_norm(o, gate).flatten(-2))

    def weights(self) -> KDAWeights:
        """This rank's per-head tensors."""
        convolutions = (local(m, "weight") for m in (self.q_conv1d, self.k_conv1d, self.v_conv1d))
        return KDAWeights(*convolutions, local(self, "A_log"), local(self, "dt_bias"))


@without_autocast
def kda_core(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    z: Tensor,
    beta: Tensor,
    weights: KDAWeights,
    *,
    head_dim: int,
    lower_bound: float,
    cu_seqlens: Tensor | None = None,
    state: KDAState | None = None,
    keep_state: bool = True,
    backend: str = "auto",
) -> tuple[Tensor, KDAState | None]:
    """Everything of KDA that looks along the sequence: convolution, l2 norm, gate, recurrence.

    q, k, v, z [B, T, H*K] are projections before the convolution, beta [B, T, H] logits. Returns o [B, T, H, V] in
    the activation dtype and, if `keep_state`, the state after the last token (of each document, for S, when packed).
    """
    histories = state[:3] if state is not None else (None, None, None)
    heads = (-1, head_dim)
    backend = choose_backend(q.unflatten(-1, heads), lower_bound) if backend == "auto" else backend
    fused = backend in ("fla_chunk", "fla_recurrent") and fits_triton(q, weights.q_conv, histories[0], head_dim)
    if fused:
        convolved = convolve_fused(q, k, v, weights, head_dim, cu_seqlens)
    else:
        inputs = zip((q, k, v), weights[:3], histories, strict=True)
        convolved = [short_conv(x, w, history=past, cu_seqlens=cu_seqlens) for x, w, past in inputs]
    o, S = kda(
        *(x.unflatten(-1, heads) for x in convolved),
        z.unflatten(-1, heads),
        at_least_fp32(beta).sigmoid(),
        A_log=weights.A_log,
        dt_bias=weights.dt_bias,
        lower_bound=lower_bound,
        cu_seqlens=cu_seqlens,
        initial_state=state.S if state is not None else None,
        output_final_state=keep_state,
        qk_normalised=fused,
        backend=backend,
    )
    if not keep_state:
        return o, None
    taps = weights.q_conv.shape[-1]
    tails = (last_inputs(x, past, taps) for x, past in zip((q, k, v), histories, strict=True))
    return o, KDAState(*tails, S)


def convolve_fused(
    q: Tensor, k: Tensor, v: Tensor, weights: KDAWeights, head_dim: int, cu_seqlens: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """The three convolutions with silu, and the l2 norm of q and k in the same kernel, rounded as fla rounds it."""
    normed = partial(short_conv_normed, head_dim=head_dim, cu_seqlens=cu_seqlens)
    value = short_conv(v, weights.v_conv, cu_seqlens=cu_seqlens, backend="triton")
    return normed(q, weights.q_conv), normed(k, weights.k_conv), value
