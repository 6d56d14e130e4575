"""Backends are chosen by name: an unknown one or one that cannot serve is an error that names one that can."""

import pytest
import torch

from k3.ops import route
from k3.ops.attention import attention
from k3.ops.attnres import attnres_mix
from k3.ops.cross_entropy import cross_entropy
from k3.ops.gated_norm import gated_norm
from k3.ops.kda import kda
from k3.ops.mxfp4 import pack
from k3.ops.short_conv import short_conv
from k3.ops.situ import situ

X = torch.randn(1, 4, 2, 16)
KDA = {"A_log": torch.zeros(2), "dt_bias": torch.zeros(32), "lower_bound": -5.0}


def run_kda(backend: str, **changes):
    return kda(X, X, X, X, X[..., 0].sigmoid(), **KDA | changes, backend=backend)


@pytest.mark.parametrize("backend", ["fla_chunk", "fla_recurrent", "flash_kda"])
def test_kda_kernels_refuse_a_cpu(backend):
    """No kernel falls back to the definition behind the caller's back."""
    with pytest.raises(ValueError, match=f"{backend}.*runs on CUDA.*use torch_chunk"):
        run_kda(backend)


@pytest.mark.parametrize(
    "call",
    [
        lambda: run_kda("fast"),
        lambda: situ(X, X, 4.0, 25.0, backend="fast"),
        lambda: attnres_mix([X, X], X[0, 0, 0], X[0, 0, :1], 1e-5, backend="fast"),
        lambda: attention(X, X, X, backend="fast"),
        lambda: gated_norm(X, X, X[0, 0, 0], 1e-5, backend="fast"),
        lambda: cross_entropy(X[0, 0], torch.tensor([0, 1]), backend="fast"),
        lambda: short_conv(X.flatten(2), torch.ones(32, 1, 4), backend="fast"),
        lambda: pack(X.flatten(2), backend="fast"),
        lambda: route.spread(X[0, 0], route.sort_by_expert(torch.tensor([[0], [1]]), 2), backend="fast"),
    ],
)
def test_unknown_names(call):
    """Every operation refuses an unknown backend and lists the known ones."""
    with pytest.raises(ValueError, match=r"backend='fast' is unknown; use one of auto, torch"):
        call()


def test_cudnn_refuses_positions():
    """Attention at given positions needs a mask, which cuDNN's kernel does not take."""
    with pytest.raises(ValueError, match="use torch_sdpa"):
        attention(X, X, X, q_positions=torch.arange(4), backend="cudnn")


def test_fused_loss_refuses_a_cpu():
    """The fused cross entropy runs on CUDA and says so instead of computing elsewhere."""
    with pytest.raises(ValueError, match="logits are on cpu; use backend='torch'"):
        cross_entropy(X[0, 0], torch.tensor([0, 1]), backend="fla")


def test_triton_pack_refuses_other_ties():
    """The kernel rounds ties to even; the other rule stays with torch."""
    with pytest.raises(ValueError, match="use backend='torch'"):
        pack(X.flatten(2), ties="zero", backend="triton")


def test_strided_sources_are_refused():
    """The kernels read sources in place; a strided one would be copied, so it is named instead."""
    sources = [X.flatten(2), torch.cat([X, X], dim=-1).flatten(2)[..., ::2]]
    with pytest.raises(ValueError, match=r"sources \[1\]"):
        attnres_mix(sources, torch.ones(32), torch.ones(1, 32), 1e-5, backend="triton")


def test_normalised_inputs():
    """`qk_normalised` skips the norm: the result is that of inputs normalised before."""
    unit = X / (X.square().sum(-1, keepdim=True) + 1e-6).sqrt()
    wanted, _ = run_kda("torch_chunk")
    given, _ = kda(unit, unit, X, X, X[..., 0].sigmoid(), **KDA, qk_normalised=True, backend="torch_chunk")
    torch.testing.assert_close(given, wanted)


def test_rows_return_to_their_tokens():
    """Sorting by expert, spreading and combining with weights is the plain weighted sum over choices."""
    idx, weight = torch.rand(9, 5).topk(3).indices, torch.rand(9, 3)
    order, z = route.sort_by_expert(idx, 5), torch.randn(9, 7)
    assert order.counts.tolist() == torch.bincount(idx.flatten(), minlength=5).tolist()
    scaled = route.spread(z, order) * torch.arange(5).repeat_interleave(order.counts)[:, None]
    wanted = (weight * idx).sum(1, keepdim=True) * z
    torch.testing.assert_close(route.combine(scaled, order, weight), wanted)
