"""The same model with plain torch operations for the kernels: the peer that shows what the kernels are worth."""

from contextlib import contextmanager
from functools import partial
from unittest import mock

from k3.ops import route
from k3.ops.attnres import attnres_mix
from k3.ops.grouped_mm import grouped_mm
from k3.ops.situ import situ


@contextmanager
def eager_operations():
    """Inside the block AttnRes, SiTU, routing and experts of every model run as eager torch, one expert at a time."""
    plain_situ, plain_mix = partial(situ, backend="torch"), partial(attnres_mix, backend="torch")
    with (
        mock.patch("k3.layers.situ", plain_situ),
        mock.patch("k3.moe.situ", plain_situ),
        mock.patch("k3.residual.attnres_mix", plain_mix),
        mock.patch("k3.moe.grouped_mm", partial(grouped_mm, backend="loop")),
        mock.patch("k3.moe.route.spread", partial(route.spread, backend="torch")),
        mock.patch("k3.moe.route.combine", partial(route.combine, backend="torch")),
    ):
        yield
