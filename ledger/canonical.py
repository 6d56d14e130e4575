"""Canonical hashes of Python source: what a piece of code means, without where or how it is written.

Owns the walk of the syntax tree (no positions, comments, docstrings or empty fields; the same bytes on Python
3.11 to 3.14), the split of a file into pieces, and the map from executed lines to pieces. Which pieces make up a
test's closure is `closure.py`'s business.
"""

from __future__ import annotations

import ast
import hashlib
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache

MODULE = "<module>"
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
# Written by the parser for reasons other than meaning, or absent from some supported version.
IGNORED_FIELDS = frozenset({"ctx", "kind", "type_comment", "type_ignores"})
# A decorator with one of these in its name hides the body from Python's tracer, or lets an earlier test run it.
UNTRACEABLE_DECORATORS = re.compile(
    r"\b(jit|compile|custom_op|triton_op|cache|lru_cache|cached_property|register_(autograd|fake|kernel|vmap))\b"
)
# A function handed to one of these may be called from a thread that has no tracer, or be compiled.
UNTRACEABLE_CALLS = re.compile(r"^(register_\w*hook|register_(autograd|fake|kernel)|compile|jit)$")
BACKWARD_METHODS = frozenset({"backward", "vjp", "jvp", "setup_context"})


@dataclass(frozen=True)
class Function:
    """One function definition: its piece name, its body's lines, and what it calls by simple name."""

    qualname: str
    node: ast.AST
    owner_bases: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return self.node.name

    @property
    def lines(self) -> range:
        return range(_first_line(self.node.body[0]), self.node.body[-1].end_lineno + 1)


@dataclass
class Source:
    """A parsed file: the hash of each piece and what is needed to attribute executed lines to pieces."""

    pieces: dict[str, str]
    functions: list[Function]
    tree: ast.Module
    untraceable: frozenset[str] = field(default_factory=frozenset)


@lru_cache(maxsize=512)
def parse(text: str) -> Source:
    """Parse one file. Raises SyntaxError as `ast.parse` does."""
    tree = ast.parse(text)
    functions = list(_functions(tree))
    return Source(_pieces(tree, functions), functions, tree, frozenset(_untraceable(tree, functions)))


def pieces(source: str) -> dict[str, str]:
    """Hash each piece of `source`: every function body by qualified name, and `<module>` for all the rest.

    `<module>` holds constants, class bodies, decorators, defaults and signatures. Definitions that share a
    qualified name (overloads, property setters, branches) are hashed together, in order.
    """
    return dict(parse(source).pieces)


def executed(source: str, lines: Iterable[int]) -> set[str]:
    """Return the pieces whose body holds at least one of the executed `lines`; module-level lines give none."""
    owners = _owners(parse(source).functions)
    return {name for line in lines for name in owners.get(line, ())}


def _owners(functions: list[Function]) -> dict[int, set[str]]:
    """Map each body line to its innermost function; a body on its own `def` line shares it with the outer one."""
    owners: dict[int, set[str]] = {}
    for function in functions:  # outer before inner
        for line in function.lines:
            outer = owners.get(line, set()) if line == function.node.lineno else set()
            owners[line] = outer | {function.qualname}
    return owners


def _first_line(statement: ast.stmt) -> int:
    return min([statement.lineno, *(d.lineno for d in getattr(statement, "decorator_list", ()))])


def _functions(node: ast.AST, prefix: str = "", bases: tuple[str, ...] = ()) -> Iterator[Function]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, FUNCTIONS):
            qualname = prefix + child.name
            yield Function(qualname, child, bases)
            yield from _functions(child, f"{qualname}.<locals>.")
        elif isinstance(child, ast.ClassDef):
            names = tuple(ast.unparse(base) for base in child.bases)
            yield from _functions(child, f"{prefix}{child.name}.", names)
        else:
            yield from _functions(child, prefix, bases)


