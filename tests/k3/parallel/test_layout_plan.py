"""`k3-layout plan`: counts of the full model on the meta device, what does not fit, and what would."""

import json

import pytest
from typer.testing import CliRunner

from k3 import K3Config, K3Model
from k3.layout import app
from k3.layout_plan import GIB, Workload, plan, verdict
from k3.parallel import ParallelState

ROUTER_BIASES = 92 * 896  # buffers, not parameters


def test_stages_add_up_to_the_public_model():
    """The eight stages of an otherwise undivided layout hold every text parameter once."""
    plans = plan(K3Config(), ParallelState(pp_size=8), Workload())
    assert sum(found.parameters for found in plans) == 2_779_484_476_000 - ROUTER_BIASES
    assert [found.layers for found in plans] == [12] * 7 + [9]


def test_boundaries_match_the_stage_table():
    """At 8192 tokens the PP8 boundaries carry 28..112 KiB a token."""
    plans = plan(K3Config(), ParallelState(pp_size=8), Workload(tokens=8192))
    assert [found.boundary_bytes / 1024 / 8192 for found in plans] == [28, 42, 56, 70, 84, 98, 112, 0]


def test_first_thing_that_does_not_fit_and_a_remedy_that_does():
    """The 512-rank layout misses 131 GiB by its optimizer state; the layout it suggests fits."""
    config, work = K3Config(), Workload(kda_cp_mode="state")
    parallel = ParallelState(tp_size=8, cp_size=8, ep_size=32, pp_size=8, sequence_parallel=True)
    text = verdict(config, parallel, work, plan(config, parallel, work), 131 * GIB)
    assert text.startswith("does not fit: optimizer state of stage 1 pass 131 GiB")
    assert "try ep_size=64 (512 ranks)" in text
    better = ParallelState(tp_size=8, cp_size=8, ep_size=64, pp_size=8, sequence_parallel=True)
    assert verdict(config, better, work, plan(config, better, work), 131 * GIB).startswith("fits")


def test_command_reports_every_fault_at_once():
    """Impossible sizes are refused together, each with the nearest valid choice."""
    result = CliRunner().invoke(app, ["plan", "--tp", "5", "--ep", "3"], terminal_width=400)
    text = " ".join(result.output.split())
    assert result.exit_code == 2
    assert "use tp_size=4" in text and "num_experts=896 is not divisible by ep_size=3" in text


def test_command_prints_json():
    """`--json` gives the stages with every size in bytes, and the verdict."""
    result = CliRunner().invoke(app, ["plan", "--ep", "32", "--dp", "32", "--pp", "8", "--json"])
    found = json.loads(result.output)
    assert found["world_size"] == 256 and len(found["stages"]) == 8
    assert set(found["stages"][0]["traffic"]) == {"tp", "cp", "ep", "pp", "dp"}


def test_last_stage_on_the_meta_device_needs_no_process_group():
    """The documented 512-rank state builds its own layers on the meta device."""
    parallel = ParallelState(cp_size=8, dp_size=8, ep_size=32, pp_size=8, pp_rank=7, pp_is_first=False, pp_is_last=True)
    model = K3Model(K3Config(), parallel, device="meta")
    assert model.layer_indices == list(range(84, 93))


@pytest.mark.parametrize("axes", [{"tp_size": 8}, {"ep_size": 8, "dp_size": 8}])
def test_splitting_divides_what_a_rank_holds(axes):
    """Eight ranks of one axis hold an eighth of what that axis splits and no less than an eighth of everything."""
    whole = plan(K3Config(), ParallelState(pp_size=8), Workload())[1].parameters
    part = plan(K3Config(), ParallelState(pp_size=8, **axes), Workload())[1].parameters
    assert whole / 8 < part < whole
