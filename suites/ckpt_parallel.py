"""Checkpoints across layouts: every rank loads and contributes only its own boxes, and the files do not show it.

Loads are compared with slices of a one-rank load, saves byte for byte with a one-rank save.
"""

import os
import signal

import pytest
import torch
import torch.distributed as dist

from k3 import K3Model, qat
from k3.checkpoint import CheckpointError, export_hf_weights, load_hf_weights, save_hf_weights
from k3.checkpoint.slots import native_tensors
from k3.checkpoint.source import Source
from k3.ops.mxfp4 import pack_naive
from k3.parallel import ParallelState, connect, parallelize_model, sync_gradients
from k3.parallel.pipeline import Pipeline
from k3.sharding import local_slices
from suites import ckpt_folders as folders
from suites.ckpt_cells import native
from suites.ckpt_folders import LAYER, MOE
from suites.goldens import relative
from suites.ranks import device, run_forked

LAYOUTS = {
    "tp2": {"tp_size": 2},
    "pp2": {"pp_size": 2},
    "ep2": {"dp_size": 2, "ep_size": 2},
    "tp2_etp2": {"tp_size": 2, "etp_size": 2},
    "tp2_ep2_etp2": {"tp_size": 2, "dp_size": 2, "ep_size": 2, "etp_size": 2},
    "tp2_ep2_pp2": {"tp_size": 2, "dp_size": 2, "ep_size": 2, "pp_size": 2},
    "tp2_ep2_etp2_pp2": {"tp_size": 2, "dp_size": 2, "ep_size": 2, "etp_size": 2, "pp_size": 2},
}
QAT = {"enabled": True, "format": "mxfp4"}


def ranked(*names):
    """Parameters of the named layouts (all by default), each marked with the ranks it needs."""
    return [
        pytest.param(LAYOUTS[n], id=n, marks=pytest.mark.ranks(ParallelState(**LAYOUTS[n]).world_size))
        for n in names or LAYOUTS
    ]


def shared(tmp_path):
    """Rank 0's temporary folder, on every rank."""
    box = [tmp_path]
    dist.broadcast_object_list(box, 0)
    return box[0]


def on_first(action):
    """Run on rank 0 while the others wait."""
    if dist.get_rank() == 0:
        action()
    dist.barrier()


def stages(axes, dtype=torch.float32):
    """This rank's chunks of the layout, with weights of the layout's own initialisation."""
    parallel = connect(ParallelState(**axes), device().type)
    states = [parallel.chunk(v) for v in range(parallel.vpp_size)]
    models = [K3Model(folders.config(), state, dtype=dtype).to(device()) for state in states]
    return [parallelize_model(m, state) for m, state in zip(models, states, strict=True)], parallel


def slices_of(state, parallel):
    """This rank's slice of a whole native tensor."""
    return {name: tensor[local_slices(name, tensor.shape, parallel)] for name, tensor in state.items()}


@pytest.mark.parametrize("axes", ranked())
def test_load_reads_this_ranks_boxes(axes, tmp_path):
    """Every rank's parameters are its slices of the one-rank load; it reads less than the whole, and no more memory."""
    folder = shared(tmp_path) / "release"
    on_first(lambda: folders.release(folder))
    whole = folders.model()
    everything = load_hf_weights(whole, folder, whole.config)
    chunks, parallel = stages(axes)
    report = load_hf_weights(chunks, folder, whole.config, parallel)
    found = {name: tensor.cpu() for name, tensor in native_tensors(chunks).items()}
    wanted = slices_of(whole.state_dict(), parallel)
    folders.assert_same_bytes(found, {name: wanted[name] for name in found})
    assert report.read_bytes < everything.read_bytes and report.peak_extra_bytes <= 2 * report.largest_tensor_bytes


