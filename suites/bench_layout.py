"""What layouts cost: context, expert and pipeline parallelism over two ranks beside one, with the bytes they move.

Each figure is forward and backward; every round starts together and its time is the slowest rank's. The whole on one
rank is measured in the same process. On a CPU the shapes are small and say nothing of a GPU.
"""

import time
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


@TWO
@pytest.mark.parametrize("length", LENGTHS)
def test_context(measure, length):
    """A KDA layer over `length` tokens: the whole on one rank, and split over two by heads and by states."""
    parallel = connect(ParallelState(cp_size=2), device().type)
    layer, x, upstream = built(KDA, 0), draw(length, 2), draw(length, 3)
    shape, whole = f"T={length}", run(layer, x, upstream)["y"]
    report(measure, "kda.cp1", rounds(lambda: run(layer, x, upstream)), shape)
    for mode in ("headwise", "state"):
        layout = context_layout(parallel, mode, length)
        mine = layout.split(x), layout.split(upstream)
        assert ratio(run(layer, *mine, layout=layout)["y"], layout.split(whole)) < AGREES

        def step(mine=mine, layout=layout):
            run(layer, *mine, layout=layout)

        report(measure, f"kda.cp2.{mode}", rounds(step), shape, sent(step, "kda"))


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
    for name, rows in (("fixed_total", half), ("fixed_per_rank", slice(None))):

        def step(rows=rows):
            run(layer, x[:, rows], upstream[:, rows])

        report(measure, f"moe.ep2.{name}", rounds(step), f"T={tokens}", sent(step, "experts"))


def share_experts(layer: nn.Module, parallel) -> None:
    """Keep this rank's half of the experts, and let tokens travel."""
    number = layer.experts.w1.shape[0]
    for name in ("w1", "w2", "w3"):
        weight = getattr(layer.experts, name).data
        setattr(layer.experts, name, nn.Parameter(weight.chunk(parallel.ep_size)[parallel.ep_rank].clone()))
    layer.dispatcher = ExpertDispatcher(parallel, number)


@TWO
def test_pipeline(measure):
    """Four layers over eight microbatches: one rank after the other, and two stages under 1F1B."""
    tokens, kind = 4096 // SHRUNK, device().type
    stack = {"num_hidden_layers": 4, "kda_layers": (1, 2, 3), "full_attention_layers": (4,), "attn_res_block_size": 2}
    small = {"first_k_dense_replace": 4, "intermediate_size": 2 * SIZES[kind]["hidden_size"], "vocab_size": 1024}
    config = K3Config(**SIZES[kind] | stack | small | {"pad_token_id": 0})
    ids = torch.randint(1, 1024, (8, tokens), generator=torch.Generator().manual_seed(1)).to(device())
    shape = f"8 x {tokens} tokens, 4 layers"
    whole = K3Model(config, device=device(), dtype=DTYPES[kind])
    report(measure, "model.pp1", rounds(lambda: one_rank(whole, ids)), shape)
    parallel = connect(ParallelState(pp_size=2), device().type)
    chunk = parallelize_model(K3Model(config, parallel, dtype=DTYPES[kind]).to(device()), parallel)
    pipeline = Pipeline([chunk], microbatches=8, rows=1, tokens=tokens)
    report(measure, "model.pp2", rounds(lambda: pipeline.step(ids, ids)), shape,
           sent(lambda: pipeline.step(ids, ids), "boundary"))  # fmt: skip


def one_rank(model: nn.Module, ids: torch.Tensor) -> None:
    for row in ids:
        model(row[None], labels=row[None])["loss"].backward()
