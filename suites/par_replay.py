"""Router replay across layouts: the choices of one rank, replayed by ranks of any layout and in another precision."""

import pytest
import torch

from k3 import K3Model
from k3.parallel import ParallelState, context_layout
from k3.replay import pack_r3_replay_mask, pack_routed_experts, record_routing, replay_routing, router_replay_roots
from suites.goldens import relative
from suites.par_common import batch, check_experts, one_rank, par6, part, run_part

LAYOUTS = {
    "ep2": {"cp_size": 2, "ep_size": 2},
    "cp2": {"cp_size": 2},
    "tp2": {"tp_size": 2},
    "tp2_sp_cp2_ep2": {"tp_size": 2, "sequence_parallel": True, "cp_size": 2, "ep_size": 2},
}
RANKED = [
    pytest.param(axes, marks=pytest.mark.ranks(ParallelState(**axes).world_size), id=name)
    for name, axes in LAYOUTS.items()
]


def recorded(config, state, ids):
    """One rank's choices, [B, T, layers, k], and the layers."""
    model = K3Model(config, dtype=torch.float64)
    model.load_state_dict({name: tensor.double() for name, tensor in state.items()})
    with record_routing(model) as chosen:
        model(ids)
    layers = sorted(chosen)
    return torch.stack([chosen[layer][0].unflatten(0, ids.shape) for layer in layers], dim=2), layers


@pytest.mark.parametrize("axes", RANKED)
@pytest.mark.parametrize("mode", ["headwise", "state"])
def test_replay_under_a_layout(axes, mode):
    """In bfloat16 a layout left to itself routes some tokens elsewhere; with one rank's float64 choices none."""
    config, state = par6(torch.float64)
    ids, labels = batch(config, length=32)
    routed, layers = recorded(config, state, ids)
    model = part(config, state, ParallelState(**axes), dtype=torch.bfloat16)
    layout = context_layout(model.parallel, mode, 32)
    split = getattr(layout, "split", lambda x: x)
    free = run_part(model, split(ids), split(labels), layout).experts
    with replay_routing(model, pack_routed_experts(routed, layers, layout=layout, parallel=model.parallel)):
        replayed = run_part(model, split(ids), split(labels), layout).experts
    wanted = {layer: routed[:, :, i].flatten(0, 1).sort(-1).values for i, layer in enumerate(layers)}
    wanted = {layer: split(x.unflatten(0, ids.shape)).flatten(0, 1) for layer, x in wanted.items()}
    check_experts(replayed, wanted)
    assert any(not torch.equal(free[layer], wanted[layer]) for layer in layers), "nothing to replay in this batch"


def test_replay_changes_nothing_but_the_choice():
    """Replaying a run's own choices gives its logits, loss and every gradient, the router's included."""
    config, state = par6()
    ids, labels = batch(config)
    routed, layers = recorded(config, state, ids)
    wanted = one_rank(config, state, ids, labels)
    model = K3Model(config, dtype=torch.float64)
    model.load_state_dict(state)
    with replay_routing(model, pack_routed_experts(routed, layers)):
        model(ids, labels=labels)["loss"].backward()
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            relative(parameter.grad, wanted.grads[name], 1e-12, name)


def test_masked_tokens_choose_for_themselves():
    """Tokens outside the mask keep their own experts; those inside take the replayed ones."""
    config, state = par6()
    ids, _ = batch(config)
    model = K3Model(config, dtype=torch.float64)
    model.load_state_dict(state)
    own, layers = recorded(config, state, ids)
    first = layers[0]
    forced = {layer: torch.tensor([0, 1]).expand(ids.numel(), 2) for layer in layers}
    mask = pack_r3_replay_mask(torch.arange(ids.shape[1]).expand(ids.shape) < 5)
    with replay_routing(model, forced, mask), record_routing(model) as chosen:
        model(ids)
    found = chosen[first][0].unflatten(0, ids.shape)
    assert torch.equal(found[:, :5], torch.tensor([0, 1]).expand(found[:, :5].shape))
    assert torch.equal(found[:, 5:].sort(-1).values, own[:, 5:, 0].sort(-1).values)


def test_roots_are_the_routed_layers():
    """Every routed layer has a root, by its global index, and nothing stays replaced after a replay."""
    config, state = par6()
    model = K3Model(config, dtype=torch.float64)
    routers = router_replay_roots(model)
    assert list(routers) == [i for i in range(config.num_hidden_layers) if config.is_moe(i)]
    with record_routing(model):
        pass
    assert all("select" not in vars(router) for router in routers.values())


def test_wrong_shapes_are_refused():
    """A routing of other tokens, of other layers, or too few of them is refused."""
    config, _ = par6()
    model, ids = K3Model(config), torch.ones(1, 4, dtype=torch.int64)
    layers = list(router_replay_roots(model))
    with (
        pytest.raises(ValueError, match="routing of 3 tokens for 4"),
        replay_routing(model, dict.fromkeys(layers, ids.new_zeros(3, 2))),
    ):
        model(ids)
    with pytest.raises(ValueError, match="no routing for layers"), replay_routing(model, {}):
        pass
    with pytest.raises(ValueError, match=r"give \[B, T, layers, k\]"):
        pack_routed_experts(torch.zeros(1, 4, 2, 2), layers)
