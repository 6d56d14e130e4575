"""Fixtures of the harness tests: a toy project, with its state folder in place of the user's."""

import pytest

from tests.harness import toy as toys


@pytest.fixture
def toy(tmp_path, monkeypatch):
    """A small project tree of its own."""
    made = toys.make(tmp_path)
    monkeypatch.setenv("K3_STATE_DIR", str(made.state))
    monkeypatch.chdir(made.root)
    return made
