"""How the benchmarks measure: device events, a flushed L2, rotated inputs, peers interleaved in the same process.

A race times one contender with pytest-benchmark and its peers between the rounds, after every autotuner has gone
quiet. It states the floor beside the number: bytes over measured copy bandwidth, or operations over measured matmul
peak. On a CPU the same benchmarks run the torch paths at small shapes with the host clock, and say so.
"""

from __future__ import annotations

import gc
import hashlib
import shutil
import statistics
import subprocess
import time
from collections.abc import Callable
from contextlib import contextmanager

import pytest
import torch

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
FLUSH_BYTES = 256 * 2**20  # several times an H200's L2
SPINS_PER_S = 1.9e9
GPU_STATE = "clocks.sm,clocks.mem,clocks_event_reasons.active,temperature.gpu,power.draw"


class Mark:
    """A point on the device's own clock; the difference of two is in seconds."""

    def __init__(self):
        self.event = torch.cuda.Event(enable_timing=True)
        self.event.record()

    def __sub__(self, earlier: Mark) -> float:
        self.event.synchronize()
        return earlier.event.elapsed_time(self.event) / 1e3


def clock():
    """What pytest-benchmark reads before and after a round."""
    return Mark() if ON_GPU else time.perf_counter()


timed = pytest.mark.benchmark(timer=clock, disable_gc=True)


@pytest.fixture
def race(request, benchmark):
    """race(contenders, shape=, floor_bytes= | floor_flops=): time the first contender, its peers between its rounds."""

    def run(contenders: dict[str, Callable], *, shape: str, dtype="bfloat16", rounds=30, **floor) -> float:
        (name, ours), *peers = contenders.items()
        if benchmark.disabled:  # once each, untimed: what the peers execute is part of the number too
            for call in contenders.values():
                call()
            return 0.0
        lead = {label: _settle(call) for label, call in contenders.items()}
        samples, before = {label: [] for label, _ in peers}, gpu_state()

        def interleave():
            for label, call in peers:
                _ready(lead[label])
                start = clock()
                call()
                samples[label].append(clock() - start)
            _ready(lead[name])

        with quiet_autotuners():
            benchmark.pedantic(ours, setup=interleave, rounds=rounds)
        mine = statistics.median(benchmark.stats.stats.data)
        info = {"shape": shape, "dtype": dtype, "path": name, "device": DEVICE, "peers": samples, **_floor(**floor)}
        info |= {"tuned": tuned_choices(), "gpu_before": before, "gpu_after": gpu_state(), "flushed_l2": ON_GPU}
        benchmark.extra_info |= info
        _say(request, shape, benchmark.extra_info, mine)
        return mine

    return run


def _settle(call: Callable) -> float:
    """Run until no autotuner measures any more; returns the host's share of a call in seconds."""
    for _ in range(8):
        with autotuner_runs() as seen:
            call()
            synchronize()
        if not seen:
            break
    else:
        raise AssertionError("autotuning did not go quiet in 8 calls; the shape changes its key each time")
    start = time.perf_counter()
    call()
    launched = time.perf_counter() - start
    synchronize()
    return launched


def _ready(lead_s: float) -> None:
    """Flush the L2 and keep the device busy while the host queues the next call, so launches are not timed."""
    if ON_GPU:
        torch.empty(FLUSH_BYTES, dtype=torch.uint8, device="cuda").zero_()
        torch.cuda._sleep(int((1.3 * lead_s + 2e-4) * SPINS_PER_S))


@contextmanager
def autotuner_runs():
    """A list that grows with every configuration an autotuner measures inside the block."""
    seen: list[str] = []
    if not ON_GPU:
        yield seen
        return
    from triton.runtime.autotuner import Autotuner

    original = Autotuner._bench

    def counted(self, *args, **kwargs):
        seen.append(self.base_fn.__name__)
        return original(self, *args, **kwargs)

    Autotuner._bench = counted
    try:
        yield seen
    finally:
        Autotuner._bench = original


