"""What the loader refuses, by file and key, and that a refused model is untouched and a failed one is unusable."""

import json
import os
from itertools import accumulate

import pytest
import torch
from safetensors.torch import load_file, save_file

from k3 import K3Model
from k3.checkpoint import CheckpointError, load_hf_weights, read_packed_experts
from k3.checkpoint.source import Source
from k3.ops import mxfp4
from suites import ckpt_folders as folders
from suites.ckpt_folders import LAYER, MOE

SHARD = "model-00002-of-000004.safetensors"  # layer 1: KDA and routed
OTHER = "model-00003-of-000004.safetensors"
Q = LAYER + "1.self_attn.q_proj.weight"
Q_X = Q + "_x"
A_LOG = LAYER + "1.self_attn.A_log"
PACKED = LAYER + "1." + MOE + "experts.2.w2.weight_packed"
SCALE = PACKED.replace("_packed", "_scale")


def _shard(folder, change, file=SHARD):
    tensors = load_file(folder / file)
    change(tensors)
    save_file(tensors, folder / file)


def _index(folder, change):
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    change(index["weight_map"])
    path.write_text(json.dumps(index))


def _both(folder, change):
    _shard(folder, change)
    _index(folder, change)


def _cut(folder, by):
    os.truncate(folder / SHARD, (folder / SHARD).stat().st_size - by)


def _twice_in_header(folder):
    """Name a second tensor like the first, in place; the header keeps its length."""
    raw = (folder / SHARD).read_bytes()
    old = Q.replace("q_proj", "k_proj").encode()
    assert raw.count(old) == 1
    (folder / SHARD).write_bytes(raw.replace(old, Q.encode()))


