"""The same model with other backends: eager torch for some kernels or all, or every kernel that takes float32."""

from contextlib import ExitStack, contextmanager
from functools import partial
from pkgutil import resolve_name
from unittest import mock

# Where the model calls an operation, and its definition in torch.
EAGER = {
    "k3.layers.situ": "torch", "k3.moe.situ": "torch", "k3.residual.attnres_mix": "torch", "k3.moe.grouped_mm": "loop",
    "k3.moe.route.spread": "torch", "k3.moe.route.combine": "torch",
}  # fmt: skip
PLAIN = EAGER | {"k3.kda.short_conv": "torch", "k3.layers.gated_norm": "torch", "k3.loss.cross_entropy": "torch"}
FLOAT32 = {
    "k3.layers.situ": "triton", "k3.moe.situ": "triton", "k3.residual.attnres_mix": "triton",
    "k3.moe.route.spread": "triton", "k3.moe.route.combine": "triton", "k3.kda.short_conv": "triton",
    "k3.layers.gated_norm": "fla", "k3.loss.cross_entropy": "fla",
}  # fmt: skip


@contextmanager
def backends(chosen: dict[str, str]):
    """Inside the block every call at each named place goes to that backend."""
    with ExitStack() as stack:
        for place, backend in chosen.items():
            stack.enter_context(mock.patch(place, partial(resolve_name(place), backend=backend)))
        yield


def eager_operations():
    """AttnRes, SiTU, routing and experts of every model run as eager torch, one expert at a time."""
    return backends(EAGER)
