"""What `build_model` takes and gives under a layout: memory for this rank's part, and one rank's initial values."""

from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from k3.parallel import ParallelState
from k3.protocol import ImplConfig, build_model
from k3.sharding import local_slices
from suites.par_common import par6
from suites.ranks import device

LAYOUTS = {
    "tp2": {"tp_size": 2},
    "ep2": {"dp_size": 2, "ep_size": 2},
    "etp2": {"dp_size": 2, "etp_size": 2},
    "pp2": {"pp_size": 2},
    "ep8": {"dp_size": 8, "ep_size": 8},
    "tp2_ep2_pp2": {"tp_size": 2, "ep_size": 2, "pp_size": 2},
}
RANKED = [
    pytest.param(axes, marks=pytest.mark.ranks(ParallelState(**axes).world_size), id=name)
    for name, axes in LAYOUTS.items()
]


class Allocations(TorchDispatchMode):
    """Bytes of every new tensor with memory that an operation returns, the largest and all together."""

    def __init__(self):
        super().__init__()
        self.largest, self.total = 0, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        given = {x.untyped_storage().data_ptr() for x in real((args, kwargs or {}))}
        out = func(*args, **(kwargs or {}))
        for storage in (x.untyped_storage() for x in real(out)):
            if storage.data_ptr() not in given:
                self.largest, self.total = max(self.largest, storage.nbytes()), self.total + storage.nbytes()
        return out


def real(tree) -> list[torch.Tensor]:
    """The tensors with memory on this rank among the leaves of `tree`."""
    return [part(x) for x in tree_leaves(tree) if isinstance(x, torch.Tensor) and x.device.type != "meta"]


def stored_bytes(model) -> int:
    """Bytes of the parameters and buffers of this rank."""
    return sum(part(x).nbytes for x in (*model.parameters(), *model.buffers()))


def part(x: torch.Tensor) -> torch.Tensor:
    return getattr(x, "_local_tensor", x)


@pytest.mark.ranks(8)
def test_a_rank_takes_its_share(measure):
    """With 64 experts on eight ranks, no tensor is larger than a rank's part of one, and all are about that part."""
    config = replace(par6()[0], num_experts=64, moe_intermediate_size=64, routed_expert_hidden_size=64)
    layout = ParallelState(dp_size=8, ep_size=8)
    with Allocations() as seen:
        model = build_model(config, impl_cfg=ImplConfig(parallel=layout, device=device(), dtype="float32")).chunks[0]
    mine = stored_bytes(model)
    whole = mine + 7 * sum(part(x).nbytes for name, x in model.named_parameters() if ".experts." in name)
    assert whole > 5 * mine
    assert seen.largest == max(part(x).nbytes for x in model.parameters())
    assert seen.total < 3 * mine  # the values are drawn block by block beside what stores them
    measure("build.allocated", "B", "lower", [seen.total], shape="64 experts, ep8", dtype="float32")
    measure("build.stored", "B", "lower", [mine], shape="64 experts, ep8", dtype="float32")


@pytest.mark.parametrize("axes", RANKED)
def test_initial_values_are_those_of_one_rank(axes):
    """From one seed every rank of a layout starts with its slices of what one rank starts with, whatever its own."""
    config, _ = par6()
    torch.manual_seed(3)
    whole = build_model(config, impl_cfg=ImplConfig(dtype="float32")).chunks[0].state_dict()
    torch.manual_seed(3 if torch.distributed.get_rank() == 0 else 4)
    impl = ImplConfig(parallel=ParallelState(**axes), device="cpu", dtype="float32")
    model = build_model(config, impl_cfg=impl).chunks[0]
    found = dict((*model.named_parameters(), *model.named_buffers()))
    assert found
    for name, tensor in found.items():
        mine = whole[name][local_slices(name, whole[name].shape, model.parallel)]
        assert torch.equal(part(tensor), mine), name
    assert len({float(x.std()) for name, x in whole.items() if "q_proj" in name}) > 1, "layers start alike"
