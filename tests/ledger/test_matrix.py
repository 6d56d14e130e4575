"""The README's block: a function of statuses, written between markers, checked by a diff."""

import pytest

from ledger import export, matrix, windows
from ledger.claims import statuses
from ledger.cli import main
from ledger.ingest import ingest
from ledger.record import Claim, ClaimStatus
from tests.ledger import make


def status(**changes):
    base = {"id": "kda.golden", "text": "KDA holds.", "topology": "cpu1", "state": "proven", "device": "cpu",
            "ranks": 1, "transport": "none", "scope": "proxy", "witness": "T0"}  # fmt: skip
    base["toolchain"] = "torch 2, python 3"
    return ClaimStatus(**base | changes)


def test_a_row_says_state_and_grade():
    """Toolchain, device, ranks, transport, scope, witness, seal and kill rate are all in the row."""
    text = matrix.block([status(ranks=4, transport="gloo", sealed=True, witness="T1", kill_rate=0.96)])
    row = "| `kda.golden` KDA holds. | cpu 4 ranks, gloo | 🟢 proven on torch 2, python 3 | proxy, T1, sealed | 96% |"
    assert row in text.splitlines()
    assert "1 cell: 1 proven." in text


def test_rows_are_grouped_and_counted():
    """Claims are grouped by the first word of their id; the summary counts each state."""
    text = matrix.block([status(), status(id="moe.a", state="needs", reason="needs release", witness=""),
                         status(id="moe.b", state="refuted", reason="t failed on rank 1")])  # fmt: skip
    assert [line for line in text.splitlines() if line.startswith("**")] == ["**kda**", "**moe**"]
    assert "3 cells: 1 proven, 1 needs, 1 refuted." in text
    assert "⚪ needs release |" in text


def test_reasons_cannot_break_the_table():
    """Bars, tags and line breaks in a reason stay inside their cell."""
    text = matrix.block([status(state="refuted", reason="a | b\n<script>" + "x" * 300)])
    row = next(line for line in text.splitlines() if "refuted" in line and line.startswith("| `"))
    assert "a \\| b &lt;script>" in row
    assert len(row) < 400


def test_known_bad_toolchain_is_flagged():
    """Evidence from inside a known-bad window is marked, with the reason and its link below the table."""
    claim = Claim(id="kda.golden", text="t", tests=("a",), topologies=("h200",), paths=("fla.chunk_kda",))
    cell = status(device="cuda (NVIDIA H200)", toolchain="torch 2.11, triton 3.6.0, fla 0.6.0, python 3.12")
    found = windows.flags(cell, claim)
    assert any("issues/640" in str(window) for window in found)
    text = matrix.block([cell], {("kda.golden", "cpu1"): found})
    assert "python 3.12 ⚠ |" in text
    assert "⚠ triton >=3.4,<3.7.1 on H100, H200, H20, GH200: gated backward" in text


@pytest.mark.parametrize(
    ("device", "triton", "path"),
    [("cuda (NVIDIA H200)", "3.8.0", "fla.chunk_kda"), ("cuda (NVIDIA A100)", "3.6.0", "fla.chunk_kda"),
     ("cuda (NVIDIA H200)", "3.6.0", "torch.kda_chunk"), ("cpu", "3.6.0", "fla.chunk_kda")],
)  # fmt: skip
def test_outside_the_window_is_not_flagged(device, triton, path):
    """Another version, device or path is not in the window."""
    claim = Claim(id="c", text="t", tests=("a",), topologies=("t",), paths=(path,))
    assert windows.flags(status(device=device, toolchain=f"triton {triton}"), claim) == []


def test_every_window_has_a_link_and_a_range():
    """The data file parses, and no window is without a reason to read."""
    assert all(window.links and window.covers("0.0.1") in (True, False) for window in windows.windows())


def test_write_then_check(root, spool, ledger, capsys):
    """--write fills the block from published evidence, --check agrees, and both leave the rest of the README alone."""
    ingest(make.run(root, spool).write(), ledger)
    export.export(root, ledger)
    assert main(["matrix", "--write", "--root", str(root)]) == 0
    text = (root / "README.md").read_text()
    assert text.startswith("# Title\n\n<!-- matrix:begin -->\n6 cells: 1 proven, 4 unproven, 1 needs.")
    assert text.endswith("<!-- matrix:end -->\n\nend\n")
    assert main(["matrix", "--check", "--root", str(root)]) == 0
    make.edit(root, "k3/ops.py", "x + 1", "x + 2")
    assert main(["matrix", "--check", "--root", str(root)]) == 1
    assert "+| `kda.golden` KDA equals the vendor's vectors. | cpu 1 rank | 🟡 expired: k3/ops.py: scan changed" in (
        capsys.readouterr().out
    )


