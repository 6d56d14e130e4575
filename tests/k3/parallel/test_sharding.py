"""The sharding table: which part of a parameter a rank stores."""

from types import SimpleNamespace

import pytest

from k3.sharding import SHARDING, local_shape, local_slices, placement, table

LAYER = "language_model.model.layers.3."


def rank(**axes):
    """Return an object with the sizes and ranks that local_slices reads, 1 and 0 unless given."""
    values = {f"{axis}_{what}": start for axis in ("tp", "ep", "etp") for what, start in (("size", 1), ("rank", 0))}
    return SimpleNamespace(**{**values, **axes})


def test_per_head_parameters_are_split_by_head():
    """A_log, dt_bias and the convolutions follow the heads: rank 1 of 4 holds heads 24..47 of 96."""
    second = rank(tp_size=4, tp_rank=1)
    assert local_slices(LAYER + "self_attn.A_log", (96,), second) == (slice(24, 48),)
    assert local_slices(LAYER + "self_attn.dt_bias", (12288,), second) == (slice(3072, 6144),)
    conv = local_slices(LAYER + "self_attn.q_conv1d.weight", (12288, 1, 4), second)
    assert conv == (slice(3072, 6144), slice(0, 1), slice(0, 4))


def test_stacked_experts_are_split_over_two_axes():
    """Experts split over ep on their leading axis and over etp on the inner width, column for w1 and row for w2."""
    place = rank(ep_size=32, ep_rank=31, etp_size=2, etp_rank=1)
    first, second = LAYER + "block_sparse_moe.experts.w1", LAYER + "block_sparse_moe.experts.w2"
    assert local_slices(first, (896, 3072, 3584), place) == (slice(868, 896), slice(1536, 3072), slice(0, 3584))
    assert local_slices(second, (896, 3584, 3072), place) == (slice(868, 896), slice(0, 3584), slice(1536, 3072))


@pytest.mark.parametrize("size,parts", [(96, 5), (163840, 3), (7, 4), (2, 4)])
def test_parts_cover_every_row_once(size, parts):
    """The ranks' slices join to the whole without gap or overlap, also when the size does not divide."""
    rows = []
    for index in range(parts):
        part = local_slices("language_model.lm_head.weight", (size, 8), rank(tp_size=parts, tp_rank=index))[0]
        rows += range(size)[part]
    assert rows == list(range(size))


def test_one_rank_stores_everything():
    """With no parallel state the slice is the whole parameter."""
    assert local_shape(LAYER + "self_attn.o_proj.weight", (7168, 12288), None) == (7168, 12288)


def test_unknown_name_is_refused():
    """A name the table lacks is an error and not silently replicated."""
    with pytest.raises(KeyError, match="rotary"):
        placement(LAYER + "self_attn.rotary.weight")


def test_printed_table_lists_every_pattern():
    """`python -m k3.sharding` prints one line per pattern below the header."""
    lines = table().splitlines()
    assert [line.split()[0] for line in lines[1:]] == list(SHARDING)