@pytest.mark.parametrize("target", ["bf16", "mxfp4"])
@pytest.mark.parametrize("axes", ranked())
def test_save_is_that_of_one_rank(axes, target, tmp_path):
    """Saved from any layout, every tensor has the bytes, and every shard the name, of a one-rank save."""
    base = shared(tmp_path)
    chunks, parallel = stages(axes)
    source, config = base / "source", folders.config()

    def alone():
        model = folders.model()
        save_hf_weights(model, source, config)
        save_hf_weights(model, base / "alone", config, target=target, max_shard_size_bytes=30_000)

    on_first(alone)
    load_hf_weights(chunks, source, config, parallel)
    report = save_hf_weights(chunks, base / "saved", config, parallel, target=target, max_shard_size_bytes=30_000)
    folders.assert_same_bytes(folders.raw(base / "saved"), folders.raw(base / "alone"))
    names = [sorted(path.name for path in (base / kind).iterdir()) for kind in ("saved", "alone")]
    assert names[0] == names[1] and not [name for name in names[0] if name.startswith(".k3")]
    assert report.written_bytes < report.total_bytes and report.peak_extra_bytes < report.total_bytes / 8


@pytest.mark.parametrize("axes", ranked("tp2_ep2_etp2", "tp2_ep2_pp2"))
def test_untouched_release_comes_back(axes, tmp_path):
    """Loaded packed into a layout and saved like its source, a release comes back byte for byte, vision included."""
    base = shared(tmp_path)
    on_first(lambda: folders.release(base / "release", vision=True))
    chunks, parallel = stages(axes, torch.bfloat16)
    load_hf_weights(chunks, base / "release", folders.config(), parallel)
    like = {"target": "mxfp4", "scale_rule": "like_source", "source": base / "release"}
    save_hf_weights(chunks, base / "saved", folders.config(), parallel, **like)
    folders.assert_same_bytes(folders.raw(base / "saved"), folders.raw(base / "release"))


@pytest.mark.parametrize("axes", ranked("tp2_etp2", "tp2_ep2_pp2"))
def test_export_streams_to_every_rank(axes, tmp_path):
    """Every rank sees the saved stream, tensor for tensor and without a file; with a receiver, that rank alone."""
    base = shared(tmp_path)
    chunks, parallel = stages(axes)
    save_hf_weights(chunks, base / "saved", folders.config(), parallel, target="mxfp4")
    stream = [(n, t.clone()) for n, t in export_hf_weights(chunks, folders.config(), parallel, target="mxfp4")]
    saved = folders.raw(base / "saved")
    folders.assert_same_bytes(dict(stream), saved)
    assert len(stream) == len(saved)
    alone = list(export_hf_weights(chunks, folders.config(), parallel, target="mxfp4", receiver=1))
    assert [name for name, _ in alone] == ([name for name, _ in stream] if dist.get_rank() == 1 else [])


@pytest.mark.parametrize("axes", ranked("tp2_ep2_pp2"))
def test_one_ranks_failure_makes_every_model_unusable(axes, tmp_path):
    """When reading fails on rank 1 alone, all ranks raise, naming it, and no rank keeps a usable parameter."""
    folder = shared(tmp_path) / "release"
    on_first(lambda: folders.release(folder))
    chunks, parallel = stages(axes)
    read, calls = Source.read, []

    def failing(self, name, box=()):
        calls.append(name)
        if dist.get_rank() == 1 and len(calls) > 20:
            raise CheckpointError("input/output error")
        return read(self, name, box)

    Source.read = failing
    try:
        with pytest.raises(CheckpointError, match=r"input/output error|failed on ranks \[1\]"):
            load_hf_weights(chunks, folder, folders.config(), parallel)
    finally:
        Source.read = read
    assert all(tensor.isnan().all() for tensor in native_tensors(chunks).values())


