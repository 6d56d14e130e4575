"""ParallelState: the sizes and ranks of every parallel axis, checked once, passed in and never global.

Rank order, fastest first: tp, cp, dp, pp, so rank = ((pp_rank * dp + dp_rank) * cp + cp_rank) * tp + tp_rank. Experts
regroup the dp * cp * tp ranks of a stage, fastest first: etp, ep, edp. `connect` adds the device meshes; without a
mesh the state is plain arithmetic and needs no process group (and no torch).
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

from k3.parallel import stages

AXES = ("tp", "cp", "dp", "ep", "etp", "pp")
DENSE_AXES = ("pp", "dp", "cp", "tp")
EXPERT_AXES = ("pp", "edp", "ep", "etp")


def divisors(number: int) -> list[int]:
    """Return the divisors of `number`, ascending."""
    return [part for part in range(1, number + 1) if number % part == 0]


def nearest(value: int, valid: list[int]) -> int:
    """Return the valid choice nearest to `value`, the smaller one on a tie."""
    return min(valid, key=lambda choice: (abs(choice - value), choice))


@dataclass(frozen=True, kw_only=True)
class ParallelState:
    """Sizes and ranks of tp, cp, dp, ep, etp and pp. Raises ValueError with every fault at construction.

    `pp_layout` is an explicit list of stage rows; `vpp_size` virtual stages per pipeline rank (interleaved).
    `sequence_parallel` splits the residual stream over tp along tokens.
    """

    tp_size: int = 1
    cp_size: int = 1
    dp_size: int = 1
    ep_size: int = 1
    etp_size: int = 1
    pp_size: int = 1
    vpp_size: int = 1
    tp_rank: int = 0
    cp_rank: int = 0
    dp_rank: int = 0
    ep_rank: int = 0
    etp_rank: int = 0
    pp_rank: int = 0
    vpp_rank: int = 0
    pp_is_first: bool | None = None
    pp_is_last: bool | None = None
    pp_layout: stages.Rows | None = field(default=None, hash=False)
    sequence_parallel: bool = False
    mesh: Any = field(default=None, repr=False, compare=False)

    def __post_init__(self):
        if self.pp_layout is not None and self.pp_size >= 1 and self.vpp_size == 1:
            object.__setattr__(self, "vpp_size", max(1, len(self.pp_layout) // self.pp_size))
        faults = self._size_faults() or self._shape_faults()
        if faults:
            raise ValueError("; ".join(faults))
        object.__setattr__(self, "pp_is_first", self.stage == 0)
        object.__setattr__(self, "pp_is_last", self.stage == self.num_stages - 1)
        if self.pp_layout is not None and self.mesh is None and self.vpp_rank == 0:
            warnings.warn(
                "explicit pp_layout leaves block alignment to you: a boundary inside an Attention Residual block "
                "changes the snapshots a stage holds; print the table with `k3-layout pp`",
                stacklevel=3,
            )

    @property
    def num_stages(self) -> int:
        """Pipeline stages, virtual ones counted."""
        return self.pp_size * self.vpp_size

    @property
    def stage(self) -> int:
        """This chunk's stage: stage s lives on pipeline rank s mod pp_size."""
        return self.vpp_rank * self.pp_size + self.pp_rank

    @property
    def stage_ranks(self) -> int:
        """Ranks that share a pipeline stage."""
        return self.dp_size * self.cp_size * self.tp_size

    @property
    def world_size(self) -> int:
        """Ranks of the whole layout."""
        return self.pp_size * self.stage_ranks

    @property
    def edp_size(self) -> int:
        """Replicas of an expert shard within a stage."""
        return self.stage_ranks // (self.ep_size * self.etp_size)

    def layer_indices(self, config: Any) -> list[int]:
        """Return the global indices of the decoder layers this chunk holds. Raises ValueError on wrong coverage."""
        per_stage = stages.counts(
            config.num_hidden_layers, config.attn_res_block_size, self.num_stages, rows=self.pp_layout
        )
        first = stages.starts(per_stage)[self.stage]
        return list(range(first, first + per_stage[self.stage]))

    def chunk(self, vpp_rank: int) -> ParallelState:
        """Return the state of another virtual stage of this rank."""
        return replace(self, vpp_rank=vpp_rank, pp_is_first=None, pp_is_last=None)

    def at(self, rank: int, mesh: Any = None) -> ParallelState:
        """Return this layout as global rank `rank` sees it, by the documented rank order."""
        stage_rank, pp_rank = rank % self.stage_ranks, rank // self.stage_ranks
        return replace(
            self,
            tp_rank=stage_rank % self.tp_size,
            cp_rank=stage_rank // self.tp_size % self.cp_size,
            dp_rank=stage_rank // (self.tp_size * self.cp_size),
            etp_rank=stage_rank % self.etp_size,
            ep_rank=stage_rank // self.etp_size % self.ep_size,
            pp_rank=pp_rank,
            pp_is_first=None,
            pp_is_last=None,
            mesh=mesh,
        )

    def group(self, axis: str) -> Any:
        """Return the process group of an axis (or of dp_cp, ep_etp, edp, stage); None without a mesh."""
        return None if self.mesh is None else self.mesh.group(axis)

    def check(self, config: Any, kda_cp_mode: str = "headwise") -> None:
        """Raise ValueError naming every size that does not fit `config`, each with the nearest valid choice."""
        faults = _config_faults(self, config, kda_cp_mode)
        try:
            self.layer_indices(config)
        except ValueError as error:
            faults.append(str(error))
        if faults:
            raise ValueError("; ".join(faults))

    def _size_faults(self) -> list[str]:
        faults = []
        for axis in (*AXES, "vpp"):
            size, rank = getattr(self, f"{axis}_size"), getattr(self, f"{axis}_rank")
            if size < 1:
                faults.append(f"{axis}_size={size} is below 1; use 1 to leave the axis unused")
            elif not 0 <= rank < size:
                faults.append(f"{axis}_rank={rank} is outside 0..{size - 1}; give a rank below {axis}_size={size}")
        return faults

    def _shape_faults(self) -> list[str]:
        faults = []
        if self.stage_ranks % (self.ep_size * self.etp_size):
            valid = [size for size in divisors(self.stage_ranks) if self.stage_ranks // size % self.etp_size == 0]
            remedy = f"use ep_size={nearest(self.ep_size, valid)}" if valid else "use etp_size=1"
            faults.append(
                f"ep_size*etp_size={self.ep_size * self.etp_size} does not divide dp*cp*tp={self.stage_ranks}; {remedy}"
            )
        for name, found, true in (
            ("pp_is_first", self.pp_is_first, self.stage == 0),
            ("pp_is_last", self.pp_is_last, self.stage == self.num_stages - 1),
        ):
            if found is not None and found != true:
                faults.append(f"{name}={found} contradicts stage {self.stage} of {self.num_stages}; leave it out")
        if self.pp_layout is not None:
            faults += stages.row_faults(self.pp_layout)
            if len(self.pp_layout) != self.num_stages:
                faults.append(
                    f"pp_layout has {len(self.pp_layout)} stages, not a multiple of pp_size={self.pp_size}; "
                    f"give {self.pp_size} rows per virtual stage"
                )
        return faults


def _divides(name: str, number: int, axis: str, size: int) -> list[str]:
    if number % size == 0:
        return []
    return [
        f"{name}={number} is not divisible by {axis}_size={size}; use {axis}_size={nearest(size, divisors(number))}"
    ]


def _config_faults(state: ParallelState, config: Any, kda_cp_mode: str) -> list[str]:
    shared = config.moe_intermediate_size * config.num_shared_experts
    faults = _divides("num_attention_heads", config.num_attention_heads, "tp", state.tp_size)
    faults += _divides("kda_num_heads", config.kda_num_heads, "tp", state.tp_size)
    faults += _divides("intermediate_size", config.intermediate_size, "tp", state.tp_size)
    faults += _divides("shared expert width", shared, "tp", state.tp_size)
    faults += _divides("num_experts", config.num_experts, "ep", state.ep_size)
    faults += _divides("moe_intermediate_size", config.moe_intermediate_size, "etp", state.etp_size)
    if kda_cp_mode not in ("headwise", "state"):
        faults.append(f"kda_cp_mode={kda_cp_mode!r} is unknown; use 'headwise' or 'state'")
    elif kda_cp_mode == "headwise" and config.kda_num_heads % state.tp_size == 0:
        local = config.kda_num_heads // state.tp_size
        if local % state.cp_size:
            faults.append(
                f"kda_num_heads/tp_size={local} is not divisible by cp_size={state.cp_size}; "
                f"use cp_size={nearest(state.cp_size, divisors(local))} or kda_cp_mode='state'"
            )
    return faults


def layout_faults(config: Any, kda_cp_mode: str, sizes: dict[str, int]) -> list[str]:
    """Return every fault of axis sizes for `config`, those of the sizes alone and those of the model together."""
    try:
        state = ParallelState(**sizes)
    except ValueError as error:
        positive = {f"{axis}_size": max(1, sizes.get(f"{axis}_size", 1)) for axis in AXES}
        return [str(error), *_config_faults(SimpleNamespace(**positive), config, kda_cp_mode)]
    try:
        state.check(config, kda_cp_mode)
    except ValueError as error:
        return [str(error)]
    return []


@dataclass(frozen=True)
class Meshes:
    """The device meshes over one set of ranks: dense (pp, dp, cp, tp) and expert (pp, edp, ep, etp)."""

    dense: Any
    expert: Any
    flat: dict[str, Any]

    def submesh(self, axis: str) -> Any:
        """Return the one-dimensional mesh of an axis or of a flattened pair of axes."""
        if axis in self.flat:
            return self.flat[axis]
        return (self.dense if axis in DENSE_AXES else self.expert)[axis]

    def group(self, axis: str) -> Any:
        """Return the process group of an axis or of a flattened pair of axes."""
        return self.submesh(axis).get_group()


def connect(parallel: ParallelState, device_type: str = "cpu") -> ParallelState:
    """Return `parallel` with this process's ranks and the device meshes. Collective over the whole world.

    Raises RuntimeError without an initialised process group, ValueError when the world size does not fit.
    """
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    if not dist.is_initialized():
        raise RuntimeError(
            f"a layout of {parallel.world_size} ranks needs an initialised process group; call "
            "torch.distributed.init_process_group first, or build on the meta device"
        )
    if dist.get_world_size() != parallel.world_size:
        raise ValueError(
            f"world size {dist.get_world_size()} differs from pp*dp*cp*tp={parallel.world_size}; "
            f"start {parallel.world_size} ranks or change dp_size"
        )
    dense_shape = tuple(getattr(parallel, f"{axis}_size") for axis in DENSE_AXES)
    expert_shape = tuple(getattr(parallel, f"{axis}_size") for axis in EXPERT_AXES)
    dense = init_device_mesh(device_type, dense_shape, mesh_dim_names=DENSE_AXES)
    expert = init_device_mesh(device_type, expert_shape, mesh_dim_names=EXPERT_AXES)
    flat = {
        "dp_cp": dense["dp", "cp"]._flatten("dp_cp"),
        "ep_etp": expert["ep", "etp"]._flatten("ep_etp"),
    }
    return parallel.at(dist.get_rank(), Meshes(dense, expert, flat))
