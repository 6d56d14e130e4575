"""What every suite shares: announced paths reach the recorder, measures and data files have a twin outside a job.

Inside a harness job (`K3_JOB` is set) the recorder plugin provides `measure` and `data_file` and listens to the hook
`pytest_k3_path`; under plain pytest the twins below check their arguments and keep nothing.
"""

from __future__ import annotations

import math
import os
import sys
from pathlib import Path

import pytest

from k3.paths import listen
from suites.ranks import pytest_pyfunc_call  # noqa: F401 (the hook that runs `ranks(n)` bodies on n ranks)

IN_JOB = "K3_JOB" in os.environ


class PathHooks:
    """The hook by which an announced path leaves the test."""

    @pytest.hookspec
    def pytest_k3_path(self, item, path):
        """`path` was announced by `k3.announce` while `item` ran."""


def pytest_addhooks(pluginmanager):
    if not hasattr(pluginmanager.hook, "pytest_k3_path"):
        pluginmanager.add_hookspecs(PathHooks)


def pytest_collection_modifyitems(items):
    """Refuse fixtures of suites wider than a function: what they execute would be credited to the first test alone."""
    wide = {
        f"{item.nodeid}: {name} has {definition.scope} scope"
        for item in items
        for name, definitions in item._fixtureinfo.name2fixturedefs.items()
        for definition in definitions
        if definition.func.__module__.startswith("suites") and definition.scope != "function"
    }
    if wide:
        raise pytest.UsageError("suites take function-scoped fixtures only; narrow these: " + "; ".join(sorted(wide)))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    """Hand every announced path to the recorder; start from empty caches so that no test rides on another's."""
    _clear_caches()
    with listen(lambda path: item.config.hook.pytest_k3_path(item=item, path=path)):
        return (yield)


def _clear_caches():
    """Forget what functions of k3 and the suites remember; the ranks keep their one store for a whole job."""
    for name, module in list(sys.modules.items()):
        if name.split(".")[0] in ("k3", "suites") and name != "suites.ranks":
            for value in list(vars(module).values()):
                if callable(clear := getattr(value, "cache_clear", None)):
                    clear()


@pytest.fixture
def golden(case, data_file):
    """The golden case of a test parametrised by `case`, its files recorded as data of the test."""
    from suites.goldens import Golden

    found = Golden(case)
    for path in found.files:
        data_file(path)
    return found


@pytest.fixture
def public():
    """The folder of the public config and index: `K3_PUBLIC`, which a job's plan sets, else the handed copy."""
    folder = Path(os.environ.get("K3_PUBLIC") or Path(__file__).parents[2] / "shared/data/kimi-k3")
    if not (folder / "config.json").is_file():
        pytest.skip(f"no config.json in {folder.name}; set K3_PUBLIC to a folder with the public config and index")
    return folder


if not IN_JOB:

    @pytest.fixture
    def measure():
        """Check a measure as the recorder would, and keep nothing."""

        def check(name, unit, direction, samples, shape="", dtype="", **context):
            assert direction in ("lower", "higher"), f"measure {name!r}: direction {direction!r} is not lower or higher"
            assert samples and all(map(math.isfinite, samples)), f"measure {name!r}: {samples} are not finite samples"

        return check

    @pytest.fixture
    def data_file():
        """Return the path of a data file, which must exist."""

        def check(path):
            assert Path(path).is_file(), f"{path} is not a file; restore it from the repository"
            return Path(path)

        return check
