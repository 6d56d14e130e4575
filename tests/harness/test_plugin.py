"""What a rank writes about its tests: outcomes, numbers, paths, data and the code that was used."""

import msgspec
import pytest

from tests.harness import toy as toys

OUTCOMES = """
import os
import unittest

import pytest


@pytest.fixture
def broken():
    raise RuntimeError("no set-up")


@pytest.fixture
def messy():
    yield
    raise RuntimeError("no tear-down")


def test_passed(): pass
def test_failed(): assert 1 == 2
def test_error(broken): pass
def test_teardown_error(messy): pass
def test_failed_teardown(messy): assert 0
def test_skipped(): pytest.skip("not today")
@pytest.mark.skip(reason="never")
def test_skipped_mark(): pass
def test_xfailed(): pytest.xfail("known")
@pytest.mark.xfail
def test_xfailed_mark(): assert 0
@pytest.mark.xfail(run=False)
def test_xfailed_unrun(): pass
@pytest.mark.xfail
def test_xpassed(): pass
@pytest.mark.xfail(strict=True)
def test_failed_strict(): pass
def test_failed_subtests(subtests):
    with subtests.test("one"):
        assert 0
    with subtests.test("two"):
        pass
class TestCase(unittest.TestCase):
    def test_failed_unittest(self):
        with self.subTest("one"):
            self.fail("inside")
def test_lost(): os._exit(0)
"""
NUMBERS = '''
import math

import pytest

from k3 import announce
from k3.math import double, triple


class Half(float):
    """As numpy's scalars: a float of another type."""


def test_measure(measure):
    measure("speed", "token/s", "higher", [Half(1.5), 2], shape="4x4", dtype="float32", peer="none")
def test_nan(measure): measure("speed", "s", "lower", [math.nan])
def test_infinity(measure): measure("speed", "s", "lower", [math.inf])
def test_twice(measure):
    measure("speed", "s", "lower", [1])
    measure("speed", "s", "lower", [2])
def test_silent(measure): pass
def test_benchmark(benchmark): benchmark(double, 2)
def test_unused(benchmark): pass
def test_failing(benchmark):
    benchmark(double, 2)
    assert 0
def test_data(data_file): assert data_file("suites/data.txt").read_text() == "numbers"
def test_paths():
    announce("toy.path")
    assert double(2) == 4
def test_other(): assert triple(2) == 6
'''


def write_suite(toy, text):
    """Make `text` the toy's suite with one claim on each test in it; return the short names of the tests."""
    names = [line.split("(")[0].split()[1] for line in text.splitlines() if line.startswith("def test_")]
    names += ["TestCase::test_failed_unittest"] if "TestCase" in text else []
    toy.write("suites/many.py", text)
    toy.claim("toy.many", *(f"suites/many.py::{name}" for name in names))


def recorded(toy):
    """Run the suite as one rank; return its events by kind, the tests' ends by short name."""
    run_dir = toy.planned("toy.many")
    toy.launch(run_dir, "cpu1.many.0").communicate(timeout=60)
    stream = run_dir / "jobs" / "cpu1.many.0" / "attempts" / "0" / "rank0.jsonl"
    events = [msgspec.json.decode(line) for line in stream.read_bytes().splitlines()]
    return events, {e["test"].split("::", 1)[1]: e for e in events if e["kind"] == "test_end"}


def test_outcomes(toy):
    """Every way a test can end is told apart; only a plain pass is passed, and a test that never ends has no end."""
    write_suite(toy, OUTCOMES)
    events, ends = recorded(toy)
    assert "test_lost" not in ends
    assert events[-1] == events[-1] | {"kind": "test_start", "test": "suites/many.py::test_lost"}
    wanted = {"test_teardown_error": "error", "test_failed_teardown": "error"}
    for name, end in ends.items():
        expected = wanted.get(name) or name.split("test_")[1].split("_")[0]
        assert end["outcome"] == expected, (name, end["message"])
    assert len(ends) == 14
    assert ends["test_failed"]["message"] == "assert 1 == 2"
    assert ends["test_skipped"]["message"] == "Skipped: not today"


@pytest.fixture(scope="module")
def numbers(tmp_path_factory):
    """The recorded suite of numbers, run once."""
    toy = toys.make(tmp_path_factory.mktemp("numbers"))
    toy.write("suites/data.txt", "numbers")
    write_suite(toy, NUMBERS)
    return recorded(toy)[1]


def test_numbers(numbers):
    """Finite numbers of any type are kept as given; NaN, infinity, doubles and silence are refused by name."""
    (speed,) = numbers["test_measure"]["measures"]
    assert (speed["samples"], speed["shape"], speed["context"]) == ([1.5, 2.0], "4x4", {"peer": "none"})
    messages = {name: (end["outcome"], end["message"]) for name, end in numbers.items()}
    assert "measure 'speed': nan is not finite" in messages["test_nan"][1]
    assert "measure 'speed': inf is not finite" in messages["test_infinity"][1]
    assert "is given twice" in messages["test_twice"][1]
    assert messages["test_silent"] == messages["test_unused"]
    assert messages["test_silent"][0] == "error" and "recorded none" in messages["test_silent"][1]
    assert {messages[name][0] for name in ("test_nan", "test_infinity", "test_twice", "test_failing")} == {"failed"}


def test_benchmarks(numbers):
    """pytest-benchmark's rounds are kept with the outcome; a failing test leaves no number."""
    (duration,) = numbers["test_benchmark"]["measures"]
    assert duration["name"] == "duration" and len(duration["samples"]) >= 5
    assert numbers["test_benchmark"]["closure"]["k3/math.py::double"]
    assert numbers["test_failing"]["measures"] == []


def test_what_was_used(numbers):
    """Announced paths, data by digest, and the functions that ran: each with its own test and no other."""
    assert numbers["test_paths"]["paths"] == ["toy.path"]
    assert numbers["test_other"]["paths"] == []
    assert list(numbers["test_data"]["data"]) == ["suites/data.txt"]
    used = {name: {key for key in end["closure"] if key.startswith("k3/math.py::")} for name, end in numbers.items()}
    assert used["test_paths"] == {"k3/math.py::<module>", "k3/math.py::double"}
    assert used["test_other"] == {"k3/math.py::<module>", "k3/math.py::triple"}
