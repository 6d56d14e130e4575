"""Benchmarks in fresh processes: in turn with another commit, or beside a peer, with a verdict by the exact test."""

import json
import subprocess

import pytest

from tests.harness import toy as toys

SUITE = '''
"""The toy's benchmark: what k3 costs, and a peer that costs 2."""
from k3.math import COST


def test_cost(measure):
    measure("cost", "s", "lower", [COST], peers={"the other library": [2.0]})
'''


@pytest.fixture
def toy(tmp_path):
    """A tree under git whose second commit costs three times as much."""
    made = toys.make(tmp_path)
    made.write("suites/bench_toy.py", SUITE)
    made.claim("bench.toy", "suites/bench_toy.py::test_cost")
    for cost in (1.0, 3.0):
        made.write("k3/math.py", f"{toys.K3_MATH}\nCOST = {cost}\n")
        for words in (["init", "-q"], ["add", "-A"], ["commit", "-qm", f"cost {cost}"]):
            who = ["-c", "user.name=t", "-c", "user.email=t@example.org"]
            subprocess.run(["git", *who, *words], cwd=made.root, check=True)
    return made


def test_against_another_commit(toy):
    """Six processes of each side, in turn: the change is found, and stays unconfirmed until it is seen once more."""
    pytest.importorskip("scipy", reason="comparing needs the extra `analysis`")
    done = toy.run("bench", "bench.toy", "--against", "HEAD~1", "--json", timeout=180)
    assert done.returncode == 1, done.stdout + done.stderr
    (row,) = json.loads(done.stdout)
    assert (row["verdict"], row["processes"]) == ("slower-unconfirmed", 6)
    assert row["ratio"] == pytest.approx(3.0)
    assert len(toy.runs) == 12
    assert subprocess.run(["git", "worktree", "list"], cwd=toy.root, capture_output=True).stdout.count(b"\n") == 1


def test_beside_a_peer(toy):
    """Without another commit the peer of the same processes is what this tree is compared with."""
    done = toy.run("bench", "bench.toy", "--processes", "1", "--json")
    (row,) = json.loads(done.stdout)
    assert (row["against"], row["verdict"], row["ratio"]) == ("the other library", "cannot-tell", pytest.approx(1.5))
    assert row["reason"] == "1 pairs of processes, 6 are needed"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "bench what?"),
        (["bench.toy", "--against", "nowhere"], "invalid reference: nowhere"),
        (["bench.toy", "--processes", "0"], "at least one process"),
        (["bench.toi"], "did you mean"),
    ],
)
def test_refused(toy, arguments, words):
    """What cannot be timed is told in a line, and no run is left behind."""
    done = toy.run("bench", *arguments)
    assert done.returncode == 2 and words in done.stderr, done.stderr
    assert not toy.runs
