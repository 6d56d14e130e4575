"""Context parallelism against one rank: headwise and state, rows and packed documents, outputs and every gradient."""

from itertools import pairwise

import pytest
import torch

from k3.parallel import ParallelState, collectives, connect, context_layout
from k3.parallel.turns import TOKENS_PER_GROUP, choose_groups
from k3.protocol import ImplConfig, build_model
from k3.sequence import SequenceLayout, pack_rows, unpack_thd_forward_output
from suites import oracle, oracle_weights
from suites.goldens import Golden, relative
from suites.par_common import BOTH, LIMIT, batch, check, check_experts, one_rank, par6, part, run_part
from suites.ranks import device

# 80 tokens before padding: documents of one token, shorter than the four taps, across boundaries of 2, 4 and 8 equal
# shares, begun at a boundary, and begun one or two tokens before one, so that a convolution's history is cut short.
DOCUMENTS = (1, 3, 16, 19, 9, 1, 9, 22)
MODES = ("headwise", "state")
SIZES = [pytest.param(n, marks=pytest.mark.ranks(n), id=f"cp{n}") for n in (1, 2, 4, 8)]


def packed_batch(config, mode, size):
    """Ids, labels and bounds of packed documents: padded to 2 * cp for headwise, the row's end alone for state."""
    ids, labels = (x[0].split(DOCUMENTS) for x in batch(config, sum(DOCUMENTS), rows=1))
    multiple = 2 * size if mode == "headwise" else 1
    ids, bounds = pack_rows(ids, multiple, 1)
    labels, _ = pack_rows(labels, multiple, -100)
    pad = -ids.shape[1] % size
    ids, labels = (torch.nn.functional.pad(x, (0, pad), value=v) for x, v in ((ids, 1), (labels, -100)))
    bounds[-1] += pad
    return ids, labels, bounds


@pytest.fixture
def rows(dtype, size):
    """The par6 proxy with a head for every rank, two dense rows, and their one-rank run."""
    config, state = par6(dtype, heads=max(4, size))
    ids, labels = batch(config, length=32)
    return config, state, ids, labels, None, one_rank(config, state, ids, labels)


@pytest.fixture
def packed(dtype, mode, size):
    """The par6 proxy with a head for every rank, packed documents, and their one-rank run."""
    config, state = par6(dtype, heads=max(4, size))
    ids, labels, bounds = packed_batch(config, mode, size)
    return config, state, ids, labels, bounds, one_rank(config, state, ids, labels, SequenceLayout(cu_seqlens=bounds))


def compare(case, mode, size, dtype, groups=None):
    """Split the batch once, run this rank's share, and compare everything with one rank."""
    config, state, ids, labels, bounds, wanted = case
    model = part(config, state, ParallelState(cp_size=size))
    layout = context_layout(model.parallel, mode, ids.shape[1], bounds, head_groups=groups)
    split = getattr(layout, "split", lambda x, dim=1: x)
    found = run_part(model, split(ids), split(labels), layout=layout)
    check(model, found, wanted, LIMIT[dtype], split)
    check_experts(found.experts, wanted.experts, lambda x: split(x.unflatten(0, (len(ids), -1))).flatten(0, 1))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", BOTH)
def test_rows(rows, mode, size, dtype):
    """Whole rows split over the ranks give one rank's logits, loss, experts and gradients."""
    compare(rows, mode, size, dtype)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", BOTH)
def test_packed(packed, mode, size, dtype):
    """Packed documents, some of one token and some across every boundary, give one rank's results."""
    compare(packed, mode, size, dtype)


TURNS = [pytest.param(n, g, marks=pytest.mark.ranks(n), id=f"cp{n}-{g}groups") for n, g in ((2, 2), (2, 4), (4, 4))]


@pytest.mark.parametrize("size,groups", TURNS)
@pytest.mark.parametrize("dtype", BOTH)
def test_rows_in_turns(rows, size, groups, dtype):
    """States passed over groups of heads in turn give one rank's logits, loss, experts and gradients."""
    compare(rows, "state", size, dtype, groups)


@pytest.mark.parametrize("size,groups", TURNS)
@pytest.mark.parametrize("mode", ["state"])
@pytest.mark.parametrize("dtype", BOTH)
def test_packed_in_turns(packed, mode, size, groups, dtype):
    """Packed documents with states passed in turn give one rank's results."""
    compare(packed, mode, size, dtype, groups)


@pytest.mark.ranks(2)
def test_turns_send_a_state_to_the_next_rank(measure):
    """By turns the first rank sends one K x K state per head and layer forward, the last one its gradient back."""
    config, state = par6(torch.float32)
    ids, labels = batch(config, length=64, rows=1)
    model = part(config, state, ParallelState(cp_size=2))
    K, H, layers, tail = config.kda_head_dim, config.kda_num_heads, 4, config.kda_short_conv_kernel_size - 1
    layout = context_layout(model.parallel, "state", 64, head_groups=4)
    with collectives.count() as moves:
        run_part(model, layout.split(ids), layout.split(labels), layout=layout)
    states, history = H * K * K * 4, 3 * tail * H * K * 4
    for backward in (False, True):
        sends = model.parallel.cp_rank == (1 if backward else 0)
        sent = sum(move.size_bytes for move in moves if move.tag == "kda" and move.backward == backward)
        assert sent == layers * (sends * states + history), f"{backward=}"
    measure("turns.kda_bytes_per_layer", "B", "lower", [states + history], shape="B1 T64 cp2", dtype="float32")


