"""What layouts cost: context, expert and pipeline parallelism over two ranks beside one, with the bytes they move.

Each figure is forward and backward; every round starts together and its time is the slowest rank's. The whole on one
rank is measured in the same process, and both a fixed total of tokens (or layers) and as much on each of two ranks.
On a CPU the shapes are small and say nothing of a GPU, and what overlaps is not measured.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import median

import pytest
import torch
import torch.distributed as dist
from torch import nn

from k3 import K3Config, K3Model
from k3.kda import KDA
from k3.moe import LatentMoE
from k3.parallel import ParallelState, collectives, connect, context_layout, parallelize_model
from k3.parallel.expert import ExpertDispatcher
from k3.parallel.pipeline import Pipeline
from suites.gpu_common import ratio
from suites.layout_layers import DTYPES, SIZES, built, draw, run
from suites.overlap import profiled
from suites.ranks import device

TWO = pytest.mark.ranks(2, timeout_s=180)
ON_GPU = device().type == "cuda"
SHRUNK = 1 if ON_GPU else 128  # by how much a CPU's token counts are smaller; the names of the tests stay
LENGTHS = [pytest.param(thousands * 1024 // SHRUNK, id=f"{thousands}k") for thousands in (8, 32, 128)]
ROUNDS, AGREES = 5, 2e-2
DTYPE = str(DTYPES[device().type]).removeprefix("torch.")


def rounds(call) -> list[float]:
    """Seconds of `ROUNDS` calls after two that settle the kernels; of each the slowest rank's time."""
    return [_slowest(call) for _ in range(ROUNDS + 2)][2:]


def _slowest(call) -> float:
    dist.barrier()
    _synchronize()
    started = time.perf_counter()
    call()
    _synchronize()
    taken = torch.tensor(time.perf_counter() - started, device=device())
    return float(collectives.max_ranks(taken, dist.group.WORLD, "time"))


def _synchronize() -> None:
    if ON_GPU:
        torch.cuda.synchronize()


def sent(call, tag: str) -> int:
    """Bytes this rank sends to others in one call, forward and backward, for one part of the model."""
    with collectives.count() as moves:
        call()
    return sum(move.size_bytes for move in moves if move.tag == tag)


def report(measure, name: str, samples: list[float], shape: str, sent_bytes: int | None = None) -> None:
    """Record a duration, and the bytes moved where ranks share the work."""
    measure(f"{name}.duration", "s", "lower", samples, shape=shape, dtype=DTYPE)
    if sent_bytes is not None:
        measure(f"{name}.sent", "B", "lower", [sent_bytes], shape=shape, dtype=DTYPE)
    if dist.get_rank() == 0:
        print(f"{name} [{shape}]: {1e3 * median(samples):.2f} ms, {sent_bytes or 0} B sent", flush=True)


@dataclass(frozen=True)
class Case:
    """One way to share work over two ranks: forward and backward are `step()`, what travels is tagged `tag`."""

    name: str
    shape: str
    tag: str
    step: Callable[[], object]


def report_cases(measure, cases: Iterator[Case]) -> None:
    """Time every case and count its bytes, one after the other."""
    for case in cases:
        report(measure, case.name, rounds(case.step), case.shape, sent(case.step, case.tag))


CONTEXT = [("headwise", None, ""), ("state", None, ""), ("state", 1, ".one_group")]  # mode, head groups, name


def context_cases(parallel, layer: nn.Module, total: int, suffix: str = "") -> Iterator[Case]:
    """A KDA layer over `total` tokens split by heads, and by states in the chosen number of turns and in none."""
    x, upstream = draw(total, 2), draw(total, 3)
    for mode, groups, name in CONTEXT:
        layout = context_layout(parallel, mode, total, head_groups=groups)
        mine = layout.split(x), layout.split(upstream)
        yield Case(
            f"kda.cp2.{mode}{name}{suffix}", f"T={total}", "kda", lambda m=mine, o=layout: run(layer, *m, layout=o)
        )


@TWO
@pytest.mark.parametrize("length", LENGTHS)
def test_context(measure, length):
    """A KDA layer over `length` tokens: the whole on one rank, split over two by heads and states, and on each."""
    parallel = connect(ParallelState(cp_size=2), device().type)
    layer, x, upstream = built(KDA, 0), draw(length, 2), draw(length, 3)
    whole = run(layer, x, upstream)["y"]
    report(measure, "kda.cp1", rounds(lambda: run(layer, x, upstream)), f"T={length}")
    for mode, groups, _ in CONTEXT:
        layout = context_layout(parallel, mode, length, head_groups=groups)
        mine = layout.split(x), layout.split(upstream)
        assert ratio(run(layer, *mine, layout=layout)["y"], layout.split(whole)) < AGREES
    report_cases(measure, context_cases(parallel, layer, length))
    report_cases(measure, context_cases(parallel, layer, 2 * length, ".fixed_per_rank"))


