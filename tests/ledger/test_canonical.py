"""The canonical hash: what changes it, what does not, and that it never drifts."""

import ast

import pytest

from ledger.canonical import canonical, executed, parse, pieces

SOURCE = '''"""Doc."""
import functools
LIMIT = 3  # a constant


@functools.lru_cache
def cached(x: int = LIMIT) -> str:
    """Doc of a function."""
    return f"{x!r:>{LIMIT}} " "tail" rf"\\d{x}"


class Box:
    """Doc of a class."""

    size = -1.5e-3

    @property
    def side(self):
        return [y for y in range(self.size) if y] or None

    @side.setter
    def side(self, value, /, *rest, key=b"\\xff", **options):
        def inner(z):
            return z ** 2 + 1j

        match value:
            case {"a": 1, **others}:
                self.size = inner(value := others)
            case [_, *_] | None:
                raise ValueError("é") from None
        try:
            with open("f") as file, file:
                yield
        except* OSError:
            return
        lambda: (yield)


async def later(*, a, b=2):
    async for _ in a:
        await b
'''
# Computed once, equal on Python 3.11 to 3.14. A change here expires all evidence: then raise the recorder version.
FROZEN = {
    "<module>": "7112ffa839141263ebe68cb6acfb5ffd",
    "cached": "ce2f538d1d7176fd5f48299062b7974b",
    "Box.side": "33ff2d38d3a16d3668b42fa6f75d0ff4",
    "Box.side.<locals>.inner": "6e831228c6efc5676705687c5c222fb0",
    "later": "1de22a8819d874dc92116d63b516a5b5",
}


def test_frozen_vector():
    """The hashes of a source with every construct are those of all supported Pythons."""
    assert pieces(SOURCE) == FROZEN


@pytest.mark.parametrize(
    ("old", "new"),
    [("# a constant", "# another"), ('"""Doc."""', '"""Other."""'), ("LIMIT = 3", "\n\nLIMIT   =   3"),
     ("    return z ** 2 + 1j", "    # why\n            return (z ** 2 + 1j)"), ('"tail"', "'tail'")],
)  # fmt: skip
def test_ignores_form(old, new):
    """Comments, docstrings, positions, spacing, quotes and parentheses are not part of the meaning."""
    assert pieces(SOURCE.replace(old, new)) == pieces(SOURCE)


@pytest.mark.parametrize(
    ("old", "new", "changed"),
    [("z ** 2", "z ** 3", "Box.side.<locals>.inner"), ("LIMIT = 3", "LIMIT = 4", "<module>"),
     ("x: int = LIMIT", "x: int = 9", "<module>"), ("key=b", "kez=b", "<module>"), ("await b", "await a", "later"),
     ("@functools.lru_cache", "@functools.cache", "<module>"), ("size = -1.5e-3", "size = 1.5e-3", "<module>"),
     ("{x!r:", "{x!s:", "cached"), ('"tail"', '"tale"', "cached"), ("or None", "or 0", "Box.side")],
)  # fmt: skip
def test_sees_meaning(old, new, changed):
    """A change of meaning changes the one piece that it is in."""
    before, after = pieces(SOURCE), pieces(SOURCE.replace(old, new))
    assert {name for name in before if before[name] != after.get(name)} == {changed}


def test_return_none_differs_from_return():
    """An explicit None is a value, not an empty field."""
    assert pieces("def f():\n return None") != pieces("def f():\n return")


def test_duplicates_are_combined():
    """Two definitions of one name are one piece; a change in either changes it."""
    text = "if X:\n def f(): return 1\nelse:\n def f(): return 2\n"
    assert pieces(text)["f"] != pieces(text.replace("return 2", "return 3"))["f"]


def test_unicode_is_escaped():
    """Text beyond ASCII is written by code point: printability differs between Unicode versions."""
    assert canonical(ast.parse("'\N{GRINNING FACE}\U0001fae8'")).isascii()


def test_executed_lines_name_pieces():
    """Lines inside a body name it; def lines, decorators and docstrings of the outer level do not."""
    lines = {text: number for number, text in enumerate(SOURCE.splitlines(), start=1)}
    inner = lines["            return z ** 2 + 1j"]
    assert executed(SOURCE, [inner]) == {"Box.side.<locals>.inner"}
    assert executed(SOURCE, [lines["        def inner(z):"]]) == {"Box.side"}
    assert executed(SOURCE, [lines["@functools.lru_cache"], lines["class Box:"], 3]) == set()


def test_one_line_bodies_count():
    """A body on its own def line counts when the line ran: rather too much than too little."""
    assert executed("def f(): return 1\n", [1]) == {"f"}


def test_untraceable_bodies():
    """What the tracer cannot see: kernels, cached functions, backwards, hooks, and what they call here."""
    text = """
@triton.jit
def kernel(x): helper(x)
def helper(x): pass
def plain(x): pass
class Op(torch.autograd.Function):
    def forward(ctx): pass
    def backward(ctx, g): return shard(g)
def shard(g): pass
p.register_hook(on_gradient)
def on_gradient(g): pass
fast = torch.compile(slow)
def slow(x): pass
@functools.cache
def table(): pass
"""
    hidden = {"kernel", "helper", "Op.backward", "shard", "on_gradient", "slow", "table"}
    assert parse(text).untraceable == hidden
