"""What one rank of each pipeline stage holds and moves under a layout: `k3-layout plan`.

Parameters are counted on the meta device from the model and the sharding table; traffic is what the collectives of
`k3.parallel` send per optimizer step (tests compare it with the counted bytes); activations are the tensors autograd
keeps, to first order, without recomputation. Nothing here needs a process group.
"""

from __future__ import annotations

import warnings
from collections import defaultdict
from dataclasses import asdict, dataclass
from typing import Any

from k3.parallel import stages
from k3.parallel.mesh import ParallelState, divisors
from k3.sharding import local_shape, placement

GIB = 1024**3
OPTIMIZER_BYTES = 12  # per parameter: fp32 master copy and two AdamW moments
GRADIENT_BYTES = 4  # fp32, what a sum over ranks needs


@dataclass(frozen=True, kw_only=True)
class Workload:
    """One optimizer step of a data-parallel replica: `microbatches` of `rows` sequences of `tokens` tokens."""

    tokens: int = 8192
    rows: int = 1
    microbatches: int = 8
    kda_cp_mode: str = "headwise"
    act_bytes: int = 2
    fsdp: bool = False  # parameters and gradients over the replicas as well; the optimizer always is


@dataclass(frozen=True, kw_only=True)
class StagePlan:
    """One rank of one stage; sizes in bytes. `traffic`: what it sends per step, by axis."""

    stage: int
    layers: int
    parameters: int
    parameter_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    activation_bytes: int
    boundary_bytes: int  # one microbatch's message to the next stage
    traffic: dict[str, int]

    @property
    def total_bytes(self) -> int:
        """All that has to fit."""
        return self.parameter_bytes + self.gradient_bytes + self.optimizer_bytes + self.activation_bytes


def plan(config: Any, parallel: ParallelState, work: Workload) -> list[StagePlan]:
    """Return the plan of the first rank of every stage. Raises ValueError with every fault of the layout."""
    parallel.check(config, work.kda_cp_mode)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        states = [parallel.at(rank * parallel.stage_ranks) for rank in range(parallel.pp_size)]
    return [stage_plan(config, state, work) for state in states]


def stage_plan(config: Any, state: ParallelState, work: Workload) -> StagePlan:
    """Size one rank."""
    layers = state.layer_indices(config)
    local, stored, grads, optimizer = (0, 0, 0, 0)
    for name, shape, itemsize in stage_parameters(config, state):
        count = 1
        for size in local_shape(name, shape, state):
            count *= size
        replicas = state.edp_size if placement(name).kind == "expert" else state.dp_size * state.cp_size
        split = replicas if work.fsdp else 1
        local += count
        stored += count * itemsize // split
        grads += count * GRADIENT_BYTES // split
        optimizer += count * OPTIMIZER_BYTES // replicas
    return StagePlan(
        stage=state.stage,
        layers=len(layers),
        parameters=local,
        parameter_bytes=stored,
        gradient_bytes=grads,
        optimizer_bytes=optimizer,
        activation_bytes=activation_bytes(config, state, work),
        boundary_bytes=boundary_bytes(config, state, work),
        traffic=step_traffic(config, state, work),
    )


def stage_parameters(config: Any, state: ParallelState) -> list[tuple[str, tuple[int, ...], int]]:
    """Name, whole shape and bytes per element of every parameter of the stage, from the model on the meta device."""
    import torch

    from k3.model import K3Model

    model = K3Model(config, state, device="meta", dtype=torch.bfloat16)
    return [(name, tuple(p.shape), p.element_size()) for name, p in model.named_parameters()]


def stream_tokens(state: ParallelState, work: Workload) -> int:
    """Tokens of one microbatch in this rank's residual stream."""
    return work.rows * work.tokens // state.cp_size // (state.tp_size if state.sequence_parallel else 1)


def boundary_bytes(config: Any, state: ParallelState, work: Workload) -> int:
    """One message to the next stage: the prefix and every snapshot so far."""
    if state.pp_is_last:
        return 0
    held = stages.snapshots(state.layer_indices(config)[-1] + 1, config.attn_res_block_size)
    return (1 + held) * config.hidden_size * stream_tokens(state, work) * work.act_bytes


