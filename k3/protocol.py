"""The module that trainers (Megatron Lite among them) build a K3 through: config, bundle, forward step, checkpoints."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from os import PathLike
from typing import Any

import torch
from torch import Tensor, nn

from k3.config import K3Config
from k3.forward_step import ForwardStep
from k3.model import K3Model, random_seed
from k3.parallel import ParallelState, connect

DTYPES = {name: getattr(torch, name) for name in ("bfloat16", "float16", "float32", "float64")}
KDA_CP_MODES = ("headwise", "state")
_CHECKPOINT = ("load_hf_weights", "save_hf_weights", "export_hf_weights")


def __getattr__(name: str) -> Any:
    if name not in _CHECKPOINT:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module("k3.checkpoint"), name)


@dataclass(frozen=True, kw_only=True)
class ImplConfig:
    """How to build, as opposed to what. Raises one ValueError, or NotImplementedError for what we chose not to do.

    optimizer: None, or a callable from parameters to an optimizer, which then stands in `bundle.extras`.
    deterministic: switch torch to deterministic algorithms for this process. use_thd: batches are packed documents.
    microbatches: how many `forward_step` runs a call over pipeline stages (None: see there).
    """

    parallel: ParallelState | None = None
    optimizer: Callable[[Iterator[nn.Parameter]], Any] | None = None
    device: str | torch.device = "cpu"
    dtype: str | torch.dtype = "bfloat16"
    use_thd: bool = False
    deterministic: bool = False
    kda_cp_mode: str = "headwise"
    microbatches: int | None = None
    qat: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        if self.optimizer is not None and not callable(self.optimizer):
            raise NotImplementedError(
                f"optimizer={self.optimizer!r} by name is not implemented; pass a callable such as "
                "functools.partial(torch.optim.AdamW, lr=1e-4), or None"
            )
        found = []
        if self.dtype not in (*DTYPES, *DTYPES.values()):
            found.append(f"dtype={self.dtype!r} is unknown; use one of {', '.join(DTYPES)}")
        if self.kda_cp_mode not in KDA_CP_MODES:
            found.append(f"kda_cp_mode={self.kda_cp_mode!r} is unknown; use one of {', '.join(KDA_CP_MODES)}")
        if found:
            raise ValueError("ImplConfig: " + "; ".join(found))

    @property
    def torch_dtype(self) -> torch.dtype:
        return DTYPES.get(self.dtype, self.dtype)


@dataclass(frozen=True, kw_only=True)
class ModelBundle:
    """What `build_model` returns: the chunks of this rank (one per virtual stage) and how to run them."""

    chunks: list[K3Model]
    parallel_state: ParallelState
    forward_step: Callable[..., dict[str, Tensor | None]]
    extras: dict[str, Any] = field(default_factory=dict)


def build_model_config(source: K3Config | str | PathLike[str] | Mapping[str, Any] | Any) -> K3Config:
    """A K3Config from itself, a folder, a config.json, the public nested dict, or a transformers config object."""
    if isinstance(source, K3Config):
        return source
    if hasattr(source, "to_dict"):
        return K3Config.from_hf_config(source)
    return K3Config.from_hf(source)


def vocab_size(config: Any) -> int:
    """Rows of the embedding and the head."""
    return build_model_config(config).vocab_size


def build_model(config: K3Config | Any, *, impl_cfg: ImplConfig | None = None) -> ModelBundle:
    """Build this rank's chunks, initialised, placed and in training mode; memory is taken for this rank's part alone.

    Raises RuntimeError when a layout of several ranks finds no process group, except on the meta device.
    """
    config, impl_cfg = build_model_config(config), impl_cfg or ImplConfig()
    device = torch.device(impl_cfg.device)
    parallel = _connected(impl_cfg.parallel or ParallelState(), device)
    parallel.check(config, impl_cfg.kda_cp_mode)
    if impl_cfg.deterministic:
        torch.use_deterministic_algorithms(True)
    states = [parallel.chunk(v) if parallel.vpp_size > 1 else parallel for v in range(parallel.vpp_size)]
    chunks = [K3Model(config, state, device="meta", dtype=impl_cfg.torch_dtype) for state in states]
    if parallel.world_size > 1:
        from k3.parallel import parallelize_model

        chunks = [parallelize_model(chunk, state) for chunk, state in zip(chunks, states, strict=True)]
    if device.type != "meta":
        _give_memory(chunks, parallel, device)
    options = {name: getattr(impl_cfg, name) for name in ("use_thd", "kda_cp_mode", "microbatches")}
    step = ForwardStep(chunks=chunks, parallel=parallel, **options)
    return ModelBundle(
        chunks=chunks, parallel_state=parallel, forward_step=step, extras=_extras(chunks, parallel, impl_cfg)
    )


def _give_memory(chunks: list[K3Model], parallel: ParallelState, device: torch.device) -> None:
    """Allocate what this rank stores, and fill it from one seed that all ranks share."""
    seed = random_seed()
    if parallel.world_size > 1:
        from k3.parallel.data import shared_seed

        seed = shared_seed(seed, device)
    for chunk in chunks:
        chunk.to_empty(device=device).reset_parameters(seed)


def _connected(parallel: ParallelState, device: torch.device) -> ParallelState:
    if device.type == "meta" or parallel.world_size == 1 or parallel.mesh is not None:
        return parallel
    return connect(parallel, device.type)


def _extras(chunks: list[K3Model], parallel: ParallelState, impl_cfg: ImplConfig) -> dict[str, Any]:
    extras: dict[str, Any] = {}
    if impl_cfg.qat is not None:
        qat = importlib.import_module("k3.qat")
        extras["qat"] = qat.apply(chunks, impl_cfg.qat)
    if impl_cfg.optimizer is not None:
        extras["optimizer"] = impl_cfg.optimizer(p for chunk in chunks for p in chunk.parameters())
    return extras
