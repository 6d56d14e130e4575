"""Who may import whom, read from the source: packages, the math files of `k3`, and what must stay free of torch."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
OURS = {"k3", "harness", "suites", "ledger"}
ALLOWED = {"k3": set(), "ledger": set(), "harness": {"ledger"}, "suites": {"k3", "harness", "ledger"}}
MATH = ("model", "kda", "mla", "moe", "residual", "layers")
LAZY = {"torch", "fla", "triton", "transformers", "megatron", "einops", "flash_kda"}


def imports(path: Path, top_level_only: bool = False) -> set[str]:
    """Absolute names a file imports; at module level only, if asked, TYPE_CHECKING blocks never."""
    tree = ast.parse(path.read_text())
    checked = [n for n in ast.walk(tree) if isinstance(n, ast.If) and "TYPE_CHECKING" in ast.dump(n.test)]
    if top_level_only:
        checked += [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
    skipped = {id(inner) for node in checked for inner in ast.walk(node)}
    found = set()
    for node in ast.walk(tree):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


def packages(names: set[str]) -> set[str]:
    return {name.split(".")[0] for name in names}


def files(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


@pytest.mark.parametrize("package", sorted(OURS))
def test_packages(package):
    """A package imports only those of ours that it may; nothing imports the tests."""
    for path in files(package):
        strange = packages(imports(path)) & (OURS | {"tests"}) - {package} - ALLOWED[package]
        assert not strange, f"{path.relative_to(ROOT)} imports {strange}"


@pytest.mark.parametrize("module", MATH)
def test_math_knows_no_ranks(module):
    """The equations import neither torch.distributed nor k3.parallel, not even inside a function."""
    names = imports(ROOT / "k3" / f"{module}.py")
    assert not [name for name in names if name.startswith(("torch.distributed", "k3.parallel", "k3.sharding"))]


def test_operations_know_no_model():
    """k3/ops imports of k3 only itself, the path hook and the precision rule."""
    for path in files("k3/ops"):
        ours = {name for name in imports(path) if name.startswith("k3.")}
        strange = [name for name in ours if not name.startswith(("k3.ops", "k3.paths", "k3.precision"))]
        assert not strange, f"{path.name} imports {strange}"


def test_optional_packages_are_imported_at_the_point_of_use():
    """No module of k3 imports fla, triton, transformers or megatron at its top, but those named after them."""
    own = ("huggingface.py", "triton_", "fla_", "cute_", "gluon_")
    for path in files("k3"):
        if path.name.startswith(own):
            continue
        found = packages(imports(path, top_level_only=True)) & (LAZY - {"torch"})
        assert not found, f"{path.relative_to(ROOT)} imports {found} at its top"


def reached(start: str) -> set[Path]:
    """Files of ours that importing module `start` executes, by module-level imports."""
    waiting, done = [start], set()
    while waiting:
        parts = waiting.pop().split(".")
        for depth in range(1, len(parts) + 1):
            base = ROOT.joinpath(*parts[:depth])
            path = next((p for p in (base / "__init__.py", base.with_suffix(".py")) if p.is_file()), None)
            if path and path not in done and parts[0] in OURS:
                done.add(path)
                waiting += imports(path, top_level_only=True)
    return done


@pytest.mark.parametrize("module", ["k3", "k3.layout", "k3.checkpoint.index", "k3.config", "ledger"])
def test_torch_free(module):
    """Importing these executes no module-level import of torch, however far it leads."""
    found = [str(p.relative_to(ROOT)) for p in reached(module) if "torch" in packages(imports(p, top_level_only=True))]
    assert not found


def test_the_rules_bite(tmp_path):
    """The reader sees imports inside functions, in `from` lists and under plain ifs, and skips TYPE_CHECKING."""
    path = tmp_path / "m.py"
    path.write_text(
        "import a.b\nfrom c import d\nif TYPE_CHECKING:\n    import e\ndef f():\n    import g\nif x:\n    import h\n"
    )
    assert imports(path) == {"a.b", "c", "c.d", "g", "h"}
    assert imports(path, top_level_only=True) == {"a.b", "c", "c.d", "h"}