@contextmanager
def quiet_autotuners():
    """Assert that nothing tunes itself inside the block: its time would count as the kernel's."""
    with autotuner_runs() as seen:
        yield
    assert not seen, f"autotuned while timed: {sorted(set(seen))}; the numbers are void"


def tuned_choices() -> str:
    """Hash of every configuration that the autotuners of this process have chosen; '' on a CPU."""
    if not ON_GPU:
        return ""
    from triton.runtime.autotuner import Autotuner

    tuners = [found for found in gc.get_objects() if issubclass(type(found), Autotuner)]  # never asks a dead proxy
    chosen = sorted(f"{t.base_fn.__name__} {key} {config}" for t in tuners for key, config in t.cache.items())
    return hashlib.sha256("\n".join(chosen).encode()).hexdigest()[:16]


def synchronize() -> None:
    if ON_GPU:
        torch.cuda.synchronize()


def median_s(call: Callable, rounds: int = 20) -> float:
    """Median seconds of a call that is no contender: ceilings and one-off figures."""
    lead, samples = _settle(call), []
    for _ in range(rounds):
        _ready(lead)
        start = clock()
        call()
        samples.append(clock() - start)
    return statistics.median(samples)


def copy_bandwidth() -> float:
    """Bytes per second of a large copy on this device, counting bytes read and written."""
    source = torch.empty((2**30 if ON_GPU else 2**26), dtype=torch.uint8, device=DEVICE)
    target = torch.empty_like(source)
    return 2 * source.numel() / median_s(lambda: target.copy_(source))


def matmul_peak() -> float:
    """bfloat16 operations per second of a large matrix product of random data (float32 on a CPU)."""
    n, dtype = (8192, torch.bfloat16) if ON_GPU else (512, torch.float32)
    a, b = (torch.randn(n, n, device=DEVICE, dtype=dtype) for _ in range(2))
    return 2 * n**3 / median_s(lambda: a @ b)


def _floor(floor_bytes: float = 0.0, floor_flops: float = 0.0) -> dict:
    """The larger of the two times no version can beat, and the ceilings it was taken from."""
    found = {}
    if floor_bytes:
        found["bandwidth_bytes_per_s"] = copy_bandwidth()
    if floor_flops:
        found["peak_flops_per_s"] = matmul_peak()
    by_bytes = floor_bytes / found["bandwidth_bytes_per_s"] if floor_bytes else 0.0
    by_flops = floor_flops / found["peak_flops_per_s"] if floor_flops else 0.0
    bound = "bytes" if by_bytes >= by_flops else "operations"
    return found | {"floor_s": max(by_bytes, by_flops), "floor": bound} if found else {}


def gpu_state() -> str:
    """Clocks, throttle reasons, temperature and power now, as nvidia-smi says them; '' on a CPU."""
    if not ON_GPU or shutil.which("nvidia-smi") is None:
        return ""
    command = ["nvidia-smi", f"--query-gpu={GPU_STATE}", "--format=csv,noheader"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip().splitlines()[0]


def _say(request, shape: str, info: dict, mine: float) -> None:
    """One line a benchmark in the terminal: value, floor ratio, peer ratios, and what a CPU number is not."""
    parts = [f"{request.node.name} [{shape}]: {info['path']} {1e3 * mine:.3f} ms"]
    if "floor_s" in info:
        parts.append(f"{mine / info['floor_s']:.2f} x {info['floor']} floor")
    parts += [f"{mine / statistics.median(s):.3f} x {label}" for label, s in info["peers"].items()]
    note = "" if ON_GPU else " (CPU, torch paths at small shapes: says nothing of a GPU)"
    with request.config.pluginmanager.get_plugin("capturemanager").global_and_fixture_disabled():
        print("\n" + "; ".join(parts) + note, flush=True)
