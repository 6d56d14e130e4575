"""The protocol module: what is built, what is refused, and how a batch runs."""

import functools

import pytest
import torch

from k3 import K3Config, K3Model
from k3.parallel import ParallelState
from k3.protocol import ImplConfig, build_model, build_model_config, vocab_size
from tests.k3.support import ids, tiny


@pytest.fixture
def bundle():
    torch.manual_seed(0)
    return build_model(tiny(), impl_cfg=ImplConfig(device="cpu", dtype="float32"))


def test_bundle(bundle):
    """One chunk on one rank, in training mode, with a state of ones and nothing extra."""
    (model,) = bundle.chunks
    assert isinstance(model, K3Model) and model.training and bundle.extras == {}
    assert bundle.parallel_state == ParallelState() and vocab_size(tiny()) == 32


def test_config_sources():
    """A config, its public dict, and an object with to_dict all give the same config; a vision one is refused."""
    config = tiny()

    class Holder:
        def to_dict(self):
            return config.to_hf()

    for source in (config, config.to_hf(), Holder()):
        assert build_model_config(source) == config
    with pytest.raises(ValueError, match="vt_hidden_size"):
        build_model({"vt_hidden_size": 16, "patch_size": 14})


def test_forward_step(bundle):
    """A batch as a mapping or from an iterator gives the chunk's own forward."""
    x = ids(2, 6)
    batch = {"input_ids": x, "labels": x, "loss_mask": torch.ones(2, 6)}
    wanted = bundle.chunks[0](**batch)
    for given in (batch, iter([batch])):
        found = bundle.forward_step(given)
        assert torch.equal(found["logits"], wanted["logits"]) and found["loss"] == wanted["loss"]
    with pytest.raises(NotImplementedError, match="images"):
        bundle.forward_step(batch | {"images": x})


def test_packed_batches(bundle):
    """`use_thd` asks for cu_seqlens, which keep documents apart; without it they are refused."""
    packed = build_model(tiny(), impl_cfg=ImplConfig(device="cpu", dtype="float32", use_thd=True))
    x, bounds = ids(1, 9), torch.tensor([0, 4, 9], dtype=torch.int32)
    found = packed.forward_step({"input_ids": x, "cu_seqlens": bounds})["logits"]
    parts = [packed.chunks[0](part)["logits"] for part in (x[:, :4], x[:, 4:])]
    torch.testing.assert_close(found, torch.cat(parts, 1))
    with pytest.raises(ValueError, match="use_thd=True.*with cu_seqlens"):
        packed.forward_step({"input_ids": x})
    with pytest.raises(ValueError, match="use_thd=False.*without cu_seqlens"):
        bundle.forward_step({"input_ids": x, "cu_seqlens": bounds})


def test_optimizer():
    """A callable makes the optimizer of the bundle; a name is refused with what to pass instead."""
    make = functools.partial(torch.optim.SGD, lr=0.1)
    found = build_model(tiny(), impl_cfg=ImplConfig(dtype="float32", optimizer=make))
    assert isinstance(found.extras["optimizer"], torch.optim.SGD)
    with pytest.raises(NotImplementedError, match="'adam' by name.*callable"):
        ImplConfig(optimizer="adam")


def test_refused_settings():
    """Unknown settings are refused together, by name; unknown fields by Python."""
    with pytest.raises(ValueError, match="dtype='int4'.*kda_cp_mode='ring'"):
        ImplConfig(dtype="int4", kda_cp_mode="ring")
    with pytest.raises(TypeError, match="vision"):
        ImplConfig(vision=True)


def test_parallel_needs_a_process_group():
    """A layout of several ranks without a process group is refused; on the meta device it builds this rank's part."""
    layout = ParallelState(dp_size=2, ep_size=2)
    with pytest.raises(RuntimeError, match="process group"):
        build_model(tiny(), impl_cfg=ImplConfig(parallel=layout, device="cpu"))
    on_meta = build_model(tiny(), impl_cfg=ImplConfig(parallel=layout, device="meta")).chunks[0]
    assert on_meta.decoder.layers["1"].block_sparse_moe.experts.w1.shape == (2, 6, 8)


def test_deterministic():
    """`deterministic` switches torch's own flag on, and training twice gives the same bits."""
    try:
        runs = [self_trained() for _ in range(2)]
        assert torch.are_deterministic_algorithms_enabled()
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


def self_trained():
    """Parameters of a tiny model after three deterministic steps."""
    torch.manual_seed(0)
    settings = ImplConfig(dtype="float32", deterministic=True, optimizer=functools.partial(torch.optim.SGD, lr=0.1))
    bundle = build_model(tiny(), impl_cfg=settings)
    for _ in range(3):
        bundle.forward_step({"input_ids": ids(2, 8), "labels": ids(2, 8)})["loss"].backward()
        bundle.extras["optimizer"].step()
    return list(bundle.chunks[0].parameters())


def test_stages_do_not_run_alone():
    """A chunk of a pipeline names its layers and the engine when it is called like a whole model."""
    with pytest.warns(UserWarning, match="block alignment"):
        layout = ParallelState(pp_size=2, pp_layout=[["embedding", "decoder"], ["decoder", "loss"]])
    stage = K3Model(tiny(), layout)
    with pytest.raises(NotImplementedError, match=r"layers \[0\] of 2"):
        stage(ids(1, 3))


def test_whole_model_is_not_built_by_accident():
    """The public config on the meta device costs no memory and has the last stage's layers."""
    state = ParallelState(cp_size=8, dp_size=8, ep_size=32, pp_size=8, pp_rank=7, pp_is_first=False, pp_is_last=True)
    with torch.device("meta"):
        assert K3Model(K3Config(), state).layer_indices == list(range(84, 93))
