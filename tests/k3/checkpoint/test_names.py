"""k3.checkpoint.names: public and native names in both directions."""

import pytest

from k3.checkpoint import names
from k3.sharding import canonical

STACK = "language_model.model.layers.3.block_sparse_moe.experts"


@pytest.mark.parametrize("part", ["weight", "packed", "scale"])
@pytest.mark.parametrize("which", ["w1", "w2", "w3"])
def test_an_expert_is_a_row_of_its_stack(which, part):
    """A public expert tensor, plain or half of a pair, names its stack, its row and its part, and comes back."""
    public = f"{STACK}.895.{which}.weight" + ("" if part == "weight" else f"_{part}")
    native = names.to_native(public)
    assert native == (f"{STACK}.{which}", 895, part)
    assert names.to_public(*native) == public


@pytest.mark.parametrize(
    "name",
    [
        "language_model.model.layers.3.block_sparse_moe.shared_experts.up_proj.weight",
        "language_model.model.layers.0.self_attn.A_log",
        "language_model.lm_head.weight",
        f"{STACK}.w4",
        f"{STACK}.w1.weight",
    ],
)
def test_everything_else_keeps_its_name(name):
    """Only routed experts are renamed; near misses of their pattern are not."""
    assert names.to_native(name) == (name, None, "weight")
    assert names.to_public(name) == name and not names.is_stack(name)


def test_a_stack_has_no_public_name_of_its_own():
    """Asking for the public name of a whole stack is refused."""
    with pytest.raises(ValueError, match="say which expert"):
        names.to_public(f"{STACK}.w2")


def test_parametrized_name_is_that_of_its_original():
    """What torch's parametrization calls `original` is the parameter."""
    assert canonical(f"{STACK}.parametrizations.w2.original") == f"{STACK}.w2"
    assert canonical(f"{STACK}.w2") == f"{STACK}.w2"


@pytest.mark.parametrize("heads, dim, stored", [(96, 128, 128), (3, 16, 16), (2, 4, 4), (8, 4, 8)])
def test_a_log_is_padded_to_the_head_dim(heads, dim, stored):
    """96 live heads are stored as 128 values; a model with more heads than channels is not cut."""
    assert names.a_log_padded(heads, dim) == stored
