"""What the layout suites share: the par6 proxy, its one-rank run, one rank's part of it, and the comparison.

Everything is compared with the same public weights on one rank: logits, loss, the experts chosen, and the gradient of
every parameter, element by element on the rank that stores it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch

from k3 import K3Config, K3Model
from k3.parallel import ParallelState, collectives, connect, parallelize_model, sync_gradients
from k3.parallel.data import local_gradient
from k3.parallel.tensor import full_logits, whole_parameter
from k3.sharding import local_slices
from suites import oracle_weights, proxies
from suites.goldens import Golden, relative
from suites.models import native_state
from suites.ranks import device

LIMIT = {torch.float64: 1e-9, torch.float32: 1e-4}
DOUBLE = [pytest.param(torch.float64, id="float64")]
BOTH = [*DOUBLE, pytest.param(torch.float32, id="float32")]


@dataclass
class Run:
    """One forward and backward: what is compared."""

    logits: torch.Tensor
    loss: torch.Tensor
    grads: dict[str, torch.Tensor]
    experts: dict[int, torch.Tensor] = field(default_factory=dict)  # layer -> chosen experts [N, k], sorted


def par6(dtype=torch.float64, seed: int = 5, heads: int | None = None) -> tuple[K3Config, dict[str, torch.Tensor]]:
    """The config of the golden case par6 with drawn weights, in which every head and every expert differs.

    `heads` replaces the case's four KDA and MLA heads. Matrices are shrunk in float32: at full size one rank in
    float32 is itself 2e-3 from float64, shrunk 2e-5.
    """
    hf = Golden("par6").hf
    if heads is not None:
        hf["text_config"] |= {"num_attention_heads": heads, "num_key_value_heads": heads}
        hf["text_config"]["linear_attn_config"]["num_heads"] = heads
    config = K3Config.from_hf(hf)
    state = native_state(oracle_weights.draw(hf["text_config"], seed), config.kda_num_heads)
    if dtype == torch.float32:
        state = {name: w * 0.2 if w.ndim > 1 and "conv1d" not in name else w for name, w in state.items()}
    return config, {name: tensor.to(dtype) for name, tensor in state.items()}


def par6_golden(dtype=torch.float32) -> tuple[K3Config, dict[str, torch.Tensor]]:
    """The golden case par6 with the vendor's weights."""
    golden = Golden("par6")
    config = K3Config.from_hf(golden.hf)
    state = native_state(oracle_weights.read(golden.weights_path), config.kda_num_heads)
    return config, {name: tensor.to(dtype) for name, tensor in state.items()}


def batch(config: K3Config, length: int = 16, rows: int = 2):
    """Ids and labels [rows, length] with ignored labels."""
    return proxies.tokens(length, config.vocab_size, batch=rows)


def watch_experts(model: K3Model) -> dict[int, torch.Tensor]:
    """Record, from now on, the experts each routed layer chooses."""
    chosen = {}
    for index, layer in model.decoder.layers.items():
        if hasattr(layer.ffn, "gate"):

            def keep(_module, _args, output, index=int(index)):
                chosen[index] = output[0].sort(-1).values

            layer.ffn.gate.register_forward_hook(keep)
    return chosen


def one_rank(config, state, ids, labels, layout=None, loss_mask=None) -> Run:
    """Forward and backward of the whole model on this rank alone."""
    torch.set_num_threads(1)
    dtype = next(iter(state.values())).dtype
    model = K3Model(config, dtype=dtype)
    model.load_state_dict(state)
    experts = watch_experts(model)
    out = model(ids, labels=labels, loss_mask=loss_mask, layout=layout)
    out["loss"].backward()
    grads = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    return Run(out["logits"].detach(), out["loss"].detach(), grads, experts)


def part(config, state, parallel: ParallelState, dtype=None) -> K3Model:
    """This rank's part of the model, with its slices of `state`. Collective: creates the meshes."""
    return load_part(config, state, connect(parallel, device().type), dtype)


def load_part(config, state, parallel: ParallelState, dtype=None) -> K3Model:
    """This rank's part of the model in a layout whose meshes exist; `dtype` is the state's unless given."""
    model = K3Model(config, parallel, dtype=dtype or next(iter(state.values())).dtype)
    model.load_state_dict({name: state[name] for name in model.state_dict()})
    return parallelize_model(model.to(device()), parallel)


def check_gradients(model: K3Model, wanted: dict[str, torch.Tensor], limit: float) -> None:
    """Every parameter's stored gradient equals this rank's slice of the one-rank gradient, and none is missing."""
    checked = 0
    for name, parameter in model.named_parameters():
        if parameter.grad is None:
            assert name not in wanted, f"{name} has no gradient here and one on one rank"
            continue
        whole = wanted[name]
        mine = whole[local_slices(name, whole.shape, model.parallel)]
        error = (local_gradient(parameter).cpu().double() - mine.double()).norm() / whole.double().norm().clamp_min(
            1e-30
        )
        assert error <= limit, f"gradient of {name}: relative difference {error:.3e} is above {limit:.0e}"
        checked += 1
    assert checked > 0, "no gradient was compared"


def whole_gradients(model: K3Model) -> dict[str, torch.Tensor]:
    """The whole gradient of every parameter of this stage by public name, one per expert. Collective."""
    found = {}
    for name, parameter in model.named_parameters():
        if parameter.grad is None:
            continue
        grad = whole_parameter(parameter.grad)
        if name.rpartition(".")[0].endswith(".experts"):
            stem, _, which = name.rpartition(".")
            found |= {f"{stem}.{e}.{which}.weight": rows for e, rows in enumerate(grad)}
        else:
            found[name] = grad
    return found


def check(model: K3Model, found: Run, wanted: Run, limit: float, tokens=lambda x: x) -> None:
    """Logits, loss, chosen experts and all gradients against one rank; `tokens` selects this rank's tokens."""
    relative(found.logits.cpu(), tokens(wanted.logits), limit, "logits")
    relative(found.loss.cpu(), wanted.loss, limit, "loss")
    check_gradients(model, wanted.grads, limit)


def run_part(model: K3Model, ids, labels, layout=None, loss_mask=None) -> Run:
    """Forward, backward and gradient sums of this rank's part."""
    where = next(model.parameters()).device
    experts = watch_experts(model)
    out = model(ids.to(where), labels=labels.to(where), loss_mask=loss_mask, layout=layout)
    out["loss"].backward()
    sync_gradients(model)
    experts = {index: whole_tokens(model, chosen, len(ids)) for index, chosen in experts.items()}
    return Run(full_logits(model, out["logits"]), out["loss"].detach(), {}, experts)


def whole_tokens(model: K3Model, chosen: torch.Tensor, rows: int) -> torch.Tensor:
    """Join what the tp ranks chose for their tokens when the stream is split; [N, k] in row-major token order."""
    if not model.parallel.sequence_parallel:
        return chosen
    group = model.parallel.group("tp")
    return collectives.all_gather(chosen.unflatten(0, (rows, -1)), 1, group, "experts").flatten(0, 1)


def check_experts(found: dict[int, torch.Tensor], wanted: dict[int, torch.Tensor], tokens=lambda x: x) -> None:
    """The chosen experts are those of one rank, exactly."""
    assert found, "no routed layer was watched"
    for index, chosen in found.items():
        assert torch.equal(chosen.cpu(), tokens(wanted[index])), f"layer {index} chose other experts than one rank"
