"""claims.toml: read as data, and every fault told at once."""

import pytest

from ledger import claimfile
from ledger.record import SchemaError
from tests.ledger import make


def test_reads_cells_in_file_order(root):
    """A cell is a claim on a topology; suites are named groups of claims."""
    found = claimfile.load(root)
    assert [(c.id, t.name) for c, t in found.cells()][:2] == [("kda.golden", "cpu1"), ("kda.golden", "gloo2")]
    assert found.suites == {"quick": ("kda.golden",)}
    assert found.inputs["release"].files == {"config.json": "a" * 64}


def test_all_faults_at_once(root):
    """One reading names every fault, each with its rule."""
    text = make.CLAIMS.replace('scope"', "x").replace('id = "moe.route"', 'id = "kda.golden"\nkil_rate = 0.5')
    text = text.replace('backend = "nccl"', 'backend = "none"').replace('inputs = ["release"]', 'inputs = ["nothing"]')
    text = text.replace("suites/moe_suite.py::test_release", "moe_suite.py")
    (root / "suites" / "claims.toml").write_text(text)
    with pytest.raises(claimfile.ClaimFileError) as error:
        claimfile.load(root)
    for part in ("appears twice", "did you mean 'kill_rate'", "need a backend", "unknown input 'nothing'",
                 "'moe_suite.py' is not of the form"):  # fmt: skip
        assert part in str(error.value)


def test_lower_kill_rate_needs_a_reason(root):
    """Declaring a kill rate below 95% without saying why is a fault."""
    make.edit(root, "suites/claims.toml", 'topologies = ["cpu1"]\n[[', 'topologies = ["cpu1"]\nkill_rate = 0.5\n[[')
    with pytest.raises(claimfile.ClaimFileError, match="say why in kill_reason"):
        claimfile.load(root)


@pytest.mark.parametrize(
    ("text", "error"),
    [("not toml [", claimfile.ClaimFileError), ('schema = "9.0"', SchemaError), (None, claimfile.ClaimFileError)],
)
def test_unreadable_files_are_refused(root, text, error):
    """No file, no TOML, and another major schema are refused by name."""
    path = root / "suites" / "claims.toml"
    path.unlink() if text is None else path.write_text(text)
    with pytest.raises(error):
        claimfile.load(root)
