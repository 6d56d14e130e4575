"""claims.toml and the suites agree: every claimed test is collected, and no suite keeps unclaimed tests to itself."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from harness.discover import discover
from ledger import claimfile

ROOT = Path(__file__).parents[2]
QUICK_TOPOLOGIES = {"cpu1", "gloo2", "gloo4"}


@pytest.fixture
def claims():
    return claimfile.load(ROOT).claims


def test_every_claimed_test_is_collected(claims):
    """Each entry of each claim selects at least one test that pytest collects, at the world size of its topologies."""
    topologies = claimfile.load(ROOT).topologies
    found = discover(ROOT, sorted({test.split("::")[0] for claim in claims.values() for test in claim.tests}))
    assert not found.errors
    for claim in claims.values():
        for test in claim.tests:
            items = found.select(test)
            assert items, f"{claim.id}: {test} selects nothing"
            for topology in claim.topologies:
                ranks = topologies[topology].ranks
                assert all(not item.ranks or ranks in item.ranks for item in items), f"{claim.id}: {test} on {topology}"


def test_quick_is_what_it_says(claims):
    """`quick` runs on a CPU alone, and on one, two and four ranks."""
    quick = [claim for claim in claims.values() if "quick" in claim.suites]
    assert {name for claim in quick for name in claim.topologies} == QUICK_TOPOLOGIES


def test_ids_are_unique_sentences(claims):
    """No two claims say the same, and each says it in one sentence without a full stop."""
    texts = [claim.text for claim in claims.values()]
    assert len(set(texts)) == len(texts)
    assert not [text for text in texts if text.endswith(".")]


SUITE = """
import pytest

@pytest.fixture{scope}
def shared():
    return 1

def test_shared(shared):
    from k3 import announce
    announce("torch.something")
"""
PLUGIN = """
import pytest

@pytest.hookimpl(optionalhook=True)
def pytest_k3_path(item, path):
    print(f"HEARD {item.name} {path}")
"""


@pytest.fixture
def run_suite(tmp_path):
    """Run a suite module of one's own beside the real conftest, and return the finished process."""

    def run(body: str, **env):
        (tmp_path / "suites").mkdir()
        for path in (ROOT / "suites").glob("*.py"):
            (tmp_path / "suites" / path.name).symlink_to(path)
        (tmp_path / "suites" / "own.py").write_text(body)
        (tmp_path / "listening.py").write_text(PLUGIN)
        command = [sys.executable, "-m", "pytest", "-q", "-s", "-plistening", "suites/own.py", f"--rootdir={tmp_path}"]
        paths = f"{tmp_path}{os.pathsep}{ROOT}"
        return subprocess.run(
            [*command, f"-c{ROOT / 'pyproject.toml'}", "-pno:cacheprovider"], cwd=tmp_path, text=True, check=False,
            capture_output=True, env={**os.environ, "PYTHONPATH": paths, **env},
        )  # fmt: skip

    return run


def test_announced_paths_reach_a_listener(run_suite):
    """What `k3` announces inside a test reaches every plugin that implements the hook, with the test's name."""
    done = run_suite(SUITE.format(scope=""))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "HEARD test_shared torch.something" in done.stdout


def test_wide_fixtures_are_refused(run_suite):
    """A module-scoped fixture in a suite stops collection with its name: it would hide what later tests execute."""
    done = run_suite(SUITE.format(scope="(scope='module')"))
    assert done.returncode == 4
    assert "shared has module scope" in done.stdout + done.stderr


def test_twins_check_measures(run_suite):
    """Outside a job a measure is checked as the recorder would: NaN is refused."""
    body = "def test_nan(measure):\n    measure('x', 's', 'lower', [float('nan')])\n"
    assert run_suite(body).returncode == 1