def test_figures_follow_the_evidence(root, spool, ledger):
    """A proven cell's numbers are printed with their floor and peers; those of an expired cell are gone."""
    made = make.run(root, spool)
    numbers = {"floor_s": 1.0, "peers": {"eager": [8.0, 6.0, 7.0]}}
    made.lines("test_end")[0]["measures"] = [
        {"name": "scan", "unit": "s", "direction": "lower", "samples": [3.0, 1.5, 2.0], "shape": "T=8",
         "dtype": "bfloat16", "context": numbers}
    ]  # fmt: skip
    ingest(made.write(), ledger)
    export.export(root, ledger)
    main(["matrix", "--write", "--root", str(root)])
    row = "| `kda.golden` cpu 1 rank | scan | T=8 bfloat16 | 2 s | 2.00x | eager 3.50x |"
    assert row in (root / "README.md").read_text()
    make.edit(root, "k3/ops.py", "x + 1", "x + 2")
    main(["matrix", "--write", "--root", str(root)])
    assert "| scan |" not in (root / "README.md").read_text()


def test_a_remembered_table_follows_the_tree(root, spool, ledger, capsys):
    """Printing remembers the figures, and forgets them as soon as their cell is no longer proven."""
    made = make.run(root, spool)
    made.lines("test_end")[0]["measures"] = [{"name": "scan", "unit": "s", "direction": "lower", "samples": [2.0]}]
    ingest(made.write(), ledger)
    export.export(root, ledger)
    printed = []
    for change in ("", "", "x + 2"):
        if change:
            make.edit(root, "k3/ops.py", "x + 1", change)
        main(["matrix", "--root", str(root)])
        printed.append("| scan |" in capsys.readouterr().out)
    assert printed == [True, True, False]


def test_local_results_do_not_reach_the_block(root, spool, ledger):
    """The published matrix ignores this user's ledger."""
    ingest(make.run(root, spool).write(), ledger)
    assert all(s.state != "proven" for s in statuses(root, evidence=root / "ledger" / "evidence"))


def test_readme_without_markers_is_refused(root, capsys):
    """A README with no place for the matrix is an error that says what to add."""
    (root / "README.md").write_text("# Title\n")
    assert main(["matrix", "--check", "--root", str(root)]) == 2
    assert "needs the line <!-- matrix:begin -->" in capsys.readouterr().err


REGISTRY = """
schema = "1.0"
more = ["more.toml"]
[[sabotages]]
id = "scan.off_by_one"
text = "scan adds 2"
file = "k3/ops.py"
old = "x + 1"
new = "x + 2"
claims = ["kda.golden"]
survives = "equal | at these sizes"
"""
MORE = REGISTRY.replace('more = ["more.toml"]', "").replace("scan.off_by_one", "scan.bare").split("survives")[0]


@pytest.mark.parametrize(
    ("sabotage", "why"),
    [("scan.off_by_one", "scan adds 2: equal \\| at these sizes"),
     ("scan.bare", "scan adds 2: no reason is given: a test is missing"), ("scan.gone", "no longer in the registry")],
)  # fmt: skip
def test_survivors_are_listed_with_their_reason(root, spool, ledger, capsys, sabotage, why):
    """A sabotage under which every test passed lowers the rate, and stands in the block with the registry's reason."""
    (root / "suites" / "sabotages.toml").write_text(REGISTRY)
    (root / "suites" / "more.toml").write_text(MORE)
    ingest(make.run(root, spool).write(), ledger)
    ingest(make.run(root, spool, number=2, sabotage=sabotage).write(), ledger)
    export.export(root, ledger)
    main(["matrix", "--write", "--root", str(root)])
    text = (root / "README.md").read_text()
    row = next(line for line in text.splitlines() if f"| `{sabotage}` |" in line)
    assert why in row
    assert "kill rate 0% is below the declared 95% | proxy | 0% unsealed |" in text
    main(["why", "kda.golden", "--root", str(root)])
    assert f"survived: {sabotage} (" in capsys.readouterr().out


def test_no_survivors_no_table(root, spool, ledger):
    """A noticed sabotage leaves nothing to explain."""
    made = make.run(root, spool, number=2, sabotage="scan.off_by_one")
    made.lines("test_end")[0]["outcome"] = "failed"
    for run in (make.run(root, spool), made):
        ingest(run.write(), ledger)
    export.export(root, ledger)
    main(["matrix", "--write", "--root", str(root)])
    text = (root / "README.md").read_text()
    assert "**survivors**" not in text
    assert "| 100% unsealed |" in text
