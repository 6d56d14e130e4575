"""Packed documents under context parallelism, forward and backward, as a script and as a suite.

`K3_CP_SIZE={1,2,4} torchrun --standalone --nproc-per-node=8 -m suites.thd_cp` runs on its ranks (the others are data
parallel), in both ways of splitting, checks the loss and the gradient norm against one rank, and prints one line each.
"""

from __future__ import annotations

import os
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from k3.parallel import ParallelState, clip_gradients, collectives, context_layout
from k3.sequence import SequenceLayout
from suites.goldens import relative
from suites.par_common import one_rank, par6, part, run_part
from suites.par_context import packed_batch
from suites.ranks import device

LIMIT = 1e-9


def run(cp_size: int, mode: str) -> dict[str, float]:
    """One packed forward and backward on all ranks; raises AssertionError where it differs from one rank."""
    config, state = par6()
    ids, labels, bounds = packed_batch(config, mode, cp_size)
    model = part(config, state, ParallelState(cp_size=cp_size, dp_size=dist.get_world_size() // cp_size))
    where = device()
    layout = context_layout(model.parallel, mode, ids.shape[1], bounds)
    split = getattr(layout, "split", lambda x: x)
    with collectives.count() as moves:
        found = run_part(model, split(ids), split(labels), layout=layout)
    wanted = one_rank(config, state, ids, labels, SequenceLayout(cu_seqlens=bounds))
    norm = torch.stack([grad.square().sum() for grad in wanted.grads.values()]).sum().sqrt()
    relative(found.logits.cpu(), split(wanted.logits), LIMIT, "logits")
    relative(found.loss.cpu(), wanted.loss, LIMIT, "loss")
    relative(clip_gradients(model, float("inf")).cpu(), norm, LIMIT, "gradient norm")
    sent = sum(move.size_bytes for move in moves if move.tag in ("kda", "mla"))
    return {"loss": float(found.loss), "norm": float(norm), "bytes_sent": sent, "device": where.type}


@pytest.mark.parametrize("cp_size", [1, 2, 4])
@pytest.mark.parametrize("mode", ["headwise", "state"])
@pytest.mark.ranks(4)
def test_packed(cp_size, mode):
    """Four ranks as cp x dp run packed documents forward and backward as one rank does."""
    run(cp_size, mode)


def main() -> None:
    """Entry point under torchrun: all sizes come from K3_CP_SIZE and the world."""
    cuda = torch.cuda.is_available()
    torch.set_num_threads(1)
    os.environ.setdefault("K3_DEVICE", "cuda" if cuda else "cpu")
    options = {"device_id": device()} if cuda else {}
    dist.init_process_group("nccl" if cuda else "gloo", timeout=timedelta(seconds=60), **options)
    cp_size, world = int(os.environ.get("K3_CP_SIZE", "1")), dist.get_world_size()
    if world % cp_size:
        raise ValueError(f"K3_CP_SIZE={cp_size} does not divide {world} ranks; use 1, 2 or 4")
    for mode in ("headwise", "state"):
        result = run(cp_size, mode)
        if dist.get_rank() == 0:
            print(f"cp_size={cp_size} ranks={world} {mode}: " + " ".join(f"{k}={v}" for k, v in result.items()))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
