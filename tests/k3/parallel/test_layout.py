"""The stage tables of `k3-layout pp`: layers, balance and boundary traffic of the public 93-layer model."""

import subprocess
import sys

import pytest
from typer.testing import CliRunner

from k3.layout import Comparison, app, automatic, explicit

ALIGNED = {
    2: ([48, 45], 96.875),
    3: ([24, 36, 33], 86.111),
    4: ([24, 24, 24, 21], 96.875),
    5: ([12, 12, 24, 24, 21], 77.5),
    6: ([12, 12, 12, 12, 24, 21], 64.583),
    7: ([12, 12, 12, 12, 12, 12, 21], 63.265),
    8: ([12] * 7 + [9], 96.875),
}


@pytest.mark.parametrize("pp", ALIGNED)
def test_automatic_layouts_take_whole_blocks(pp):
    """Stages hold whole blocks, extra ones go to later stages, and the efficiency is mean over bottleneck."""
    layers, efficiency = ALIGNED[pp]
    table = automatic(pp)
    assert table.layers == layers
    assert table.efficiency_percent == pytest.approx(efficiency, abs=5e-4)
    assert table.aligned


def test_explicit_pp3_balances_better_than_blocks():
    """[32, 32, 29] beats [36, 36, 21]: 3.125 % against 13.889 % bubble, 11.1 % less time, 12.5 % more throughput."""
    blocks, even = explicit([36, 36, 21]), explicit([32, 32, 29])
    assert (blocks.efficiency_percent, even.efficiency_percent) == pytest.approx((86.111, 96.875), abs=5e-4)
    assert (blocks.bubble_percent, even.bubble_percent) == pytest.approx((13.889, 3.125), abs=5e-4)
    assert (blocks.bottleneck, even.bottleneck) == (36, 32)
    change = Comparison(blocks, even)
    assert (change.time_percent, change.throughput_percent) == pytest.approx((-11.1, 12.5), abs=0.05)


def test_boundaries_carry_prefix_and_snapshots():
    """A boundary carries (1 + K) pieces of 14 KiB a token in bf16."""
    assert automatic(8).kib_per_token == [28, 42, 56, 70, 84, 98, 112]
    assert automatic(3).kib_per_token == [42, 84]
    for table in (explicit([36, 36, 21]), explicit([32, 32, 29])):
        assert table.snapshots == [3, 6]
        assert table.kib_per_token == [56, 98]
        assert sum(table.kib_per_token) == 154


def test_bad_layouts_fail():
    """An empty stage, a missing layer and more stages than layers are refused with the rule."""
    with pytest.raises(ValueError, match="stage 1 has no decoder"):
        explicit([93, 0])
    with pytest.raises(ValueError, match="covers 92 decoder layers of 93"):
        explicit([46, 46])
    with pytest.raises(ValueError, match="94 pipeline stages exceed the 93 decoder layers"):
        automatic(94)


def test_command_prints_the_tables():
    """`k3-layout pp` prints one line per stage count, and compares two explicit layouts."""
    result = CliRunner().invoke(app, ["pp", "--layout", "36,36,21", "--layout", "32,32,29"])
    assert result.exit_code == 0
    assert "bottleneck 36 -> 32 layers, time -11.1 %, throughput +12.5 %" in result.output
    assert "[12, 12, 24, 24, 21]" in CliRunner().invoke(app, ["pp"]).output


def test_layout_imports_no_torch():
    """`k3.layout` and the sharding table load without torch."""
    code = "import sys, k3.layout, k3.sharding, k3.parallel.mesh; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