@pytest.mark.parametrize("axes", ranked("tp2_etp2"))
def test_one_ranks_full_disk_fails_all_and_keeps_the_old(axes, tmp_path, monkeypatch):
    """When rank 1 cannot write its shard, every rank raises and the old checkpoint stays whole."""
    base = shared(tmp_path)
    chunks, parallel = stages(axes)
    save_hf_weights(chunks, base / "saved", folders.config(), parallel)
    before = folders.raw(base / "saved")

    def full(self, tensor):
        raise OSError(28, "No space left on device")

    if dist.get_rank() == 1:
        monkeypatch.setattr("k3.checkpoint.writer.ShardWriter.write", full)
    with pytest.raises(CheckpointError, match="No space left on device"):
        save_hf_weights(chunks, base / "saved", folders.config(), parallel, target="mxfp4")
    dist.barrier()
    folders.assert_same_bytes(folders.raw(base / "saved"), before)


def test_dying_rank_keeps_the_old_checkpoint(tmp_path):
    """A rank killed in the middle of a save: its peers fail, and the folder still holds the old checkpoint."""
    model = folders.model()
    save_hf_weights(model, tmp_path / "saved", model.config)
    before = folders.raw(tmp_path / "saved")

    def body():
        chunks, parallel = stages({"tp_size": 2})
        if dist.get_rank() == 1:
            from k3.checkpoint import gather

            gather.dist.send = gather.dist.recv = lambda *args: os.kill(os.getpid(), signal.SIGKILL)
        save_hf_weights(chunks, tmp_path / "saved", folders.config(), parallel)

    outcomes = run_forked(body, 2, timeout_s=10)
    assert [outcome.status for outcome in outcomes] == ["raised", "died"], outcomes
    folders.assert_same_bytes(folders.raw(tmp_path / "saved"), before)
    load_hf_weights(model, tmp_path / "saved", model.config)


@pytest.mark.parametrize("structure", sorted(folders.STRUCTURES))
@pytest.mark.ranks(8)
def test_structure_at_tp2_ep2_pp2(structure, tmp_path):
    """One structure through everything: loaded packed, saved like its source, exported in bf16 and under QAT."""
    base, config = shared(tmp_path), folders.config()
    on_first(lambda: folders.release(base / "release"))
    chunks, parallel = stages(LAYOUTS["tp2_ep2_pp2"], torch.bfloat16)
    load_hf_weights(chunks, base / "release", config, parallel)
    source = folders.raw(base / "release")
    found = {name: tensor.cpu() for name, tensor in native_tensors(chunks).items()}
    wanted = native(structure, slices_of(folders.as_loaded(source), parallel))
    held = {name for name in wanted if name in found}
    folders.assert_same_bytes({name: found[name] for name in held}, {name: wanted[name] for name in held})
    like = {"target": "mxfp4", "scale_rule": "like_source", "source": base / "release"}
    save_hf_weights(chunks, base / "saved", config, parallel, max_shard_size_bytes=25_000, **like)
    folders.assert_same_bytes(folders.of(structure, folders.raw(base / "saved")), folders.of(structure, source))
    plain = dict(export_hf_weights(chunks, config, parallel))
    qat.apply(chunks, QAT)
    trained = dict(export_hf_weights(chunks, config, parallel))
    folders.assert_same_bytes(folders.of(structure, trained), folders.of(structure, plain))
    loaded = native(structure, folders.as_loaded(folders.of(structure, plain)))
    folders.assert_same_bytes(loaded, native(structure, folders.as_loaded(source)))


