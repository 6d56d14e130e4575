"""The closure of a test: the pieces of the subject it used, and the files those can be reached from.

Reads files and syntax trees only; it never imports what it describes. Hashing is `canonical.py`'s.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from ledger.canonical import FUNCTIONS, MODULE, executed, parse, pieces, referenced, simple_name

__all__ = ["executed", "pieces", "static_files", "test_closure", "is_subject", "read_source"]

# Only these packages are the subject; harness and ledger carry a recorder version instead.
SUBJECT = ("k3", "suites")


def is_subject(path: str) -> bool:
    """Whether a root-relative path is Python source of the subject."""
    return path.endswith(".py") and path.split("/")[0] in SUBJECT


def test_closure(
    root: Path,
    test_file: str,
    lines: Mapping[str, Iterable[int]],
    import_lines: Mapping[str, Iterable[int]] | None = None,
) -> dict[str, str]:
    """Return {'file::qualname': hash} of everything one test used.

    `lines` are the executed lines per root-relative file in this test's own coverage context; `import_lines` those
    run outside every test (while modules were imported): they count for files the test can reach statically.
    """
    ran = _ran(root, lines)
    at_import = _ran(root, import_lines or {})
    starts = {test_file, *_around(root, test_file), *ran}
    files = static_files(root, starts, _union(ran, at_import))
    closure: dict[str, str] = {}
    callers = _hidden_callers(root, files)
    for file in sorted(files | set(ran)):
        source = parse(read_source(root / file))
        hidden = source.untraceable | _called_from_hidden(root, file, callers)
        used = {MODULE} | ran.get(file, set()) | at_import.get(file, set()) | hidden
        closure |= {f"{file}::{name}": source.pieces[name] for name in sorted(used)}
    return closure


test_closure.__test__ = False  # pytest collects functions by this name when a test module imports it


def _ran(root: Path, lines: Mapping[str, Iterable[int]]) -> dict[str, set[str]]:
    found = {file: executed(read_source(root / file), numbers) for file, numbers in lines.items() if is_subject(file)}
    return {file: names for file, names in found.items() if names}


def _union(left: Mapping[str, set[str]], right: Mapping[str, set[str]]) -> dict[str, set[str]]:
    return {file: left.get(file, set()) | right.get(file, set()) for file in {*left, *right}}


def _around(root: Path, test_file: str) -> set[str]:
    """What Python and pytest load with a test file: the packages and conftests it lies in."""
    folders = Path(test_file).parents
    candidates = {(folder / name).as_posix() for folder in folders for name in ("conftest.py", "__init__.py")}
    return {path for path in candidates if is_subject(path) and (root / path).is_file()}


def _hidden_callers(root: Path, files: set[str]) -> dict[str, tuple[frozenset[str], set[str]]]:
    """Files with hidden bodies: the names these refer to, and the files that each one imports."""
    names = {file: _hidden_names(read_source(root / file)) for file in files}
    return {file: (found, direct_imports(root, file, None)) for file, found in names.items() if found}


def _called_from_hidden(root: Path, file: str, callers: Mapping[str, tuple[frozenset[str], set[str]]]) -> set[str]:
    """Functions of `file` that a hidden body in a file importing it refers to by name."""
    others = [found for other, found in callers.items() if other != file]
    wanted = frozenset().union(*(names for names, imported in others if file in imported))
    return {f.qualname for f in parse(read_source(root / file)).functions if f.name in wanted}


@lru_cache(maxsize=1024)
def _hidden_names(text: str) -> frozenset[str]:
    """Every name that the hidden bodies of a file refer to."""
    source = parse(text)
    hidden = [f for f in source.functions if f.qualname in source.untraceable]
    return frozenset().union(*(referenced(f.node) for f in hidden))


@lru_cache(maxsize=1024)
def _read(path: str, mtime_ns: int, size: int) -> str:
    return Path(path).read_text(encoding="utf-8")


def read_source(path: Path) -> str:
    """Read a source file, once per (path, mtime, size)."""
    stat = path.stat()
    return _read(str(path), stat.st_mtime_ns, stat.st_size)


# --- static imports -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Import:
    """One import in a file: absolute dotted module, the name taken from it, and the function it is inside of."""

    module: str
    name: str
    scope: str  # qualified name of the enclosing function; '' at module level


def static_files(
    root: Path, start_files: Iterable[str], executed_names: Mapping[str, set[str]] | None = None
) -> set[str]:
    """Return the subject files reachable from `start_files` through imports, without importing anything.

    An import inside a function is followed only if that function is in `executed_names` for its file; with None,
    all are followed. Imports under `TYPE_CHECKING` are not.
    """
    todo = [file for file in start_files if is_subject(file) and (root / file).is_file()]
    reached = set(todo)
    while todo:
        file = todo.pop()
        scopes = None if executed_names is None else executed_names.get(file, set())
        fresh = direct_imports(root, file, scopes) - reached
        reached |= fresh
        todo += sorted(fresh)
    return reached


def direct_imports(root: Path, file: str, scopes: set[str] | None) -> set[str]:
    """Subject files that `file` imports, packages on the way included."""
    found: set[str] = set()
    for item in _imports(read_source(root / file), file):
        if not item.scope or scopes is None or item.scope in scopes:
            found |= _resolve(root, item.module, item.name)
    return found


@lru_cache(maxsize=1024)
def _imports(text: str, file: str) -> tuple[Import, ...]:
    return tuple(_walk_imports(parse(text).tree, _package(file), "", ""))


def _package(file: str) -> str:
    return ".".join(Path(file).parent.parts)


def _walk_imports(node: ast.AST, package: str, prefix: str, scope: str):
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and simple_name(child.test) == "TYPE_CHECKING":
            for branch in child.orelse:
                yield from _walk_imports(ast.Module([branch], []), package, prefix, scope)
        elif isinstance(child, FUNCTIONS):
            name = prefix + child.name
            yield from _walk_imports(child, package, f"{name}.<locals>.", name)
        elif isinstance(child, ast.ClassDef):
            yield from _walk_imports(child, package, f"{prefix}{child.name}.", scope)
        else:
            yield from _imported_by(child, package, scope)
            yield from _walk_imports(child, package, prefix, scope)


def _imported_by(node: ast.AST, package: str, scope: str):
    if isinstance(node, ast.Import):
        yield from (Import(alias.name, "", scope) for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        module = _absolute(package, node.level, node.module or "")
        yield from (Import(module, alias.name, scope) for alias in node.names)
    elif isinstance(node, ast.Call) and simple_name(node.func) in ("import_module", "__import__") and node.args:
        argument = node.args[0]
        if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
            level = len(argument.value) - len(argument.value.lstrip("."))
            yield Import(_absolute(package, level, argument.value.lstrip(".")), "", scope)


def _absolute(package: str, level: int, module: str) -> str:
    if not level:
        return module
    parts = package.split(".")
    base = parts[: len(parts) - level + 1]
    return ".".join([*base, module] if module else base)


def _resolve(root: Path, module: str, name: str) -> set[str]:
    if module.split(".")[0] not in SUBJECT:
        return set()
    parts = module.split(".")
    found = {path for end in range(1, len(parts) + 1) if (path := _file_of(root, parts[:end]))}
    if name == "*" or not name:
        return found
    below = _file_of(root, [*parts, name])
    if below:
        return found | {below}
    return found | _lazy(root, module, name)


def _file_of(root: Path, parts: list[str]) -> str:
    base = "/".join(parts)
    return next((path for path in (f"{base}/__init__.py", f"{base}.py") if (root / path).is_file()), "")


def _lazy(root: Path, module: str, name: str) -> set[str]:
    """Files behind a lazily exported `name`: a package whose literal table of names maps it to a module."""
    file = _file_of(root, module.split("."))
    if not file.endswith("__init__.py"):
        return set()
    found: set[str] = set()
    for target in _lazy_targets(read_source(root / file), name):
        absolute = _absolute(module, 1, target.lstrip(".")) if target.startswith(".") else target
        for candidate in {absolute, f"{module}.{target}"}:
            parts = candidate.split(".")
            found |= {path for end in range(1, len(parts) + 1) if (path := _file_of(root, parts[:end]))}
    return {path for path in found if is_subject(path)}


@lru_cache(maxsize=4096)
def _lazy_targets(text: str, name: str) -> tuple[str, ...]:
    targets: list[str] = []
    for node in ast.walk(parse(text).tree):
        if isinstance(node, ast.Dict):
            for key, value in zip(node.keys, node.values, strict=True):
                keys, values = _strings(key), _strings(value)
                targets += values if name in keys else keys if name in values else []
    return tuple(t for t in dict.fromkeys(targets) if t.replace(".", "").isidentifier())


def _strings(node: ast.AST | None) -> list[str]:
    if node is None:
        return []
    return [n.value for n in ast.walk(node) if isinstance(n, ast.Constant) and isinstance(n.value, str)]