FAULTS = {
    "missing shard": (lambda f: (f / SHARD).unlink(), [SHARD, "missing"]),
    "shard cut by a byte": (lambda f: _cut(f, 1), [SHARD, "cut"]),
    "shard cut in its header": (lambda f: os.truncate(f / SHARD, 100), [SHARD, "cut inside its header"]),
    "empty shard": (lambda f: os.truncate(f / SHARD, 0), [SHARD, "cut inside its header"]),
    "bytes behind the end": (lambda f: (f / SHARD).write_bytes((f / SHARD).read_bytes() + b"x"), [SHARD, "has"]),
    "wrong dtype": (lambda f: _shard(f, lambda t: t.update({Q: t[Q].float()})), [SHARD, Q, "F32"]),
    "wrong shape": (lambda f: _shard(f, lambda t: t.update({Q: t[Q][:, :-1].contiguous()})), [SHARD, Q, "63"]),
    "F32 stored as BF16": (lambda f: _shard(f, lambda t: t.update({A_LOG: t[A_LOG].bfloat16()})), [SHARD, A_LOG]),
    "A_log of live heads alone": (lambda f: _shard(f, lambda t: t.update({A_LOG: t[A_LOG][:4].clone()})), [A_LOG]),
    "A_log with values behind its heads": (lambda f: _shard(f, lambda t: t[A_LOG].fill_(1)), [SHARD, A_LOG, "4 heads"]),
    "key in the wrong shard": (
        lambda f: (_shard(f, lambda t: t.pop(Q)), _shard(f, lambda t: t.update({Q: torch.zeros(64, 64)}), OTHER)),
        [Q, OTHER, SHARD],
    ),
    "key in two shards": (
        lambda f: _shard(f, lambda t: t.update({Q: torch.zeros(64, 64)}), OTHER), [Q, "also", OTHER],
    ),
    "key twice in a header": (_twice_in_header, [SHARD, Q, "twice"]),
    "key the index lacks": (lambda f: _index(f, lambda w: w.pop(Q)), [SHARD, Q, "index does not name"]),
    "key missing everywhere": (lambda f: _both(f, lambda t: t.pop(Q)), [Q, "missing"]),
    "unknown key": (
        lambda f: (_shard(f, lambda t: t.update({Q_X: torch.zeros(1)})), _index(f, lambda w: w.update({Q_X: SHARD}))),
        [SHARD, Q_X, "no tensor of this configuration"],
    ),
    "scale without packed": (lambda f: _both(f, lambda t: t.pop(PACKED)), [SHARD, SCALE, "has no", PACKED]),
    "packed without scale": (lambda f: _both(f, lambda t: t.pop(SCALE)), [SHARD, PACKED, "has no", SCALE]),
    "no index": (lambda f: (f / "model.safetensors.index.json").unlink(), ["model.safetensors.index.json"]),
    "interrupted save": (lambda f: (f / "k3-save-in-progress.json").touch(), ["k3-save-in-progress.json", "recover"]),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_refused_by_name_and_untouched(fault, tmp_path):
    """A broken folder is refused naming file and key, and not one bit of the model has changed."""
    change, named = FAULTS[fault]
    folder, model = folders.release(tmp_path), folders.model()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    change(folder)
    with pytest.raises(CheckpointError) as refusal:
        load_hf_weights(model, folder, model.config)
    assert all(part in str(refusal.value) for part in named), str(refusal.value)
    folders.assert_same_bytes(dict(model.state_dict()), before)


def test_failure_while_reading_leaves_nothing_usable(tmp_path, monkeypatch):
    """When the disk fails after half the reads, every parameter and buffer is NaN afterwards."""
    folder, model = folders.release(tmp_path), folders.model()
    read, calls = Source.read, []

    def failing(self, name, box=()):
        calls.append(name)
        if len(calls) > 40:
            raise CheckpointError(f"{name}: input/output error")
        return read(self, name, box)

    monkeypatch.setattr(Source, "read", failing)
    with pytest.raises(CheckpointError, match="input/output error"):
        load_hf_weights(model, folder, model.config)
    assert all(tensor.isnan().all() for tensor in model.state_dict().values())


def test_every_parameter_is_overwritten(tmp_path):
    """A model full of NaN has none after loading, buffers included."""
    folder, model = folders.release(tmp_path), folders.model()
    for tensor in model.state_dict().values():
        tensor.fill_(torch.nan)
    load_hf_weights(model, folder, model.config)
    assert not any(tensor.isnan().any() for tensor in model.state_dict().values())


def test_vision_keys_are_listed_not_lost(tmp_path):
    """Vision and projector tensors of a full release are read by nobody, and the report lists each of them."""
    folder, model = folders.release(tmp_path, vision=True), folders.model()
    report = load_hf_weights(model, folder, model.config)
    outside = {name for name in folders.raw(folder) if not name.startswith("language_model.")}
    assert set(report.ignored) == outside and len(outside) == 2 + 2 * 6 + 1 + 3


@pytest.mark.parametrize(
    "build, message",
    [
        (lambda: K3Model(folders.config(), device="meta"), "meta device"),
        (lambda: folders.model(num_experts=8), "demands|missing"),
        (lambda: folders.model().half(), "narrowed to torch.float16"),
    ],
)
def test_unfit_model_is_refused(build, message, tmp_path):
    """A model without memory, of another configuration, or too narrow for what is stored is refused."""
    model = build()
    with pytest.raises(ValueError, match=message):
        load_hf_weights(model, folders.release(tmp_path), model.config)


def test_memory_beside_the_model_is_bounded(tmp_path):
    """Torch's own allocation record stays below twice the largest tensor, and the report says as much."""
    from torch.profiler import ProfilerActivity, profile

    folder = folders.release(tmp_path, vocab_size=4096)
    model = K3Model(folders.config(vocab_size=4096), dtype=torch.bfloat16)
    mxfp4.unpack(torch.zeros(1, 16, dtype=torch.uint8), torch.zeros(1, 1, dtype=torch.uint8))  # makes its tables, once
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        report = load_hf_weights(model, folder, model.config)
    mapped = {path.stat().st_size for path in folder.glob("*.safetensors")}  # torch counts file mappings as memory
    events = sorted(recorded.events(), key=lambda event: event.time_range.start)
    sizes = [event.self_cpu_memory_usage for event in events]
    live = accumulate(size for size in sizes if abs(size) not in mapped)
    largest = max(tensor.nbytes for tensor in model.state_dict().values())
    assert report.largest_tensor_bytes == largest
    assert 0 < report.peak_extra_bytes <= 2 * largest and 0 < max(live) <= 2 * largest


def test_packed_experts_can_be_kept(tmp_path):
    """Stacks can be read as codes and scales, byte for byte those of the release."""
    folder, config = folders.release(tmp_path), folders.config()
    name = LAYER + "1." + MOE + "experts.w2"
    ((found, codes, scales),) = read_packed_experts(folder, config, None, [name])
    source = folders.raw(folder)
    assert found == name and codes.shape == (4, 32, 32) and scales.shape == (4, 32, 2)
    assert torch.equal(codes[2], source[PACKED]) and torch.equal(scales[2], source[SCALE])
