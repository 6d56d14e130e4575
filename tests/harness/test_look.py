"""`k3-harness plan` reads the tree as it lies: the same plan as from a copy, and nothing collected twice."""

import argparse

import pytest

from harness import planning, revision
from harness.discover import Discovery
from ledger.memory import Memory


@pytest.fixture
def plan(toy, monkeypatch):
    """Plan the toy as `k3-harness plan` does, in this process; counts the collections."""
    monkeypatch.chdir(toy.root)
    monkeypatch.setenv("K3_STATE_DIR", str(toy.state))
    calls, real = [], planning.discover

    def counted(tree, files) -> Discovery:
        calls.append(tree)
        return real(tree, files)

    monkeypatch.setattr(planning, "discover", counted)

    def run():
        calls.clear()
        made = planning.look(argparse.Namespace(names=[], cluster="local", all=False, budget="", ledger=None))
        return made, len(calls)

    return run


def test_a_look_is_a_snapshot(toy, tmp_path):
    """Hashed in place, the tree has the identity that its copy has."""
    toy.write("suites/untracked.txt", "data")
    seen = revision.look(toy.root, Memory(toy.root).digest)
    assert seen.hash == revision.take(toy.root, tmp_path / "copy").hash


def test_collected_once(toy, plan):
    """The second plan of a tree starts no pytest and says the same; nothing of either is left behind."""
    first, collections = plan()
    assert ([cell.action for cell in first.cells], collections) == (["run"], 1)
    assert plan() == (first, 0)
    assert not (toy.state / "runs").exists()


def test_an_edit_is_collected_again(toy, plan):
    """Another test file, another answer: what was collected before does not hide a renamed test."""
    plan()
    toy.write("suites/toy.py", (toy.root / "suites/toy.py").read_text().replace("def test_double", "def test_twice"))
    made, collections = plan()
    assert ([cell.action for cell in made.cells], collections) == (["broken"], 1)


def test_a_fault_is_not_remembered(toy, plan):
    """A file that cannot be collected is tried again each time: what it lacked may be installed by then."""
    toy.write("suites/toy.py", "import nothing_of_that_name\n\n\ndef test_double(): pass\n")
    for _ in range(2):
        made, collections = plan()
        assert ([cell.action for cell in made.cells], collections) == (["broken"], 1)
