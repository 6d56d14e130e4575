"""Pipeline parallelism against one rank: aligned, explicit, interleaved and cached, alone and with other axes."""

import pytest
import torch

from k3 import K3Config
from k3.parallel import ParallelState, collectives, connect, context_layout, sync_gradients
from k3.parallel.pipeline import Pipeline
from k3.parallel.tensor import full_logits
from k3.protocol import ImplConfig, build_model
from k3.sequence import SequenceLayout
from suites import oracle_weights
from suites.goldens import Golden, close, relative
from suites.models import native_state
from suites.par_common import (
    BOTH,
    DOUBLE,
    LIMIT,
    batch,
    check_gradients,
    load_part,
    one_rank,
    par6,
    par6_golden,
    whole_gradients,
)
from suites.ranks import device

MICROBATCHES = 4
# The public schedule of 93 layers at the smallest widths.
NARROW = {
    "hidden_size": 8, "intermediate_size": 8, "vocab_size": 17, "q_lora_rank": 4, "kv_lora_rank": 4,
    "qk_nope_head_dim": 2, "qk_rope_head_dim": 2, "v_head_dim": 2, "moe_intermediate_size": 4, "num_experts": 4,
    "num_experts_per_token": 2, "routed_expert_hidden_size": 4, "num_attention_heads": 2, "num_key_value_heads": 2,
}  # fmt: skip


def narrow93(dtype=torch.float64):
    """A narrow model with the public 93 layers, and drawn weights small enough for so deep a stack."""
    hf = K3Config().to_hf()
    text = hf["text_config"] | NARROW
    text["linear_attn_config"] = text["linear_attn_config"] | {"num_heads": 2, "head_dim": 2}
    config = K3Config.from_hf({**hf, "text_config": text | {"pad_token_id": 0}})
    state = native_state(oracle_weights.draw(config.to_hf()["text_config"], 5), 2)
    return config, {n: (w * 0.2 if w.ndim > 1 and "conv1d" not in n else w).to(dtype) for n, w in state.items()}


