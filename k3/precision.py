"""What stays fp32: the arithmetic rule "at least fp32", and tensors that no cast may narrow."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, ClassVar

import torch
from torch import Tensor, nn


def at_least_fp32(x: Tensor) -> Tensor:
    """Return `x` in float32, or in float64 if it is float64 already."""
    return x.to(wide_dtype(x.dtype))


def wide_dtype(dtype: torch.dtype | None) -> torch.dtype:
    """The dtype of pinned tensors in a model of `dtype`: at least float32."""
    return torch.promote_types(dtype or torch.get_default_dtype(), torch.float32)


def without_autocast(function: Callable) -> Callable:
    """Decorate arithmetic that is at least fp32, so that an enclosing `torch.autocast` does not narrow it."""

    @wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        device_type = next(a.device.type for a in args if isinstance(a, Tensor))
        with torch.autocast(device_type, enabled=False):
            return function(*args, **kwargs)

    return wrapper


class PinnedFloat32(nn.Module):
    """A module whose tensors named in `pinned` never become narrower than float32.

    `.to(bfloat16)`, `.half()` and the like move them and leave their values alone, bit for bit; `.double()` widens.
    """

    pinned: ClassVar[tuple[str, ...]] = ()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        own = [self._parameters.get(name, self._buffers.get(name)) for name in self.pinned]
        tensors = [t for t in own if t is not None]
        kept = {id(t) for t in tensors} | {id(t.grad) for t in tensors if t.grad is not None}
        return super()._apply(lambda t: _widen(fn(t), t) if id(t) in kept else fn(t), recurse)


def _widen(cast: Tensor, original: Tensor) -> Tensor:
    if not cast.is_floating_point() or torch.promote_types(cast.dtype, torch.float32) == cast.dtype:
        return cast
    return original.to(device=cast.device, dtype=torch.float32)
