"""Which code path ran: the one hook through which `k3` says so. Torch-free; who listens is not its business."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

_listeners: list[Callable[[str], object]] = []


def announce(path: str) -> None:
    """Tell every listener that the code named `path` (for example "torch.kda_chunk") is about to run."""
    for listener in tuple(_listeners):
        listener(path)


@contextmanager
def listen(callback: Callable[[str], object]) -> Iterator[None]:
    """Call `callback(path)` for every announcement made inside the block, from any thread."""
    _listeners.append(callback)
    try:
        yield
    finally:
        _listeners.remove(callback)
