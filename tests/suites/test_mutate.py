"""`k3-harness run --sabotage` with real processes: what is noticed, what survives, and what it never becomes."""

import json
import subprocess
import sys

import pytest
from msgspec.structs import replace

from harness.spec import Cell, Expected, Plan, Topology, load
from harness.submit import until_failure
from ledger.record import RunRecord
from tests.harness import toy as toys

REGISTRY = """
[[sabotages]]
id = "double.adds"
text = "double adds three"
file = "k3/math.py"
old = "return 2 * x"
new = "return x + 3"
claims = ["toy.double"]

[[sabotages]]
id = "double.adds_two"
text = "double adds two, which at 2 is the same"
file = "k3/math.py"
old = "return 2 * x"
new = "return x + 2"
claims = ["toy.double"]

[[sabotages]]
id = "double.crash"
text = "double kills its process"
file = "k3/math.py"
old = "return 2 * x"
new = "import os; os._exit(0)"
claims = ["toy.double"]
"""


@pytest.fixture
def toy(tmp_path):
    """The toy project with three sabotages: one noticed, one too subtle for its test, one that ends the rank."""
    made = toys.make(tmp_path)
    made.write("suites/sabotages.toml", REGISTRY)
    return made


def known(toy):
    """State, kill rate and sabotages of the toy's claim, as the ledger has them."""
    script = (
        "import json; from ledger.claims import open_judge; judge = open_judge('.');"
        "claim, topology = judge.claims.cells()[0]; status = judge.status(claim, topology);"
        "print(json.dumps([status.state, status.kill_rate, judge.sabotages(claim)]))"
    )
    asked = subprocess.run([sys.executable, "-c", script], cwd=toy.root, env=toy.env, check=True, capture_output=True)
    return json.loads(asked.stdout)


def test_rates_and_records(toy):
    """Two of three are noticed, a crash among them; the runs are of their own kind and the claim stays proven."""
    assert toy.run("run", "quick").returncode == 0
    done = toy.run("run", "quick", "--sabotage", timeout=120)
    assert "3 sabotages to run" in done.stdout, done.stdout + done.stderr
    assert "double.adds_two: toy.double SURVIVED" in done.stdout
    state, rate, found = known(toy)
    assert found == {"double.adds": True, "double.adds_two": False, "double.crash": True}
    assert (state, round(rate, 2)) == ("proven", 0.67)
    heads = [load(run / "run.json", RunRecord) for run in toy.runs]
    assert sorted(head.sabotage for head in heads) == ["", "double.adds", "double.adds_two", "double.crash"]
    assert all(head.sabotage_claims == ("toy.double",) for head in heads if head.sabotage)


def test_nothing_is_tried_twice(toy):
    """What has a verdict for these tests is not run again, one that has none is; the working tree is never edited."""
    toy.run("run", "quick")
    toy.run("run", "quick", "--sabotage", "--only", "double.adds", timeout=120)
    done = toy.run("run", "quick", "--sabotage", timeout=120)
    assert "2 sabotages to run" in done.stdout
    assert (toy.root / "k3/math.py").read_text() == toys.K3_MATH


def test_unproven_claims_are_refused(toy):
    """Where the real code does not pass, every edit would look noticed: the claim is named and nothing runs."""
    done = toy.run("run", "quick", "--sabotage")
    assert done.returncode == 2
    assert "toy.double not proven at this tree" in done.stderr
    assert toy.runs == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("return 2 * x", "return 4 * x"), "occurs 0 times"),
        (('claims = ["toy.double"]', 'claims = ["toy.triple"]'), "0 sabotages to run"),
    ],
)
def test_stale_registries_are_told(toy, change, message):
    """An edit that no longer applies stops everything by name; claims nobody makes are not run."""
    toy.run("run", "quick")
    toy.write("suites/sabotages.toml", REGISTRY.replace(*change))
    done = toy.run("run", "quick", "--sabotage")
    assert message in done.stdout + done.stderr


def test_several_ranks_of_several_claims_never_stop_early():
    """A rank may end at a failure only where nothing else is asked of it: its peers end with it."""
    topology = Topology(name="gloo2", ranks=2, backend="gloo")
    tests = ("suites/t.py::test_a",)
    cells = tuple(Cell(claim=name, topology="gloo2", action="run", reason="", tests=tests) for name in "cd")
    plan = Plan(names=(), snapshot="", claims=(), expected=(), cells=cells, sabotage="s")
    both = Expected(job="j", topology=topology, tests=tests, claims=("c", "d"))
    assert until_failure(both, plan) == {}
    assert until_failure(replace(both, claims=("c",)), plan) == {"c": tests}
