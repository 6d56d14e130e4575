"""Tensor, expert and pipeline parallelism in the precision of training: a whole model over two ranks, through kernels.

In bfloat16 on GPUs KDA takes fla's kernels, experts the grouped product and the router its Triton kernels. Two ranks
are held to what one rank does in the same dtype on the same device: both are compared with float64, and the layout may
stray from it `TIMES` as far as one rank does in its worst layer, and so far from the one rank. Experts are those that
the float64 run chose, replayed, so that no comparison turns on a flipped choice.
"""

import pytest
import torch

from k3 import K3Config, K3Model
from k3.parallel import ParallelState, connect, sync_gradients
from k3.parallel.data import local_gradient
from k3.parallel.pipeline import Pipeline
from k3.replay import record_routing, replay_routing, router_replay_roots
from k3.sharding import local_slices
from suites.gpu_common import exact_float32, ratio  # noqa: F401
from suites.layout_layers import SIZES, value
from suites.par_common import load_part, part, run_part
from suites.ranks import device

pytestmark = pytest.mark.usefixtures("exact_float32")
TWO = pytest.mark.ranks(2, timeout_s=180)
CALM = 0.1  # by which matrices are shrunk: at full size one rank in bfloat16 is itself 30 % from float64
TIMES, FLOOR = 3.0, {torch.bfloat16: 1e-2, torch.float32: 1e-5}
DTYPES = [pytest.param(dtype, id=str(dtype).removeprefix("torch.")) for dtype in FLOOR]
ROWS, TOKENS = 4, 96  # more tokens than "auto" leaves to the definition
WIDE = {"hidden_size": 512, "kda_num_heads": 4, "num_attention_heads": 4, "num_key_value_heads": 4, "num_experts": 16,
        "num_experts_per_token": 4, "moe_intermediate_size": 256, "routed_expert_hidden_size": 256}  # fmt: skip
STACK = {"num_hidden_layers": 4, "kda_layers": (1, 2, 4), "full_attention_layers": (3,), "attn_res_block_size": 1,
         "first_k_dense_replace": 1, "vocab_size": 512, "pad_token_id": 0}  # fmt: skip


def config() -> K3Config:
    """Four layers, one of them MLA and three routed; on a GPU with the public head sizes its kernels are made for."""
    kind = device().type
    sizes = SIZES[kind] | (WIDE if kind == "cuda" else {}) | STACK
    return K3Config(**sizes | {"intermediate_size": 2 * sizes["hidden_size"]})


def drawn() -> dict[str, torch.Tensor]:
    """Weights in which everything matters, all of them numbers of bfloat16, so that every dtype starts alike."""
    shapes = {name: tensor.shape for name, tensor in K3Model(config(), dtype=torch.float32).state_dict().items()}
    generator = torch.Generator().manual_seed(1)
    drawn = {name: value(name, torch.randn(shape, generator=generator)) for name, shape in shapes.items()}
    calm = {name: 0.02 if "e_score" in name else CALM if is_matrix(name, x) else 1.0 for name, x in drawn.items()}
    return {name: (calm[name] * x).bfloat16().double() for name, x in drawn.items()}


def is_matrix(name: str, x: torch.Tensor) -> bool:
    return x.ndim > 1 and "conv1d" not in name


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and labels [ROWS, TOKENS], some labels ignored and most of the first row's."""
    ids = torch.randint(1, 512, (ROWS, TOKENS + 1), generator=torch.Generator().manual_seed(2)).to(device())
    labels = ids[:, 1:].masked_fill(ids[:, 1:] % 7 == 0, -100)
    labels[0, 8:] = -100
    return ids[:, :-1], labels


