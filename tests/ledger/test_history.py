"""The mutations of `history.py` are real: each changes exactly the piece it says it does."""

import pytest

from ledger.canonical import pieces
from tests.ledger import history

SOURCE = '''"""Doc."""

LIMIT = 3
NAME, FLAG = "é", True


class Box:
    size = 2.5

    @property
    def side(self, scale=4):
        """Doc."""
        # why
        return self.size * scale

    def short(self): return 1


def outer():
    @decorated
    def inner():
        return LIMIT
    return inner
'''


def changed(path):
    before, after = pieces(SOURCE), pieces(path.read_text())
    assert set(before) == set(after)
    return {name for name in before if before[name] != after[name]}


@pytest.fixture
def path(tmp_path):
    file = tmp_path / "m.py"
    file.write_text(SOURCE)
    return file


@pytest.mark.parametrize("name", ["Box.side", "outer", "outer.<locals>.inner"])
def test_a_body_changes_alone(path, name):
    """One more statement changes that body's piece and no other."""
    history.change_body(path, name)
    assert changed(path) == {name}


def test_one_line_bodies_are_left_alone():
    """A body on its def line has no line of its own to change."""
    assert history.bodies(SOURCE) == ["Box.side", "outer", "outer.<locals>.inner"]


def test_a_constant_changes_the_module(path):
    """Constants, class attributes and defaults are each found, and changing one changes the module's piece."""
    found = history.constants(SOURCE)
    assert [node.value for node in found] == [3, "é", True, 2.5, 4]
    for node in found:
        path.write_text(SOURCE)
        history.change_constant(path, node)
        assert changed(path) == {"<module>"}