def activation_bytes(config: Any, state: ParallelState, work: Workload) -> int:
    """Activations of all microbatches in flight under 1F1B, pp - stage of them, capped by the microbatches."""
    tokens, stream = work.rows * work.tokens // state.cp_size, stream_tokens(state, work)
    layers = state.layer_indices(config)
    total = 0
    for index in layers:
        wide = mixer_width(config, state, index) * tokens
        inner, tokenwise = ffn_width(config, state, index)
        total += (wide + inner * tokens + (tokenwise + 6 * config.hidden_size) * stream) * work.act_bytes
    total += stages.snapshots(layers[-1] + 1, config.attn_res_block_size) * config.hidden_size * stream * work.act_bytes
    if state.pp_is_last:
        total += tokens * -(-config.vocab_size // state.tp_size) * (work.act_bytes + 4)  # logits and their fp32 copy
    return total * min(work.microbatches, state.pp_size - state.pp_rank)


def mixer_width(config: Any, state: ParallelState, index: int) -> int:
    """Elements per token that a mixer keeps: inside its heads, over tp."""
    if config.attention_type(index) == "kda":
        per_head = (
            11 * config.kda_head_dim + 2 * config.kda_head_dim
        )  # q k v twice, z, o, gate, normed, ...; fp32 decay
        return config.kda_num_heads // state.tp_size * per_head
    key = config.qk_nope_head_dim + config.qk_rope_head_dim
    per_head = 2 * key + 4 * config.v_head_dim
    latents = config.q_lora_rank + config.kv_lora_rank + config.qk_rope_head_dim
    return config.num_attention_heads // state.tp_size * per_head + latents


def ffn_width(config: Any, state: ParallelState, index: int) -> tuple[int, int]:
    """Elements per token that an FFN keeps: inside a tp region, and per token of the residual stream."""
    if not config.is_moe(index):
        return 3 * config.intermediate_size // state.tp_size, 0
    shared = 3 * config.num_shared_experts * config.moe_intermediate_size // state.tp_size
    latent, choices = config.routed_expert_hidden_size, config.num_experts_per_token
    routed = choices * (2 * latent + 3 * config.moe_intermediate_size // state.etp_size) + 3 * latent
    return shared, routed


def step_traffic(config: Any, state: ParallelState, work: Workload) -> dict[str, int]:
    """Bytes this rank sends to others per optimizer step, forward and backward, by axis.

    A ring is assumed for all-reduce (2 (n-1)/n of the bytes). Routing is taken as even.
    """
    sent: dict[str, float] = defaultdict(float)
    for index in state.layer_indices(config):
        sent["tp"] += 2 * _tensor_bytes(config, state, work)
        sent["cp"] += _context_bytes(config, state, work, index)
        if config.is_moe(index):
            sent["ep"] += _expert_bytes(config, state, work)
    sent["pp"] += boundary_bytes(config, state, work) + _entering_bytes(config, state, work)
    per_step = {axis: int(size * work.microbatches) for axis, size in sent.items()}
    return per_step | {"dp": int(_gradient_traffic(config, state))}


def _tensor_bytes(config, state: ParallelState, work: Workload) -> float:
    """One region, forward and backward."""
    whole = work.rows * work.tokens // state.cp_size * config.hidden_size * work.act_bytes
    return 4 * (state.tp_size - 1) / state.tp_size * whole


def _context_bytes(config, state: ParallelState, work: Workload, index: int) -> float:
    """One mixer, forward and backward."""
    cp, tokens = state.cp_size, work.rows * work.tokens // state.cp_size
    if config.attention_type(index) == "mla":
        latent = config.kv_lora_rank + config.qk_rope_head_dim
        return 2 * (cp - 1) * tokens * latent * work.act_bytes
    K, heads = config.kda_head_dim, config.kda_num_heads // state.tp_size
    if work.kda_cp_mode == "headwise":
        return 2 * (cp - 1) / cp * tokens * heads * (5 * K + 1) * work.act_bytes
    tail = 3 * (config.kda_short_conv_kernel_size - 1) * heads * K * work.act_bytes
    states = 2 * (cp - 1)  # transition and state, to every other rank
    if _in_turns(heads, cp, work.tokens // cp):
        states = (cp - 1) / cp  # the state alone, to the next rank if there is one
    return 2 * work.rows * (states * heads * K * K * 4 + (cp - 1) * tail)


def _in_turns(heads: int, cp: int, local_tokens: int) -> bool:
    from k3.parallel.turns import choose_groups

    return choose_groups(heads, cp, local_tokens) > 1


def _expert_bytes(config, state: ParallelState, work: Workload) -> float:
    """One routed layer, there and back, forward and backward; every tp rank sends its share of the tokens."""
    tokens = work.rows * work.tokens // state.cp_size / state.tp_size
    rows = tokens * config.num_experts_per_token * state.etp_size
    elsewhere = 1 - 1 / (state.ep_size * state.etp_size)
    return 4 * rows * elsewhere * config.routed_expert_hidden_size * work.act_bytes


def _entering_bytes(config, state: ParallelState, work: Workload) -> float:
    """The gradient this stage sends back to the one before."""
    if state.pp_is_first:
        return 0
    held = stages.snapshots(state.layer_indices(config)[0], config.attn_res_block_size)
    return (1 + held) * config.hidden_size * stream_tokens(state, work) * work.act_bytes


def _gradient_traffic(config, state: ParallelState) -> float:
    """Gradient sums over replicas, once a step."""
    total = 0.0
    for name, shape, _ in stage_parameters(config, state):
        replicas = state.edp_size if placement(name).kind == "expert" else state.dp_size * state.cp_size
        count = 1
        for size in local_shape(name, shape, state):
            count *= size
        total += 2 * (replicas - 1) / replicas * count * GRADIENT_BYTES
    return total


def verdict(config: Any, parallel: ParallelState, work: Workload, plans: list[StagePlan], memory_bytes: int) -> str:
    """Say whether the fullest rank fits, else the first thing that does not, and the nearest layout that would."""
    fullest = max(plans, key=lambda found: found.total_bytes)
    running, parts = 0, ("parameter_bytes", "gradient_bytes", "optimizer_bytes", "activation_bytes")
    for part in parts:
        running += getattr(fullest, part)
        if running > memory_bytes:
            what = part.removesuffix("_bytes") + ("s" if part != "optimizer_bytes" else " state")
            return (
                f"does not fit: {what} of stage {fullest.stage} pass {memory_bytes / GIB:.0f} GiB "
                f"({running / GIB:.1f} GiB so far); {suggestion(config, parallel, work, memory_bytes)}"
            )
    return f"fits: stage {fullest.stage} needs {fullest.total_bytes / GIB:.1f} of {memory_bytes / GIB:.0f} GiB a rank"


def suggestion(config: Any, parallel: ParallelState, work: Workload, memory_bytes: int) -> str:
    """Name the first change of one or two sizes under which every stage fits."""
    for change in _changes(config, parallel):
        try:
            other = ParallelState(**{**_sizes(parallel), **change})
            fits = max(p.total_bytes for p in plan(config, other, work)) <= memory_bytes
        except ValueError:
            continue
        if fits:
            return (
                "try " + ", ".join(f"{axis}={size}" for axis, size in change.items()) + f" ({other.world_size} ranks)"
            )
    return "no change of ep, dp or pp alone fits; use fewer tokens a microbatch, more cp, or fsdp"


def _sizes(parallel: ParallelState) -> dict[str, Any]:
    names = ("tp_size", "cp_size", "dp_size", "ep_size", "etp_size", "pp_size", "sequence_parallel")
    return {name: getattr(parallel, name) for name in names}


def _changes(config: Any, parallel: ParallelState) -> list[dict[str, Any]]:
    """Candidate changes, cheapest in ranks first."""
    bigger_ep = [ep for ep in divisors(config.num_experts) if ep > parallel.ep_size]
    changes: list[dict[str, Any]] = (
        [] if parallel.sequence_parallel or parallel.tp_size == 1 else [{"sequence_parallel": True}]
    )
    changes += [{"ep_size": ep} for ep in bigger_ep]
    for factor in (2, 4, 8):
        dp = parallel.dp_size * factor
        changes += [{"dp_size": dp}, *({"dp_size": dp, "ep_size": ep} for ep in bigger_ep)]
    return changes


def as_dict(found: StagePlan) -> dict[str, Any]:
    """Return a plan for --json."""
    return {**asdict(found), "total_bytes": found.total_bytes}