def _pieces(tree: ast.Module, functions: list[Function]) -> dict[str, str]:
    parts: dict[str, list[str]] = {MODULE: [canonical(tree)]}
    for function in functions:
        parts.setdefault(function.qualname, []).append(canonical(_without_docstring(function.node.body)))
    return {name: hashlib.sha256("\n".join(texts).encode()).hexdigest()[:32] for name, texts in parts.items()}


def canonical(value: object) -> str:
    """Write a tree, a list of statements or a constant as one string that depends on its meaning alone."""
    out: list[str] = []
    _emit(value, out.append)
    return "".join(out)


def _emit(value: object, emit) -> None:
    if isinstance(value, ast.Constant):
        emit(f"({type(value.value).__name__} {ascii(value.value)})")
    elif isinstance(value, ast.AST):
        emit(f"({type(value).__name__}")
        for name in sorted(value._fields):
            _emit_field(value, name, emit)
        emit(")")
    elif isinstance(value, list):
        emit("[")
        for item in value:
            _emit(item, emit)
        emit("]")
    else:
        emit(f" {ascii(value)}")


def _emit_field(node: ast.AST, name: str, emit) -> None:
    if name in IGNORED_FIELDS:
        return
    value = getattr(node, name, None)
    if name == "body" and isinstance(node, FUNCTIONS):
        return  # a body is a piece of its own
    if name == "body" and isinstance(node, (ast.ClassDef, ast.Module)):
        value = _without_docstring(value)
    if name == "values" and isinstance(node, ast.JoinedStr):
        value = _merged(value)
    if value is not None and value != []:
        emit(f" {name}=")
        _emit(value, emit)


def _merged(values: list[ast.expr]) -> list[ast.expr]:
    """Join neighbouring text of an f-string and drop empty text: parsers differ in how they cut it."""
    merged: list[ast.expr] = []
    for value in values:
        if not isinstance(value, ast.Constant):
            merged.append(value)
        elif merged and isinstance(merged[-1], ast.Constant):
            merged[-1] = ast.Constant(merged[-1].value + value.value)
        elif value.value:
            merged.append(value)
    return merged


def _without_docstring(body: list[ast.stmt]) -> list[ast.stmt]:
    first = body[0].value if body and isinstance(body[0], ast.Expr) else None
    is_text = isinstance(first, ast.Constant) and isinstance(first.value, str)
    return body[1:] if is_text else body


# --- bodies the tracer cannot see -----------------------------------------------------------------------------


def _untraceable(tree: ast.Module, functions: list[Function]) -> set[str]:
    handed = _handed_over(tree)
    found = {f.qualname for f in functions if f.name in handed or _is_hidden(f)}
    return _with_callees(functions, found)


def _is_hidden(function: Function) -> bool:
    decorators = function.node.decorator_list
    if any(UNTRACEABLE_DECORATORS.search(ast.unparse(decorator)) for decorator in decorators):
        return True
    return function.name in BACKWARD_METHODS and any(base.split(".")[-1] == "Function" for base in function.owner_bases)


def _handed_over(tree: ast.Module) -> set[str]:
    """Simple names passed to hook registrations and compilers anywhere in the file."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and UNTRACEABLE_CALLS.match(simple_name(node.func)):
            for argument in [*node.args, *(keyword.value for keyword in node.keywords)]:
                names |= referenced(argument)
    return names


def _with_callees(functions: list[Function], found: set[str]) -> set[str]:
    """Add what hidden bodies refer to by name in the same file, until nothing is added."""
    reached = set(found)
    frontier = [f for f in functions if f.qualname in found]
    while frontier:
        names = set().union(*(referenced(f.node) for f in frontier))
        frontier = [f for f in functions if f.qualname not in reached and f.name in names]
        reached |= {f.qualname for f in frontier}
    return reached


def referenced(node: ast.AST) -> set[str]:
    """Every simple name or attribute mentioned below `node`."""
    return {simple_name(child) for child in ast.walk(node)} - {""}


def simple_name(node: ast.AST) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
