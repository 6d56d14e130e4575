"""ParallelState: sizes and ranks checked once, all faults at once, and the stages of a pipeline."""

import warnings
from types import SimpleNamespace

import pytest

from k3.parallel import ParallelState

PUBLIC = SimpleNamespace(
    num_hidden_layers=93,
    attn_res_block_size=12,
    num_attention_heads=96,
    kda_num_heads=96,
    intermediate_size=33792,
    moe_intermediate_size=3072,
    num_shared_experts=2,
    num_experts=896,
)


def test_last_stage_of_pp8_holds_the_last_block():
    """The documented 512-rank layout: stage 7 holds layers 84..92 and needs no process group."""
    state = ParallelState(
        tp_size=1, cp_size=8, dp_size=8, ep_size=32, pp_size=8, pp_rank=7, pp_is_first=False, pp_is_last=True
    )
    assert state.layer_indices(PUBLIC) == list(range(84, 93))
    assert (state.world_size, state.edp_size) == (512, 2)


def test_all_size_faults_come_at_once():
    """Every impossible size is named in one error, each with a remedy."""
    with pytest.raises(ValueError, match=r"tp_size=0 is below 1.*cp_rank=2 is outside 0\.\.1"):
        ParallelState(tp_size=0, cp_size=2, cp_rank=2)


def test_all_config_faults_come_at_once_with_the_nearest_choice():
    """96 heads, 896 experts and 93 layers name the nearest valid tp, ep and pp in one error."""
    state = ParallelState(tp_size=5, cp_size=1, dp_size=60, ep_size=30, pp_size=94)
    with pytest.raises(ValueError) as caught:
        state.check(PUBLIC)
    text = str(caught.value)
    assert "num_attention_heads=96 is not divisible by tp_size=5; use tp_size=4" in text
    assert "num_experts=896 is not divisible by ep_size=30; use ep_size=28" in text
    assert "94 pipeline stages exceed the 93 decoder layers" in text


def test_headwise_context_needs_heads_per_rank():
    """Headwise context parallelism shares the tensor-parallel heads; state passing has no such limit."""
    state = ParallelState(tp_size=8, cp_size=8)
    with pytest.raises(ValueError, match=r"kda_num_heads/tp_size=12 is not divisible by cp_size=8; use cp_size=6"):
        state.check(PUBLIC, "headwise")
    state.check(PUBLIC, "state")


def test_experts_must_fit_the_stage():
    """ep * etp has to divide the ranks of a stage, and the nearest ep that does is named."""
    with pytest.raises(ValueError, match=r"ep_size\*etp_size=6 does not divide dp\*cp\*tp=8; use ep_size=2"):
        ParallelState(dp_size=8, ep_size=3, etp_size=2)


def test_explicit_layout_covers_layers_and_warns_once():
    """Explicit rows give [32, 32, 29] layers and one warning about block alignment."""
    rows = [["embedding", *["decoder"] * 32], ["decoder"] * 32, [*["decoder"] * 29, "loss"]]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        states = ParallelState(pp_size=3, pp_rank=1, pp_layout=rows)
        assert states.layer_indices(PUBLIC) == list(range(32, 64))
    assert len(caught) == 1 and "block alignment" in str(caught[0].message)


@pytest.mark.parametrize(
    "rows,fault",
    [
        ([["embedding", "decoder"], ["loss"]], "stage 1 has no decoder"),
        ([["decoder"], ["decoder", "loss"]], "exactly one 'embedding'"),
        ([["embedding", "decoder"], ["decoder"]], "exactly one 'loss'"),
        ([["embedding", "decoder"], ["decoder", "decoder"], ["decoder", "loss"]], "has 3 stages, not a multiple"),
    ],
)
def test_broken_explicit_layouts_fail_at_construction(rows, fault):
    """Empty stages, missing ends and a wrong number of rows are refused before anything is built."""
    with pytest.raises(ValueError, match=fault):
        ParallelState(pp_size=2, pp_layout=rows)


def test_wrong_coverage_is_refused():
    """Rows that do not list every layer once are refused when the layers are asked for."""
    rows = [["embedding", *["decoder"] * 46], [*["decoder"] * 46, "loss"]]
    with pytest.warns(UserWarning), pytest.raises(ValueError, match="covers 92 decoder layers of 93"):
        ParallelState(pp_size=2, pp_layout=rows).layer_indices(PUBLIC)


def test_rank_order_is_tp_cp_dp_pp():
    """Rank 13 of tp2 cp2 dp2 pp2, and its place among the experts, follow the documented order."""
    layout = ParallelState(tp_size=2, cp_size=2, dp_size=2, pp_size=2, ep_size=2, etp_size=2)
    state = layout.at(13)  # 13 = ((1 * 2 + 1) * 2 + 0) * 2 + 1
    assert (state.pp_rank, state.dp_rank, state.cp_rank, state.tp_rank) == (1, 1, 0, 1)
    assert (state.etp_rank, state.ep_rank) == (1, 0)


def test_interleaved_chunks_alternate():
    """Virtual stage s lives on pipeline rank s mod pp, and only the very last chunk holds the loss."""
    state = ParallelState(pp_size=2, vpp_size=4, pp_rank=1)
    layers = [state.chunk(index).layer_indices(PUBLIC)[0] for index in range(4)]
    assert layers == [12, 36, 60, 84]
    assert [state.chunk(index).pp_is_last for index in range(4)] == [False, False, False, True]
