"""How much of the communication of a call runs beside its computation, from the intervals of the GPU's own kernels.

A communication kernel is NCCL's; its time includes waiting for its peers. Every other kernel computes; copies and
fills count as neither. Intervals are merged per kind before they are compared, so kernels side by side count once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

COMMUNICATION = ("ncclDevKernel", "ncclKernel")
NEITHER = ("Memcpy", "Memset", "nccl:")  # the last is a range the host announced, no kernel
Interval = tuple[float, float]


@dataclass(frozen=True)
class Overlap:
    """Seconds in which a call's kernels communicate, compute, and do both at once."""

    communication_s: float
    computation_s: float
    both_s: float

    @property
    def share(self) -> float:
        """The part of the communication that computation hides; 0 where nothing is sent."""
        return self.both_s / self.communication_s if self.communication_s else 0.0


def merged(intervals: Iterable[Interval]) -> list[Interval]:
    """The union of intervals as disjoint ones, ascending."""
    found: list[Interval] = []
    for start, stop in sorted(intervals):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], stop)
        else:
            found.append((start, stop))
    return found


def length(intervals: Iterable[Interval]) -> float:
    """The length of the union."""
    return sum(stop - start for start, stop in merged(intervals))


def overlap_of(communication: list[Interval], computation: list[Interval]) -> Overlap:
    """Both lengths, and that of the intersection: |A and B| = |A| + |B| - |A or B|."""
    apart = length(communication), length(computation)
    return Overlap(*apart, max(0.0, sum(apart) - length([*communication, *computation])))


def by_kind(kernels: Iterable[tuple[str, float, float]]) -> Overlap:
    """The overlap of kernels (name, start, stop in seconds)."""
    communication, computation = [], []
    for name, start, stop in kernels:
        if name.startswith(COMMUNICATION):
            communication.append((start, stop))
        elif not name.startswith(NEITHER):
            computation.append((start, stop))
    return overlap_of(communication, computation)


def profiled(call: Callable[[], None]) -> Overlap:
    """The overlap of one call on this rank's GPU. Raises RuntimeError where the profiler sees no kernel."""
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        call()
        torch.cuda.synchronize()
    events = [event for event in trace.events() if event.device_type == DeviceType.CUDA]
    kernels = [
        (event.name, event.time_range.start / 1e6, event.time_range.end / 1e6)
        for event in events
        if not getattr(event, "is_user_annotation", False)
    ]
    if not kernels:
        raise RuntimeError("the profiler saw no kernel of this call; overlap needs CUPTI, so allow it on this machine")
    return by_kind(kernels)