def train(chunks, parallel, steps=3):
    """A few SGD steps of the layout's own kind; every dp rank takes its rows."""
    random = torch.Generator().manual_seed(31)
    ids, labels = (torch.randint(1, 96, (4, 8), generator=random) for _ in range(2))
    share = slice(parallel.dp_rank * (4 // parallel.dp_size), (parallel.dp_rank + 1) * (4 // parallel.dp_size))
    ids, labels = ids[share].to(device()), labels[share].to(device())
    optimizer = torch.optim.SGD([p for chunk in chunks for p in chunk.parameters()], lr=0.5)
    pipeline = Pipeline(chunks, microbatches=2, rows=len(ids) // 2, tokens=8) if parallel.pp_size > 1 else None
    for _ in range(steps):
        optimizer.zero_grad()
        if pipeline is not None:
            pipeline.step(ids, labels)
        else:
            chunks[0](ids, labels=labels)["loss"].backward()
        for chunk in chunks:
            sync_gradients(chunk)
        optimizer.step()


@pytest.mark.parametrize("axes", ranked("tp2_ep2_etp2", "tp2_ep2_pp2"))
def test_qat_export_proof(axes, tmp_path):
    """Trained under QAT in a layout and exported, the bytes are those of quantising the gathered masters, and a
    one-rank model loaded from them computes the logits of the one-rank fake-quantised source (float32, 1e-5)."""
    base, config = shared(tmp_path), folders.config()
    chunks, parallel = stages(axes)
    on_first(lambda: save_hf_weights(folders.model(), base / "start", config))
    load_hf_weights(chunks, base / "start", config, parallel)
    qat.apply(chunks, QAT)
    train(chunks, parallel)
    for target in ("bf16", "mxfp4"):
        save_hf_weights(chunks, base / target, config, parallel, target=target)
    masters, packed = folders.raw(base / "bf16"), folders.raw(base / "mxfp4")
    assert any(not torch.equal(masters[name], tensor) for name, tensor in folders.raw(base / "start").items())
    for name in (n for n in masters if f"{MOE}experts." in n):
        assert torch.equal(packed[name + "_packed"], pack_naive(masters[name].float())[0]), name
        assert torch.equal(packed[name + "_scale"], pack_naive(masters[name].float())[1]), name
    source, rollout = K3Model(config, dtype=torch.float32), K3Model(config, dtype=torch.float32)
    qat.apply(source, QAT)
    load_hf_weights(source, base / "bf16", config)
    load_hf_weights(rollout, base / "mxfp4", config)
    ids = torch.arange(1, 18).unsqueeze(0)
    with torch.no_grad():
        relative(rollout(ids)["logits"], source(ids)["logits"], 1e-5, "logits of the rollout")


@pytest.mark.parametrize("axes", ranked("tp2_etp2"))
def test_layout_forward_sees_the_exported_values(axes, tmp_path):
    """In a layout the stacks as this rank's forward reads them are slices of the decoded export."""
    base, config = shared(tmp_path), folders.config()
    chunks, parallel = stages(axes, torch.bfloat16)
    qat.apply(chunks, QAT)
    save_hf_weights(chunks, base / "export", config, parallel, target="mxfp4")
    decoded = slices_of(folders.as_loaded(folders.raw(base / "export")), parallel)
    for chunk in chunks:
        for name, seen in qat.seen_weights(chunk).items():
            assert torch.equal(seen.cpu(), decoded[name]), name


def test_blocks_cut_by_etp_are_decoded_whole(tmp_path):
    """Where etp cuts a block of 32 inputs a rank decodes the whole block and keeps its part; QAT refuses the layout."""
    config = folders.config(moe_intermediate_size=32)
    folder = folders.release(tmp_path, moe_intermediate_size=32)
    whole = K3Model(config, dtype=torch.float32)
    load_hf_weights(whole, folder, config)
    for rank in (0, 1):
        state = ParallelState(tp_size=2, etp_size=2, tp_rank=rank, etp_rank=rank)
        model = parallelize_model(K3Model(config, state, dtype=torch.float32), state)
        load_hf_weights(model, folder, config, state)
        folders.assert_same_bytes(native_tensors(model), slices_of(whole.state_dict(), state))
        with pytest.raises(ValueError, match=rf"{LAYER}1.{MOE}experts.w2 has 16 inputs on this rank"):
            qat.apply(model, QAT)