def run_pipeline(case, parallel, cached=False, mode="headwise", microbatches=MICROBATCHES):
    """One step of this rank's chunks; compares the loss and every gradient with one rank. Returns the moves."""
    config, state, ids, labels, wanted, dtype = case
    parallel = connect(parallel, device().type)
    chunks = [load_part(config, state, parallel.chunk(v)) for v in range(parallel.vpp_size)]
    step = len(ids) // parallel.dp_size
    rows = slice(parallel.dp_rank * step, (parallel.dp_rank + 1) * step)
    layout = context_layout(parallel, mode, ids.shape[1])
    split = getattr(layout, "split", lambda x: x)
    mine, answers = (split(x[rows]).to(device()) for x in (ids, labels))
    layouts = [layout] * microbatches if parallel.cp_size > 1 else None
    shape = {"microbatches": microbatches, "rows": step // microbatches, "tokens": mine.shape[1]}
    pipeline = Pipeline(chunks, **shape, cached=cached)
    with collectives.count() as moves:
        loss = pipeline.step(mine, answers, layouts=layouts)
    for chunk in chunks:
        sync_gradients(chunk)
        check_gradients(chunk, wanted.grads, LIMIT[dtype])
    relative(loss.cpu(), wanted.loss.double(), LIMIT[dtype], "loss")
    logits = pipeline.evaluate(mine, layouts=layouts)
    if chunks[-1].parallel.pp_is_last:
        relative(full_logits(chunks[-1], logits).cpu(), split(wanted.logits[rows]), LIMIT[dtype], "logits")
    return moves


@pytest.fixture
def tiny(dtype):
    """The par6 proxy, eight rows, and their one-rank run."""
    config, state = par6(dtype)
    ids, labels = batch(config, length=8, rows=8)
    return config, state, ids, labels, one_rank(config, state, ids, labels), dtype


@pytest.fixture
def deep():
    """The narrow 93-layer proxy, eight rows, and their one-rank run."""
    config, state = narrow93()
    ids, labels = batch(config, length=4, rows=8)
    return config, state, ids, labels, one_rank(config, state, ids, labels), torch.float64


def rows_of(per_stage):
    """An explicit layout with these decoder counts."""
    rows = [["decoder"] * count for count in per_stage]
    rows[0], rows[-1] = ["embedding", *rows[0]], [*rows[-1], "loss"]
    return rows


@pytest.mark.parametrize("pp", [pytest.param(n, marks=pytest.mark.ranks(n), id=f"pp{n}") for n in (2, 3)])
@pytest.mark.parametrize("dtype", BOTH)
def test_aligned(tiny, pp):
    """Whole-block stages under 1F1B give one rank's loss, logits and gradients."""
    run_pipeline(tiny, ParallelState(pp_size=pp))


@pytest.mark.ranks(2)
def test_vendor_golden(data_file):
    """The vendor's loss and gradients of par6 at 64 tokens hold over two stages, in float32."""
    golden = Golden("par6")
    for path in golden.files:
        data_file(path)
    config, state = par6_golden()
    ids, labels = (x.to(device()) for x in golden.inputs(64))
    chunk = load_part(config, state, connect(ParallelState(pp_size=2), device().type))
    pipeline = Pipeline([chunk], microbatches=2, rows=1, tokens=64)
    close(pipeline.step(ids, labels).view(1).cpu(), golden.expected("f32", 64)["loss"], 1e-3, "loss")
    found = whole_gradients(chunk)
    wanted = {name: gradient for name, gradient in golden.gradients(64).items() if name in found}
    assert len(wanted) > 30
    for name, gradient in wanted.items():
        relative(found[name].cpu(), gradient, 1e-3, name)


@pytest.mark.ranks(4)
@pytest.mark.filterwarnings("ignore:explicit pp_layout")
@pytest.mark.parametrize("dtype", DOUBLE)
@pytest.mark.parametrize("per_stage", [[1, 2, 1, 2], [3, 1, 1, 1]])
def test_explicit_inside_blocks(tiny, per_stage):
    """Stages that end inside an Attention Residual block give one rank's results as well."""
    run_pipeline(tiny, ParallelState(pp_size=4, pp_layout=rows_of(per_stage)))


@pytest.mark.ranks(2)
@pytest.mark.filterwarnings("ignore:explicit pp_layout")
@pytest.mark.parametrize("dtype", DOUBLE)
@pytest.mark.parametrize("cached", [False, True])
def test_interleaved(tiny, cached):
    """Three virtual stages a rank under interleaved 1F1B, also sending new snapshots alone, give one rank's results."""
    run_pipeline(tiny, ParallelState(pp_size=2, pp_layout=rows_of([1] * 6)), cached)


DEPTHS = [pytest.param(n, marks=pytest.mark.ranks(n), id=f"pp{n}") for n in (2, 3, 4, 5, 6, 7, 8)]


@pytest.mark.parametrize("pp", DEPTHS)
def test_93_layers_aligned(deep, pp):
    """The public 93 layers over 2 to 8 aligned stages give one rank's loss, logits and gradients."""
    run_pipeline(deep, ParallelState(pp_size=pp), microbatches=8)


@pytest.mark.ranks(3)
@pytest.mark.filterwarnings("ignore:explicit pp_layout")
@pytest.mark.parametrize("per_stage", [[32, 32, 29], [36, 36, 21]])
def test_93_layers_explicit(deep, per_stage):
    """The public 93 layers over explicit stages of three ranks give one rank's results."""
    run_pipeline(deep, ParallelState(pp_size=3, pp_layout=rows_of(per_stage)))


@pytest.mark.ranks(2)
def test_cached_boundaries_send_less(deep, measure):
    """With two ranks and four virtual stages each, every boundary carries the prefix and one new snapshot alone."""
    sent = {}
    for cached in (False, True):
        moves = run_pipeline(deep, ParallelState(pp_size=2, vpp_size=4), cached)
        sent[cached] = [move.size_bytes for move in moves if move.tag == "boundary"]
    piece = 2 * 4 * 8 * 8  # rows x tokens x hidden x float64
    rank = torch.distributed.get_rank()
    whole, fewer = [2, 3, 4, 5, 6, 7, 8], [2] * 7  # widths of the seven boundaries
    mine = [*range(rank, 7, 2)] + [*range(1 - rank, 7, 2)]  # sent forward; gradients sent back
    for cached, widths in ((False, whole), (True, fewer)):
        assert sum(sent[cached]) == MICROBATCHES * piece * sum(widths[boundary] for boundary in mine)
    measure("boundary_bytes.whole", "B", "lower", [sum(sent[False])], shape="narrow93 pp2 vpp4")
    measure("boundary_bytes.cached", "B", "lower", [sum(sent[True])], shape="narrow93 pp2 vpp4")


COMBINED = {
    "tp2_ep2_pp2": {"tp_size": 2, "ep_size": 2, "pp_size": 2},
    "tp2_sp_ep2_pp2": {"tp_size": 2, "ep_size": 2, "pp_size": 2, "sequence_parallel": True},
    "dp2_ep2_pp2": {"dp_size": 2, "ep_size": 2, "pp_size": 2},
    "cp2_ep2_pp2": {"cp_size": 2, "ep_size": 2, "pp_size": 2},
}
PARAMETERS = [
    pytest.param(axes, marks=pytest.mark.ranks(ParallelState(**axes).world_size), id=name)
    for name, axes in COMBINED.items()
]


@pytest.mark.parametrize("axes", PARAMETERS)
@pytest.mark.parametrize("dtype", DOUBLE)
def test_combined(tiny, axes):
    """Pipeline stages that are themselves split give one rank's loss, logits and gradients."""
    run_pipeline(tiny, ParallelState(**axes))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("dtype", DOUBLE)
def test_evaluation_leaves_gradients_alone(tiny):
    """Evaluating between a step and the optimizer changes no gradient, and two steps add up."""
    config, state, ids, labels, wanted, _ = tiny
    parallel = connect(ParallelState(pp_size=2), device().type)
    ids, labels = ids.to(device()), labels.to(device())
    chunk = load_part(config, state, parallel)
    pipeline = Pipeline([chunk], microbatches=4, rows=2, tokens=8)
    for _ in range(2):
        pipeline.step(ids, labels)
        pipeline.evaluate(ids)
    sync_gradients(chunk)
    check_gradients(chunk, {name: 2 * grad for name, grad in wanted.grads.items()}, 1e-9)


@pytest.mark.ranks(2)
def test_refuses_too_few_microbatches():
    """1F1B needs as many microbatches as stages."""
    config, state = par6()
    chunk = load_part(config, state, connect(ParallelState(pp_size=2), device().type))
    with pytest.raises(ValueError, match="1 microbatches are fewer than pp_size=2"):
        Pipeline([chunk], microbatches=1, rows=1, tokens=8)


def bundle_of(config, state, pp_size=2, **options):
    """A bundle over `pp_size` stages in float64 with this rank's part of `state`."""
    impl = ImplConfig(parallel=ParallelState(pp_size=pp_size), device=device(), dtype="float64", **options)
    bundle = build_model(config, impl_cfg=impl)
    for chunk in bundle.chunks:
        chunk.load_state_dict({name: state[name] for name in chunk.state_dict()})
    return bundle


@pytest.mark.ranks(2)
@pytest.mark.parametrize("dtype", DOUBLE)
@pytest.mark.parametrize("given", ["batch", "iterator"])
def test_forward_step(tiny, given):
    """`forward_step` over two stages: every gradient, the loss and evaluated logits of one rank, on the last stage."""
    config, state, ids, labels, wanted, _ = tiny
    bundle = bundle_of(config, state, microbatches=4)
    ids, labels = ids.to(device()), labels.to(device())
    batch = {"input_ids": ids, "labels": labels}
    pieces = [{name: x.chunk(4)[i] for name, x in batch.items()} for i in range(4)]
    found = bundle.forward_step(batch if given == "batch" else iter(pieces))
    for chunk in bundle.chunks:
        check_gradients(chunk, wanted.grads, 1e-9)
    with torch.no_grad():
        seen = bundle.forward_step(batch)
    assert found["logits"] is None
    if not bundle.parallel_state.pp_is_last:
        assert found["loss"] is seen["loss"] is seen["logits"] is None
        return
    for loss in (found["loss"], seen["loss"]):
        relative(loss.cpu(), wanted.loss, 1e-9, "loss")
    relative(seen["logits"].cpu(), wanted.logits, 1e-9, "logits")


@pytest.mark.ranks(2)
def test_forward_step_of_packed_documents():
    """An iterator of packed batches is a step; its loss and gradients are those of the documents on one rank."""
    config, state = par6()
    ids, labels = batch(config, length=24, rows=1)
    bounds = torch.tensor([0, 5, 6, 12], dtype=torch.int32)
    bundle = bundle_of(config, state, use_thd=True)
    pieces = [{"input_ids": a, "labels": b} for a, b in zip(ids.chunk(2, 1), labels.chunk(2, 1), strict=True)]
    found = bundle.forward_step({n: x.to(device()) for n, x in p.items()} | {"cu_seqlens": bounds} for p in pieces)
    both = SequenceLayout(cu_seqlens=torch.cat([bounds, bounds[1:] + 12]))
    wanted = one_rank(config, state, ids, labels, both)
    check_gradients(bundle.chunks[0], wanted.grads, 1e-9)
    if bundle.parallel_state.pp_is_last:
        relative(found["loss"].cpu(), wanted.loss, 1e-9, "loss")


@pytest.mark.ranks(2)
def test_forward_step_refuses_what_is_no_step():
    """Uneven cuts, short iterators, packed rows, mixed shapes and missing labels are named with what to give."""
    config, state = par6()
    ids, labels = batch(config, length=8, rows=6)
    step = bundle_of(config, state, microbatches=4).forward_step
    whole, half = {"input_ids": ids, "labels": labels}, {"input_ids": ids[:, :4], "labels": labels[:, :4]}
    for given, message in (
        (whole, "6 rows are not divisible by microbatches=4"),
        (iter([whole]), "ended after 1 of 4 microbatches"),
        (iter([whole, whole, whole, half]), "pad all microbatches of a step to one shape"),
        (iter([whole, whole, whole, {"input_ids": ids}]), "differ in their fields"),
        (iter([{"input_ids": ids}] * 4), "needs labels"),
    ):
        with pytest.raises(ValueError, match=message):
            step(given)
    packed = bundle_of(config, state, use_thd=True).forward_step
    with pytest.raises(ValueError, match="pass an iterator of packed batches"):
        packed(whole | {"cu_seqlens": torch.tensor([0, 8])})