def whole(state, dtype, routing=None) -> tuple[dict[str, torch.Tensor], dict[int, torch.Tensor]]:
    """Logits, loss and every gradient of one rank in `dtype`, and the experts it chose, [ROWS, TOKENS, k] a layer."""
    model = K3Model(config(), dtype=dtype, device=device())
    model.load_state_dict(state)
    ids, labels = batch()
    with replaying(model, routing, slice(None)) if routing else record_routing(model) as chosen:
        out = model(ids, labels=labels)
        out["loss"].backward()
    found = {"logits": out["logits"].detach(), "loss": out["loss"].detach()}
    found |= {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return found, routing or {layer: idx[0].unflatten(0, ids.shape) for layer, idx in chosen.items()}


def replaying(model, routing, rows: slice, each: bool = False):
    """Replay these rows' experts in this model's layers: all in one forward, or each row in one of its own."""
    chosen = {layer: routing[layer][rows] for layer in router_replay_roots(model)}
    return replay_routing(model, {n: list(x) if each else x.flatten(0, 1) for n, x in chosen.items()})


@pytest.fixture
def case(dtype):
    """The weights, one rank in float64, its experts, and one rank in `dtype` with them."""
    torch.set_num_threads(1)
    state = drawn()
    wide, routing = whole(state, torch.float64)
    return state, routing, wide, whole(state, dtype, routing)[0]


def gradients(model) -> dict[str, torch.Tensor]:
    return {name: local_gradient(p) for name, p in model.named_parameters() if p.grad is not None}


def check(model, found, case, dtype, rows: slice = slice(None)) -> None:
    """Everything a rank has against float64 and against one rank in the same dtype."""
    _, _, wide, plain = case
    kinds = {name: name.rpartition("layers.")[2].partition(".")[2] or name for name in wide}
    strayed: dict[str, float] = {}
    for name, kind in kinds.items():
        strayed[kind] = max(strayed.get(kind, 0.0), ratio(plain[name], wide[name]))
    bad = {}
    for name, tensor in found.items():
        limit = TIMES * strayed[kinds[name]] + FLOOR[dtype]
        for label, reference in (("float64", wide[name]), ("one rank", plain[name])):
            apart = tensor.double() - mine(name, reference, model.parallel, rows).double()
            error = float(apart.norm() / reference.double().norm())
            if not error <= limit:
                bad[f"{name} from {label}"] = f"{error:.2e} > {limit:.1e}"
    assert len(found) > 15 and not bad, bad
    print("one rank from float64:", {kind: f"{far:.1e}" for kind, far in strayed.items() if far > 0.03})


def mine(name: str, x: torch.Tensor, parallel, rows: slice) -> torch.Tensor:
    """This rank's part of a result of one rank."""
    if name == "loss":
        return x
    return x[rows] if name == "logits" else x[local_slices(name, x.shape, parallel)]


@TWO
@pytest.mark.parametrize("axes", [{"tp_size": 2}, {"tp_size": 2, "sequence_parallel": True}], ids=["tp2", "tp2_sp"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_tensor(case, dtype, axes):
    """Two tensor-parallel ranks are as near to float64 as one rank: logits, loss and every gradient."""
    model = part(config(), case[0], ParallelState(**axes), dtype)
    ids, labels = batch()
    routing = case[1]
    if model.parallel.sequence_parallel:
        routing = {layer: idx.chunk(2, dim=1)[model.parallel.tp_rank] for layer, idx in routing.items()}
    with replaying(model, routing, slice(None)):
        done = run_part(model, ids, labels)
    check(model, {"logits": done.logits, "loss": done.loss, **gradients(model)}, case, dtype)


@TWO
@pytest.mark.parametrize("dtype", DTYPES)
def test_experts(case, dtype):
    """Experts over two ranks, each with half of the rows, are as near to float64 as one rank."""
    model = part(config(), case[0], ParallelState(dp_size=2, ep_size=2), dtype)
    ids, labels = batch()
    rows = slice(model.parallel.dp_rank * ROWS // 2, (model.parallel.dp_rank + 1) * ROWS // 2)
    with replaying(model, case[1], rows):
        done = run_part(model, ids[rows], labels[rows])
    check(model, {"logits": done.logits, "loss": done.loss, **gradients(model)}, case, dtype, rows)


@TWO
@pytest.mark.parametrize("dtype", DTYPES)
def test_stages(case, dtype):
    """Four microbatches over two pipeline stages are as near to float64 as one rank."""
    model = load_part(config(), case[0], connect(ParallelState(pp_size=2), device().type), dtype)
    ids, labels = batch()
    pipeline = Pipeline([model], microbatches=ROWS, rows=1, tokens=TOKENS)
    with replaying(model, case[1], slice(None), each=True):
        found = {"loss": pipeline.step(ids, labels)}
    with replaying(model, case[1], slice(None), each=True):
        logits = pipeline.evaluate(ids)
    sync_gradients(model)
    found |= {"logits": logits} if pipeline.holds_last else {}
    check(model, found | gradients(model), case, dtype)
