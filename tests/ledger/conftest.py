"""A little project, a state folder of its own, and a ledger, for every test of this folder."""

import pytest

from ledger.ingest import ingest
from tests.ledger import make


@pytest.fixture(autouse=True)
def state(tmp_path, monkeypatch):
    """Keys, cache and default ledger live in the test's own folder."""
    monkeypatch.setenv("K3_STATE_DIR", str(tmp_path / "state"))
    return tmp_path / "state"


@pytest.fixture
def root(tmp_path):
    return make.project(tmp_path / "project")


@pytest.fixture
def spool(tmp_path):
    return tmp_path / "state" / "runs"


@pytest.fixture
def ledger(tmp_path):
    return tmp_path / "ledger.db"


@pytest.fixture
def clean(root, spool, ledger):
    """A clean run of one cell, written and ingested."""
    made = make.run(root, spool)
    ingest(made.write(), ledger)
    return made


@pytest.fixture(params=["cold", "warm"])
def cold_and_warm(request, monkeypatch):
    """Every attack twice: on files just written, which are always read, and as if all had been remembered long ago."""
    if request.param == "warm":
        monkeypatch.setattr("ledger.memory.RACY_NS", 0)
