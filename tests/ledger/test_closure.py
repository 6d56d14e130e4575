"""The closure: which files and pieces a test is charged with, from files and lines alone."""

from pathlib import Path

import pytest

from ledger.canonical import parse
from ledger.closure import static_files, test_closure

ROOT = Path(__file__).resolve().parents[2]
FILES = {
    "k3/__init__.py": 'LAZY = {"Model": "k3.model", "build": ("k3.build", "build")}\n\n\n'
    "def __getattr__(name):\n    import importlib\n    return importlib.import_module(LAZY[name])\n",
    "k3/model.py": "from typing import TYPE_CHECKING\nfrom . import ops\nif TYPE_CHECKING:\n    import k3.typed\n\n\n"
    "def forward(x):\n    from k3.parallel import context\n    return ops.add(x)\n\n\ndef other():\n    return 1\n",
    "k3/ops/__init__.py": "from k3.ops.sum import add\n",
    "k3/ops/sum.py": "def add(x):\n    return x\n",
    "k3/parallel/__init__.py": "",
    "k3/parallel/context.py": "def gather():\n    return 2\n",
    "k3/typed.py": "",
    "k3/build.py": "def build():\n    return 3\n",
    "k3/kernel.py": "from k3.tables import lookup\n\n\n@jit\ndef kernel():\n    return lookup()\n",
    "k3/tables.py": "def make():\n    return {}\n\n\nTABLE = make()\n\n\ndef lookup():\n    return TABLE\n",
    "suites/conftest.py": "def fixture():\n    return 1\n",
    "suites/a.py": "from k3 import Model\n\n\ndef test_a():\n    assert 1\n",
    "suites/b.py": "import k3.kernel\n\n\ndef test_b():\n    assert 1\n",
}


@pytest.fixture
def tree(tmp_path):
    for path, text in FILES.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    return tmp_path


def test_lazy_names_lead_to_their_module(tree):
    """`from k3 import Model` reaches the module that the lazy table names, and no other."""
    found = static_files(tree, ["suites/a.py"], {})
    assert {"k3/__init__.py", "k3/model.py", "k3/ops/__init__.py", "k3/ops/sum.py"} <= found
    assert not {"k3/build.py", "k3/typed.py", "k3/parallel/context.py"} & found


def test_imports_inside_functions_need_the_function(tree):
    """An import in a body counts once that body ran; without knowing what ran, it counts always."""
    assert "k3/parallel/context.py" in static_files(tree, ["suites/a.py"], {"k3/model.py": {"forward"}})
    assert "k3/parallel/context.py" in static_files(tree, ["suites/a.py"])
    assert "k3/parallel/context.py" not in static_files(tree, ["suites/a.py"], {"k3/model.py": {"other"}})


def test_closure_holds_bodies_that_ran_and_module_levels(tree):
    """Executed bodies, every reachable module level, the test and its conftest; nothing else."""
    found = test_closure(tree, "suites/a.py", {"k3/model.py": [7, 13], "suites/a.py": [5], "suites/conftest.py": [1]})
    assert set(found) == {
        "k3/__init__.py::<module>", "k3/model.py::<module>", "k3/model.py::other", "k3/ops/__init__.py::<module>",
        "k3/ops/sum.py::<module>", "suites/a.py::<module>", "suites/a.py::test_a", "suites/conftest.py::<module>",
    }  # fmt: skip


def test_closure_holds_untraceable_bodies_and_their_callees(tree):
    """A kernel counts without being traced, and so does what it calls in another file."""
    found = test_closure(tree, "suites/b.py", {"suites/b.py": [5]})
    assert {"k3/kernel.py::kernel", "k3/tables.py::lookup"} <= set(found)


def test_closure_holds_what_ran_while_importing(tree):
    """A body that ran at import time counts for every test that can reach the file."""
    found = test_closure(tree, "suites/b.py", {}, {"k3/tables.py": [2, 5], "k3/build.py": [2]})
    assert "k3/tables.py::make" in found
    assert "k3/build.py::build" not in found


def test_harness_and_ledger_are_not_the_subject(tree):
    """Lines of the recorder's own files are not charged to a test."""
    (tree / "harness").mkdir()
    (tree / "harness" / "job.py").write_text("def run():\n    return 1\n")
    assert not [key for key in test_closure(tree, "suites/a.py", {"harness/job.py": [2]}) if "harness" in key]


def test_only_shared_tokens_reach_context_parallelism():
    """In this very tree no suite reaches `context.py` but through the one function that shares tokens out, and every
    body there is seen by the tracer: an edit expires the cells that ran it, and no others."""
    every = {
        path.relative_to(ROOT).as_posix(): {f.qualname for f in parse(path.read_text()).functions}
        for package in ("k3", "suites")
        for path in (ROOT / package).rglob("*.py")
    }
    every["k3/parallel/layouts.py"] -= {"_share"}
    suites = [file for file in every if file.startswith("suites/")]
    assert "k3/parallel/layouts.py" in static_files(ROOT, suites, every)
    assert "k3/parallel/context.py" not in static_files(ROOT, suites, every)
    assert parse((ROOT / "k3/parallel/context.py").read_text()).untraceable == frozenset()
