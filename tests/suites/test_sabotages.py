"""Every sabotage is a real, single, parsing edit of the present tree, and every claim has enough of them."""

from pathlib import Path

import pytest

from harness import sabotage
from harness.spec import HarnessError
from ledger import claimfile

ROOT = Path(__file__).parents[2]


@pytest.fixture
def edit():
    """A sabotage with some fields of one's own."""

    def make(**fields):
        base = {"id": "x", "text": "t", "file": "f.py", "old": "a + b", "new": "a - b", "claims": ("c",)}
        return sabotage.Sabotage(**(base | fields))

    return make


def test_registry_applies():
    """Each edit applies exactly once to the tree as it is, changes code and parses; no claim has fewer than three."""
    claims = claimfile.load(ROOT).claims
    assert sabotage.faults(sabotage.read(ROOT), ROOT, list(claims)) == []


def test_registry_is_large():
    """At least sixty sabotages, each with a sentence of its own."""
    found = sabotage.read(ROOT)
    assert len(found) >= 60
    assert len({entry.text for entry in found.values()}) == len(found)


def test_edit_is_exact(edit):
    """Only the named text changes, inside the named function."""
    source = "def f(a, b):\n    return a + b\n\n\ndef g(a, b):\n    return a + b\n"
    assert sabotage.edited(edit(within="g"), source) == source[:32] + source[32:].replace("a + b", "a - b")


@pytest.mark.parametrize(
    ("fields", "source", "message"),
    [
        ({}, "def f(a, b):\n    return a * b\n", "0 times"),
        ({}, "x = a + b\ny = a + b\n", "2 times"),
        ({"within": "h"}, "x = a + b\n", "defined 0 times"),
        ({"new": "a +"}, "x = a + b\n", "does not parse"),
        ({"new": "a + b  # wrong"}, "x = a + b\n", "changes no code"),
    ],
)
def test_useless_edits_are_refused(edit, fields, source, message):
    """An edit that misses, is ambiguous, does not parse or changes nothing is refused by name."""
    with pytest.raises(HarnessError, match=message):
        sabotage.edited(edit(**fields), source)


def test_apply_leaves_the_original_alone(edit, tmp_path):
    """A copy made of hard links is edited without touching the file it came from."""
    (tmp_path / "real.py").write_text("x = a + b\n")
    (tmp_path / "copy").mkdir()
    (tmp_path / "copy" / "f.py").hardlink_to(tmp_path / "real.py")
    sabotage.apply(edit(), tmp_path / "copy")
    assert (tmp_path / "real.py").read_text() == "x = a + b\n"
    assert (tmp_path / "copy" / "f.py").read_text() == "x = a - b\n"


def test_faults_are_complete(edit, tmp_path):
    """Unknown claims, missing files and claims with too few edits are all told at once."""
    found = sabotage.faults({"x": edit(claims=("nobody",))}, tmp_path, ["c"])
    assert len(found) == 3
