"""Fixtures of the harness tests: a toy project, with its state folder in place of the user's."""

import subprocess

import pytest

from tests.harness import toy as toys


@pytest.fixture
def toy(tmp_path, monkeypatch):
    """A small project tree of its own."""
    made = toys.make(tmp_path)
    monkeypatch.setenv("K3_STATE_DIR", str(made.state))
    monkeypatch.chdir(made.root)
    return made


@pytest.fixture
def small_disk(tmp_path):
    """A disk of 4 MiB; skipped by name where mounting is not allowed."""
    place = tmp_path / "disk"
    place.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", place], capture_output=True, check=False)
    if done.returncode:
        pytest.skip("mounting a tmpfs needs root")
    yield place
    subprocess.run(["umount", place], check=True)
