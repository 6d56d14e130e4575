"""A pytest plugin for `k3-harness tune`: compile every configuration in advance, and say what a warm run touches.

`K3_WARM=compile:3/12` makes worker 3 of 12 compile, unmeasured, starting at its own offset, so that the workers share
the work through the cache. `K3_WARM=trace:FILE` writes the cache entries that a run used, one a line.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

USED = pytest.StashKey[set]()


def pytest_configure(config):
    """Patch Triton as `K3_WARM` says; without it the plugin does nothing."""
    mode, _, argument = os.environ.get("K3_WARM", "").partition(":")
    if mode == "compile":
        worker, _, workers = argument.partition("/")
        compile_only(int(worker), int(workers))
    elif mode == "trace":
        config.stash[USED] = trace_cache()


def pytest_unconfigure(config):
    if USED in config.stash:
        _, _, path = os.environ["K3_WARM"].partition(":")
        with Path(path).open("a") as file:
            file.writelines(f"{key}\n" for key in sorted(config.stash[USED]))


def compile_only(worker: int, workers: int) -> None:
    """Let autotuners compile and load each configuration but measure none; the first that loads is used, not kept."""
    from triton.compiler.errors import CompileTimeAssertionFailure
    from triton.runtime.autotuner import Autotuner
    from triton.runtime.errors import OutOfResources, PTXASError

    prune = Autotuner.prune_configs

    def rotated(self, kwargs):
        configs = prune(self, kwargs)
        start = worker * len(configs) // workers
        return configs[start:] + configs[:start]

    def compiled(self, *args, config, **meta):
        options = {key: value for key, value in meta.items() if key != "warmup"}
        try:
            self.fn.warmup(*args, **options, **config.all_kwargs())._init_handles()
        except (OutOfResources, CompileTimeAssertionFailure, PTXASError):
            return [float("inf")] * 3
        return [1.0] * 3

    Autotuner.prune_configs, Autotuner._bench = rotated, compiled


def trace_cache() -> set[str]:
    """A set that grows with the key of every cache entry looked up from now on."""
    from triton.runtime.cache import FileCacheManager

    used: set[str] = set()
    original = FileCacheManager.__init__

    def noted(self, key, *args, **kwargs):
        used.add(key)
        original(self, key, *args, **kwargs)

    FileCacheManager.__init__ = noted
    return used