def expert_cases(parallel, layer: nn.Module, tokens: int) -> Iterator[Case]:
    """A routed layer whose experts are shared already, over half of `tokens` on each rank, and over all on each."""
    x, upstream = draw(tokens, 2), draw(tokens, 3)
    half = slice(parallel.dp_rank * tokens // 2, (parallel.dp_rank + 1) * tokens // 2)
    for name, rows in (("fixed_total", half), ("fixed_per_rank", slice(None))):
        mine = x[:, rows], upstream[:, rows]
        yield Case(f"moe.ep2.{name}", f"T={tokens}", "experts", lambda m=mine: run(layer, *m))


@TWO
@pytest.mark.parametrize("tokens", LENGTHS[:2])
def test_experts(measure, tokens):
    """A routed layer: all tokens and experts on one rank, the tokens shared by two, and as many tokens on each."""
    parallel = connect(ParallelState(dp_size=2, ep_size=2), device().type)
    layer, x, upstream = built(LatentMoE), draw(tokens, 2), draw(tokens, 3)
    whole = run(layer, x, upstream)["y"]
    report(measure, "moe.ep1", rounds(lambda: run(layer, x, upstream)), f"T={tokens}")
    share_experts(layer, parallel)
    half = slice(parallel.dp_rank * tokens // 2, (parallel.dp_rank + 1) * tokens // 2)
    assert ratio(layer(x[:, half]), whole[:, half]) < AGREES
    report_cases(measure, expert_cases(parallel, layer, tokens))


def share_experts(layer: nn.Module, parallel) -> None:
    """Keep this rank's half of the experts, and let tokens travel."""
    number = layer.experts.w1.shape[0]
    for name in ("w1", "w2", "w3"):
        weight = getattr(layer.experts, name).data
        setattr(layer.experts, name, nn.Parameter(weight.chunk(parallel.ep_size)[parallel.ep_rank].clone()))
    layer.dispatcher = ExpertDispatcher(parallel, number)


MICROBATCHES, BATCH_TOKENS = 8, 4096 // SHRUNK


def stack(layers: int) -> K3Config:
    """So many layers, every fourth of them MLA, in blocks of two."""
    mla = tuple(range(4, layers + 1, 4))
    kinds = {"full_attention_layers": mla, "kda_layers": tuple(i for i in range(1, layers + 1) if i not in mla)}
    dense = {"first_k_dense_replace": layers, "intermediate_size": 2 * SIZES[device().type]["hidden_size"]}
    sizes = {"num_hidden_layers": layers, "attn_res_block_size": 2, "vocab_size": 1024, "pad_token_id": 0}
    return K3Config(**SIZES[device().type] | kinds | dense | sizes)


def ids_of_microbatches() -> torch.Tensor:
    shape, generator = (MICROBATCHES, BATCH_TOKENS), torch.Generator().manual_seed(1)
    return torch.randint(1, 1024, shape, generator=generator).to(device())


def pipeline_cases(parallel) -> Iterator[Case]:
    """Microbatches over two stages under 1F1B: of four layers in all, and of four on each rank."""
    ids = ids_of_microbatches()
    for layers, name in ((4, "model.pp2"), (8, "model.pp2.fixed_per_rank")):
        chunk = parallelize_model(K3Model(stack(layers), parallel, dtype=DTYPES[device().type]).to(device()), parallel)
        pipeline = Pipeline([chunk], microbatches=MICROBATCHES, rows=1, tokens=BATCH_TOKENS)
        shape = f"{MICROBATCHES} x {BATCH_TOKENS} tokens, {layers} layers"
        yield Case(name, shape, "boundary", lambda p=pipeline: p.step(ids, ids))


@TWO
def test_pipeline(measure):
    """Eight microbatches through four layers on one rank, and over two stages: as many layers, and twice as many."""
    whole, ids = K3Model(stack(4), device=device(), dtype=DTYPES[device().type]), ids_of_microbatches()
    shape = f"{MICROBATCHES} x {BATCH_TOKENS} tokens, 4 layers"
    report(measure, "model.pp1", rounds(lambda: one_rank(whole, ids)), shape)
    report_cases(measure, pipeline_cases(connect(ParallelState(pp_size=2), device().type)))


def one_rank(model: nn.Module, ids: torch.Tensor) -> None:
    for row in ids:
        model(row[None], labels=row[None])["loss"].backward()


def cases_of(kind: str) -> Iterator[Case]:
    """The cases whose overlap is measured, by the part of the model."""
    where = device().type
    if kind == "pipeline":
        return pipeline_cases(connect(ParallelState(pp_size=2), where))
    if kind == "experts":
        parallel, layer = connect(ParallelState(dp_size=2, ep_size=2), where), built(LatentMoE)
        share_experts(layer, parallel)
        return expert_cases(parallel, layer, LENGTHS[1].values[0])
    return context_cases(connect(ParallelState(cp_size=2), where), built(KDA, 0), LENGTHS[int(kind[-1])].values[0])


@TWO
@pytest.mark.parametrize("kind", ["context0", "context1", "context2", "experts", "pipeline"])
def test_overlap(measure, kind):
    """Of every case: time in which kernels communicate, in which they compute, and the share of both at once."""
    if not ON_GPU:
        pytest.skip("no GPU here: what overlaps is read from the intervals of its kernels")
    for case in cases_of(kind):
        rounds(case.step)
        dist.barrier()
        found = profiled(case.step)
        context = {"shape": case.shape, "dtype": DTYPE}
        measure(f"{case.name}.communication", "s", "lower", [found.communication_s], **context)
        measure(f"{case.name}.computation", "s", "lower", [found.computation_s], **context)
        measure(f"{case.name}.overlapped", "1", "higher", [found.share], **context)
        assert found.communication_s > 0 and found.computation_s > 0, f"{case.name}: {found}"
        if dist.get_rank() == 0:
            print(
                f"{case.name} [{case.shape}]: {100 * found.share:.0f} % of {1e3 * found.communication_s:.2f} ms hidden"
            )