@pytest.mark.ranks(1)
def test_number_of_head_groups():
    """Turns are chosen for long shares alone, where they beat two runs, and a number must divide the heads."""
    long = 8 * TOKENS_PER_GROUP
    assert [choose_groups(16, 2, n) for n in (long, long // 4, long // 8, 64)] == [4, 2, 1, 1]
    assert choose_groups(12, 8, 2 * long) == 12 and choose_groups(4, 8, 2 * long) == 1
    assert choose_groups(96, 4, long) == 8 and choose_groups(7, 2, long) == 1
    layout = context_layout(ParallelState(cp_size=2), "state", 64, head_groups=3)
    with pytest.raises(ValueError, match="head_groups=3 does not divide 4 local heads"):
        layout.groups_of(4)


@pytest.mark.ranks(1)
@pytest.mark.parametrize("mode", MODES)
def test_one_rank_is_plain(mode):
    """With cp_size 1 the layout is the plain one, and its packed logits are the oracle's, document by document."""
    config, state = par6()
    text = Golden("par6").text
    ids, _, bounds = packed_batch(config, mode, 1)
    model = part(config, state, ParallelState())
    layout = context_layout(model.parallel, mode, ids.shape[1], bounds)
    assert type(layout) is SequenceLayout
    tensors = oracle_weights.draw(text, 5)
    wanted = [oracle.forward(tensors, text, ids[:, a:b]) for a, b in pairwise(bounds.tolist())]
    relative(model(ids.to(device()), layout=layout)["logits"].cpu(), torch.cat(wanted, dim=1), 1e-9, "logits")


@pytest.mark.ranks(4)
@pytest.mark.parametrize("mode", MODES)
def test_split_then_join(mode):
    """Splitting gives every token to one rank, and joining the shares restores the documents without padding."""
    config, _ = par6()
    ids, _, bounds = packed_batch(config, mode, 4)
    parallel = connect(ParallelState(cp_size=4))
    layout = context_layout(parallel, mode, ids.shape[1], bounds)
    share = layout.split(ids)
    assert share.shape[1] == ids.shape[1] // 4
    documents = unpack_thd_forward_output(share, bounds, DOCUMENTS, layout)
    wanted = batch(config, sum(DOCUMENTS), rows=1)[0][0].split(DOCUMENTS)
    assert all(torch.equal(found, alone) for found, alone in zip(documents, wanted, strict=True))


@pytest.mark.ranks(2)
def test_splitting_twice_is_refused():
    """A share cannot be split again, and the model refuses a batch that was never split."""
    config, state = par6()
    ids, _ = batch(config, length=32)
    model = part(config, state, ParallelState(cp_size=2))
    layout = context_layout(model.parallel, "headwise", 32)
    with pytest.raises(ValueError, match="16 tokens along dim 1 where the whole sequence has 32"):
        layout.split(layout.split(ids))
    with pytest.raises(ValueError, match="32 tokens where a rank's share of 32 over cp_size=2 is 16"):
        model(ids, layout=layout)
    with pytest.raises(ValueError, match="shift the whole batch before it is split"):
        model(layout.split(ids), labels=layout.split(ids), layout=layout, shift_labels=True)


@pytest.mark.ranks(2)
def test_bytes_moved_per_layer(measure):
    """Headwise moves 5K + 1 elements per token and head, state passing 2 K x K states and 3 histories per head."""
    config, state = par6(torch.float32)
    ids, _ = batch(config, length=64, rows=1)
    model = part(config, state, ParallelState(cp_size=2))
    K, H, layers, tail = config.kda_head_dim, config.kda_num_heads, 4, config.kda_short_conv_kernel_size - 1
    wanted = {"headwise": 32 * H // 2 * (5 * K + 1) * 4, "state": (2 * H * K * K + 3 * tail * H * K) * 4}
    for mode, per_layer in wanted.items():
        layout = context_layout(model.parallel, mode, 64)
        with collectives.count() as moves:
            model(layout.split(ids).to(device()), layout=layout)
        by_tag = {tag: sum(m.size_bytes for m in moves if m.tag == tag) for tag in ("kda", "mla")}
        assert by_tag["kda"] == layers * per_layer
        assert by_tag["mla"] == 2 * 32 * (config.kv_lora_rank + config.qk_rope_head_dim) * 4
        measure(f"{mode}.kda_bytes_per_layer", "B", "lower", [per_layer], shape="B1 T64 cp2", dtype="float32")


@pytest.mark.ranks(2)
@pytest.mark.parametrize("mode", MODES)
def test_forward_step_splits_the_whole_batch(mode):
    """`forward_step` takes the whole packed batch, splits it once, and gives one rank's loss on every rank."""
    config, state = par6()
    ids, labels, bounds = packed_batch(config, mode, 2)
    impl = ImplConfig(parallel=ParallelState(cp_size=2), dtype="float64", use_thd=True, kda_cp_mode=mode)
    bundle = build_model(config, impl_cfg=impl)
    bundle.chunks[0].load_state_dict(state)
    loss = bundle.forward_step({"input_ids": ids, "labels": labels, "cu_seqlens": bounds})["loss"]
    wanted = one_rank(config, state, ids, labels, SequenceLayout(cu_seqlens=bounds)).loss
    relative(loss, wanted, 1e-12, "loss")
