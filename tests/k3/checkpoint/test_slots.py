"""k3.checkpoint.slots and gather: which boxes a rank holds, and what cannot be read as boxes."""

import pytest
import torch

from k3 import K3Model
from k3.checkpoint.gather import Gather
from k3.checkpoint.slots import native_shapes, native_tensors, rank_names, slots
from k3.parallel import ParallelState
from suites import ckpt_folders as folders
from suites.ckpt_folders import LAYER, MOE


def test_shapes_are_those_of_a_whole_model():
    """The configuration alone gives every native name and shape of a built model."""
    state = K3Model(folders.config(), device="meta").state_dict()
    assert native_shapes(folders.config()) == {name: tuple(tensor.shape) for name, tensor in state.items()}


@pytest.mark.parametrize("rank", range(2))
def test_stage_names_are_those_of_its_model(rank):
    """A pipeline stage's names follow from its layers and its ends."""
    parallel = ParallelState(pp_size=2, pp_rank=rank)
    model = K3Model(folders.config(), parallel, device="meta")
    layers = parallel.layer_indices(model.config)
    assert rank_names(model.config, layers, rank == 0, rank == 1) == set(model.state_dict())


def test_stack_slots_are_views_of_its_rows():
    """Writing through a slot writes the row of its expert; plain tensors are their own slot."""
    model = folders.model()
    found = {slot.public: slot for slot in slots(native_tensors(model), model.config, None)}
    name = LAYER + "1." + MOE + "experts.2.w2.weight"
    with torch.no_grad():
        found[name].tensor.fill_(7)
    stack = model.decoder.layers["1"].block_sparse_moe.experts.w2
    assert (stack[2] == 7).all() and not (stack[1] == 7).any()
    assert len(found) == len(native_shapes(model.config)) + 2 * 3 * (4 - 1)


def test_wrong_local_shape_is_named():
    """A model whose tensors are not the slices of its layout is refused by name and both shapes."""
    model = folders.model()
    with pytest.raises(ValueError, match=r"embed_tokens.weight is \[96, 64\] here, .* \[48, 64\]"):
        list(slots(native_tensors(model), model.config, ParallelState(tp_size=2)))


def test_chunk_given_twice_is_refused():
    """The same chunk twice would silently win over itself."""
    model = folders.model()
    with pytest.raises(ValueError, match="is in two chunks"):
        native_tensors([model, model])


@pytest.mark.parametrize(
    "parallel, message",
    [(ParallelState(tp_size=2), "process group of exactly 2 ranks"), (None, "the model lacks .*embed_tokens")],
)
def test_incomplete_layouts_are_refused(parallel, message):
    """A layout without its process group, or one rank without all of the model, cannot be gathered."""
    model = K3Model(folders.config(), ParallelState(pp_size=2, pp_rank=1), device="meta")
    with pytest.raises(ValueError, match=message):
        Gather(model, model.config, parallel)
