"""The first value of every parameter (spec c.9), drawn by name and block: no rank needs more than its own part.

A parameter is drawn in blocks of rows, each from a seed of its own, so that a rank of any layout fills what it stores
with the values one rank would have there, and holds one block more than that. Equal on devices of one kind.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from k3.kda import KDA, ShortConv
from k3.moe import Router, StackedExperts
from k3.precision import wide_dtype
from k3.sharding import local_slices

ROWS = 1024  # of a matrix in one block; of stacked experts a block is one expert
Rule = Callable[..., Tensor]  # fills a block [rows, ...] in place, drawing from `generator`


def one(block: Tensor, generator: torch.Generator) -> Tensor:
    return block.fill_(1)


def zero(block: Tensor, generator: torch.Generator) -> Tensor:
    return block.zero_()


def normal(block: Tensor, generator: torch.Generator, std: float) -> Tensor:
    return block.normal_(std=std, generator=generator)


def uniform(block: Tensor, generator: torch.Generator, bound: float) -> Tensor:
    return block.uniform_(-bound, bound, generator=generator)


def step_bias(block: Tensor, generator: torch.Generator) -> Tensor:
    """Mamba-2's: softplus(block) = dt, log-uniform in [1e-3, 1e-1]."""
    dt = block.uniform_(math.log(1e-3), math.log(1e-1), generator=generator).exp_()
    return block.copy_(dt + torch.log(-torch.expm1(-dt)))


def rule(module: nn.Module, name: str, std: float) -> Rule:
    """How tensor `name` of `module` starts: matrices, router and experts N(0, std), norms one; A_log = 0.

    The vendor's class draws A_log from log U(1, 16), which the bounded gate turns into no decay at all for a dt_bias
    of Mamba-2's size; it is an inference reference, so training follows the report. The pseudo-queries of the
    Attention Residuals start at zero, as in their paper: every mix begins as a plain mean.
    """
    key = name.rpartition(".")[2]
    match module:
        case KDA():
            return zero if key == "A_log" else step_bias
        case ShortConv():
            return partial(uniform, bound=module.weight.shape[-1] ** -0.5)  # torch's default for a depthwise Conv1d
        case Router() if key == "e_score_correction_bias":
            return zero
        case nn.Linear() if name.endswith("_res_proj.weight"):
            return zero
        case StackedExperts():
            return partial(normal, std=std)
        case nn.Linear() | nn.Embedding() | Router():
            return partial(normal, std=std)
    return one


@torch.no_grad()
def fill(model: nn.Module, seed: int) -> None:
    """Give every parameter and buffer that this rank stores its first value; a padding row is zero."""
    for prefix, module in model.named_modules():
        own = (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))
        for key, stored in own:
            name = f"{prefix}.{key}"
            placed = key in getattr(module, "placed", {})
            slices = local_slices(name, stored.shape, model.parallel if placed else None)
            part = stored.to_local() if isinstance(stored, DTensor) else stored
            _fill(part, stored.shape, slices, rule(module, name, model.config.initializer_range), f"{seed} {name}")
        if isinstance(module, nn.Embedding):
            _clear_padding(module)


def _fill(part: Tensor, shape: torch.Size, slices: tuple[slice, ...], draw: Rule, key: str) -> None:
    generator = torch.Generator(part.device)
    first = slices[0].start
    for start, stop in blocks(shape, slices[0]):
        block = torch.empty(stop - start, *shape[1:], device=part.device, dtype=wide_dtype(part.dtype))
        draw(block, generator=generator.manual_seed(_seed(f"{key} {start}")))
        mine = slice(max(start, first), min(stop, slices[0].stop))
        rows = block[mine.start - start : mine.stop - start]
        part[mine.start - first : mine.stop - first] = rows[(slice(None), *slices[1:])]


def blocks(shape: tuple[int, ...], rows: slice) -> Iterator[tuple[int, int]]:
    """The blocks, as bounds of rows of the whole tensor, that hold any of `rows`."""
    step = 1 if len(shape) == 3 and shape[1] > 1 else ROWS
    for start in range(rows.start // step * step, rows.stop, step):
        yield start, min(start + step, shape[0])


def _seed(key: str) -> int:
    return int.from_bytes(hashlib.blake2b(key.encode(), digest_size=7).digest())


def _clear_padding(module: Any) -> None:
    padding = getattr(module, "local_padding", module.padding_idx)
    if padding is not None:
        weight = module.weight.to_local() if isinstance(module.weight, DTensor) else module.weight
        weight[padding].zero_()
