"""Numbers a test declares: the `measure` and `data_file` fixtures, and what pytest-benchmark measured.

A test that asked for a number and gave none is an error of its own kind. Time is measured in an untraced pass.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import pytest

from harness.revision import sha256
from ledger.record import Measure

MOST_SAMPLES = 1000  # of a fast benchmark's rounds, evenly spaced ones are kept, and how many there were
TIMING_FIXTURES = ("benchmark", "measure")


@dataclass
class Notes:
    """What one test left behind on this rank besides its outcome."""

    measures: list[Measure] = field(default_factory=list)
    data: dict[str, str] = field(default_factory=dict)
    paths: dict[str, None] = field(default_factory=dict)
    timing: bool = False  # inside the timed pass: only then do numbers count


NOTES = pytest.StashKey[Notes]()


def is_timed(item: pytest.Item) -> bool:
    """Whether the test declares a number."""
    return any(name in TIMING_FIXTURES for name in getattr(item, "fixturenames", ()))


def take_benchmark(item: pytest.Item) -> None:
    """Keep what pytest-benchmark measured in this test, in the timed pass."""
    fixture = (getattr(item, "funcargs", None) or {}).get("benchmark")
    notes = item.stash[NOTES]
    if fixture is None or fixture.stats is None or not notes.timing:
        return
    context = dict(fixture.extra_info)
    shape, dtype = str(context.pop("shape", "")), str(context.pop("dtype", ""))
    rounds = fixture.stats.stats.data
    samples = rounds[:: -(-len(rounds) // MOST_SAMPLES)]
    context["rounds"] = len(rounds)
    notes.measures.append(Measure.of("duration", "s", "lower", samples, shape=shape, dtype=dtype, context=context))


class NumberFixtures:
    """Registered as a plugin in a job; suites/conftest.py holds the twins for a run outside one."""

    def __init__(self, tree: Path):
        self.tree = tree

    @pytest.fixture
    def measure(self, request):
        """Record a quantity: measure(name, unit, direction, samples, shape=, dtype=, **context)."""
        notes = request.node.stash[NOTES]

        def record(name, unit, direction, samples, shape="", dtype="", **context):
            value = Measure.of(name, unit, direction, samples, shape=shape, dtype=dtype, context=context)
            if any((m.name, m.shape, m.dtype) == (name, shape, dtype) for m in notes.measures):
                raise ValueError(f"measure {name!r} {shape} {dtype} is given twice; pass all samples at once")
            if notes.timing:
                notes.measures.append(value)

        return record

    @pytest.fixture
    def data_file(self, request):
        """Use a data file: records its SHA-256 as part of what the test used, and returns its path."""
        notes = request.node.stash[NOTES]

        def use(path):
            path = Path(path)
            whole = path if path.is_absolute() else self.tree / path
            inside = whole.resolve().is_relative_to(self.tree.resolve())
            name = str(whole.resolve().relative_to(self.tree.resolve())) if inside else f"input:{whole.name}"
            notes.data[name] = sha256(whole)
            return whole

        return use
