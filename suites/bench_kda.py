"""KDA's speed: the operation forward, forward and backward, one decode step, and the layer at full width.

`pytest suites/bench_kda.py` works alone. Peers run in the same process on the same tensors: fla's kernel called
directly, and a layer composed plainly of torch linears and fla's modules. On a CPU the torch paths run, small.
"""

from itertools import cycle

import pytest
import torch
from torch import nn

from k3 import K3Config
from k3.kda import KDA
from k3.ops.kda import kda
from suites.gpu_common import ratio
from suites.timing import DEVICE, ON_GPU, race, timed  # noqa: F401

pytestmark = timed
T, H, K, D = (8192, 96, 128, 7168) if ON_GPU else (128, 2, 16, 64)
DTYPE = torch.bfloat16 if ON_GPU else torch.float32
DTYPE_NAME = str(DTYPE).removeprefix("torch.")
PATHS = ("fla_chunk", "fla.chunk_kda called directly") if ON_GPU else ("torch_chunk", "torch.kda_recurrent")
AGREES = 1e-2  # relative L2 of outputs before a number counts: both sides are bfloat16
SHAPE = f"B=1 T={T} H={H} K=V={K}"


def draw(seed: int, batch: int = 1, length: int = T, grad: bool = True) -> list[torch.Tensor]:
    """q, k, v, g, beta, A_log, dt_bias, with slow decays as most layers have them."""
    torch.manual_seed(seed)
    wide = [torch.randn(batch, length, H, K, device=DEVICE).to(DTYPE) for _ in range(4)]
    beta, rate = torch.rand(batch, length, H, device=DEVICE), 0.3 * torch.randn(H, device=DEVICE)
    shift = torch.randn(H * K, device=DEVICE) - 4
    return [x.requires_grad_(grad) for x in (*wide, beta, rate, shift)]


def ours(x: list[torch.Tensor]) -> torch.Tensor:
    return kda(*x[:5], A_log=x[5], dt_bias=x[6], lower_bound=-5.0, backend=PATHS[0])[0]


def peer(x: list[torch.Tensor]) -> torch.Tensor:
    if not ON_GPU:
        return kda(*x[:5], A_log=x[5], dt_bias=x[6], lower_bound=-5.0, backend="torch_recurrent")[0]
    from fla.ops.kda import chunk_kda

    gate = {"use_gate_in_kernel": True, "safe_gate": True, "lower_bound": -5.0, "use_qk_l2norm_in_kernel": True}
    return chunk_kda(*x[:5], A_log=x[5], dt_bias=x[6], **gate)[0]


def over(function, sets):
    """A call that takes the next input set each time."""
    inputs = cycle(sets)
    return lambda: function(next(inputs))


def with_backward(function):
    def step(x):
        o = function(x)
        torch.autograd.grad(o, x, torch.ones_like(o))

    return step


def test_forward(race):  # noqa: F811
    """Forward without a graph, against fla's kernel called directly; the floor is each tensor's bytes once."""
    sets = [draw(seed, grad=False) for seed in (1, 2)]
    assert ratio(ours(sets[0]), peer(sets[0])) < AGREES
    contenders = {PATHS[0]: over(ours, sets), PATHS[1]: over(peer, sets)}
    with torch.no_grad():
        race(contenders, shape=SHAPE, dtype=DTYPE_NAME, floor_bytes=5 * sets[0][0].nbytes)


def test_forward_backward(race):  # noqa: F811
    """Forward and backward; the floor reads five tensors twice and writes five, and four gradients more."""
    sets = [draw(seed) for seed in (1, 2)]
    assert ratio(ours(sets[0]), peer(sets[0])) < AGREES
    contenders = {PATHS[0]: over(with_backward(ours), sets), PATHS[1]: over(with_backward(peer), sets)}
    race(contenders, shape=SHAPE, dtype=DTYPE_NAME, floor_bytes=14 * sets[0][0].nbytes)


@pytest.mark.parametrize("batch", [1, 64])
def test_decode(race, batch):  # noqa: F811
    """One token for each sequence from its state; the floor reads and writes the float32 states."""
    sets = [draw(seed, batch, 1, grad=False) for seed in (1, 2)]
    states = torch.randn(batch, H, K, K, device=DEVICE)
    backend = "fla_recurrent" if ON_GPU else "torch_recurrent"
    options = {"lower_bound": -5.0, "initial_state": states, "output_final_state": True, "backend": backend}
    step = over(lambda x: kda(*x[:5], A_log=x[5], dt_bias=x[6], **options), sets)
    with torch.no_grad():
        race({backend: step}, shape=f"B={batch} T=1 H={H} K=V={K}", dtype=DTYPE_NAME, floor_bytes=2 * states.nbytes)


class PlainKDA(nn.Module):
    """The layer as one would compose it of torch linears and fla's modules, around the parameters of `layer`."""

    def __init__(self, layer: KDA):
        super().__init__()
        from fla.modules import FusedRMSNormGated, ShortConvolution

        self.layer = layer
        self.convolutions = nn.ModuleList(ShortConvolution(H * K, 4, activation="silu", device=DEVICE) for _ in "qkv")
        for mine, theirs in zip(self.convolutions, (layer.q_conv1d, layer.k_conv1d, layer.v_conv1d), strict=True):
            mine.weight = theirs.weight
        self.o_norm = FusedRMSNormGated(K, eps=layer.o_norm.eps, activation="sigmoid", device=DEVICE)
        self.o_norm.weight = layer.o_norm.weight

    def forward(self, x):
        from fla.ops.kda import chunk_kda

        layer = self.layer
        projected = (layer.q_proj(x), layer.k_proj(x), layer.v_proj(x))
        q, k, v = (c(p)[0].unflatten(-1, (-1, K)) for c, p in zip(self.convolutions, projected, strict=True))
        g = layer.f_b_proj(layer.f_a_proj(x)).unflatten(-1, (-1, K))
        o, _ = chunk_kda(
            q, k, v, g, layer.b_proj(x).float().sigmoid(), A_log=layer.A_log, dt_bias=layer.dt_bias,
            use_gate_in_kernel=True, safe_gate=True, lower_bound=-5.0, use_qk_l2norm_in_kernel=True,
        )  # fmt: skip
        return layer.o_proj(self.o_norm(o, layer.g_proj(x).unflatten(-1, (-1, K))).flatten(-2))


def test_layer(race):  # noqa: F811
    """The layer forward and backward with all weight gradients, against the plain composition on the same weights."""
    torch.manual_seed(3)
    config = K3Config(hidden_size=D, kda_num_heads=H, kda_head_dim=K)
    layer = KDA(config, 0, device=DEVICE, dtype=DTYPE)
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.02)
    plain = PlainKDA(layer) if ON_GPU else None
    sets = [torch.randn(1, T, D, device=DEVICE).to(DTYPE).requires_grad_() for _ in range(2)]
    contenders = {"k3.KDA": over(layer_step(layer), sets)}
    if plain is not None:
        assert ratio(layer(sets[0]), plain(sets[0])) < 2 * AGREES
        contenders["torch linears, fla modules"] = over(layer_step(plain), sets)
    weights = sum(p.numel() for p in layer.parameters() if p.ndim == 2)
    race(contenders, shape=f"B=1 T={T} D={D} H={H} K={K}", dtype=DTYPE_NAME, floor_flops=6 * weights * T)


def layer_step(layer: nn.Module):
    parameters = list(layer.parameters())

    def step(x):
        y = layer(x)
        torch.autograd.grad(y, [x, *parameters], torch.ones_like(y))

    return step
