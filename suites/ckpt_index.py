"""The index of a release from its configuration alone: counts and bytes of the public one, and every kind of fault."""

import gzip
import json
import subprocess
import sys
from collections import Counter

import pytest

from k3.checkpoint.errors import CheckpointError
from k3.checkpoint.index import INDEX_FILE, audit, read_index
from k3.checkpoint.release import Release
from k3.config import K3Config

PUBLIC_INDEX_SHA256 = "a1c5210650ce71d2d3ae9ec5a101ac4afd3cf4b10091be589853437eb967febd"
LAYER = "language_model.model.layers.1."
EXPERT = LAYER + "block_sparse_moe.experts.3.w2.weight"


def _tiny() -> Release:
    """A text release of two layers, small enough to write out, with packed experts."""
    config = K3Config(
        num_hidden_layers=2, full_attention_layers=(2,), kda_layers=(1,), num_experts=4, num_experts_per_token=2
    )
    return Release(config, "mxfp4")


def _write(folder, release, change=lambda weights, metadata: None, text=None):
    weights = {name: shard.file for shard in release.shards() for name in shard.names}
    metadata = {"total_size": release.size_bytes}
    change(weights, metadata)
    path = folder / INDEX_FILE
    path.write_text(text or json.dumps({"metadata": metadata, "weight_map": weights}, indent=2))
    return path


@pytest.fixture
def public_index(public, tmp_path, data_file):
    """The real index, unpacked to a temporary folder."""
    for name in ("config.json", INDEX_FILE + ".gz"):
        data_file(public / name)
    path = tmp_path / INDEX_FILE
    path.write_bytes(gzip.decompress((public / (INDEX_FILE + ".gz")).read_bytes()))
    return path


def test_formula_counts():
    """The default configuration gives 497,220 keys only with its vision tower, 497,052 without, in 94 text shards."""
    release = Release(K3Config(), "mxfp4")
    assert release.num_tensors == 497_220 - 168
    assert len(release.shards()) == 94
    assert release.size_bytes == 1_560_860_324_864 - 2 * 447_358_976


def test_public_config_gives_the_published_totals(public):
    """The public config.json alone gives 497,220 keys, 96 shards and 1,560,860,324,864 bytes, by dtype as published."""
    release = Release.from_folder(public)
    assert (release.num_tensors, len(release.shards()), release.size_bytes) == (497_220, 96, 1_560_860_324_864)
    by_dtype = Counter()
    for tensor in release.tensors():
        by_dtype[tensor.dtype] += tensor.size_bytes
    assert by_dtype == {"BF16": 114_359_769_088, "F32": 44_489_728, "U8": 1_446_456_066_048}


def test_public_index_equals_the_formula(public, public_index):
    """Every one of the 497,220 keys of the real index is in the shard the formula gives it, and nothing else is."""
    index = read_index(public_index)
    assert (index.size_bytes, index.sha256) == (59_764_096, PUBLIC_INDEX_SHA256)
    expected = {name: shard.file for shard in Release.from_folder(public).shards() for name in shard.names}
    assert index.weight_map == expected
    found = audit(index, Release.from_folder(public))
    assert found.passed and not index.weight_map


@pytest.mark.parametrize(
    "change, kind, named",
    [
        (lambda w, m: w.pop(LAYER + "mlp_res_norm.weight"), "missing", LAYER + "mlp_res_norm.weight"),
        (lambda w, m: w.update({LAYER + "mlp.extra": "x.safetensors"}), "extra", LAYER + "mlp.extra"),
        (
            lambda w, m: w.update({LAYER + "self_attn.q_a_proj.weight": "model-00001-of-000003.safetensors"}),
            "misplaced",
            LAYER + "self_attn.q_a_proj.weight in model-00001",
        ),
        (lambda w, m: w.update({EXPERT + "_scale": "model-00001-of-000003.safetensors"}), "split", EXPERT),
        (lambda w, m: m.update(total_size=m["total_size"] + 1), "total", "total_size"),
        (lambda w, m: m.pop("total_size"), "total", "total_size is None"),
    ],
)  # fmt: skip
def test_audit_names_the_fault(tmp_path, change, kind, named):
    """A missing, extra or misplaced key, a pair in two shards and a wrong total are each found and named."""
    found = audit(read_index(_write(tmp_path, _tiny(), change)), _tiny())
    assert found.counts[kind] == 1 and named in found.faults[kind][0]


def test_untouched_index_passes(tmp_path):
    """The index the formula writes passes its own audit, whatever the order of its keys."""

    def backwards(weights, metadata):
        items = list(weights.items())[::-1]
        weights.clear()
        weights.update(items)

    assert audit(read_index(_write(tmp_path, _tiny(), backwards)), _tiny()).passed


@pytest.mark.parametrize(
    "text, message",
    [
        ('{"weight_map": {"a.weight": "x", "b": "y", "a.weight": "x"}}', "a.weight twice"),
        ('{"weight_map": {"a\\u002eweight": "x", "a.weight": "x"}}', "a.weight twice"),
        ('{"weight_map": {"a": "x"}, "weight_map": {"b": "y"}}', "weight_map twice"),
        ('{"weight_map": {"a": "x"', "not a checkpoint index"),
        ('{"metadata": {}}', "weight_map"),
        ('{"weight_map": {"a": 1}}', "not a checkpoint index"),
    ],
)  # fmt: skip
def test_unreadable_index_is_refused(tmp_path, text, message):
    """A key or a map named twice (escapes included), a cut file and a wrong type are refused with the file's name."""
    with pytest.raises(CheckpointError, match=message):
        read_index(_write(tmp_path, _tiny(), text=text))


def test_size_limit_cuts_between_pairs():
    """With a limit no planned file exceeds it, no pair is cut, and the order and the tensors stay the same."""
    layers = {"num_hidden_layers": 4, "kda_layers": (1, 2, 3), "full_attention_layers": (4,)}
    release = Release(K3Config(num_experts=600, **layers), "mxfp4")
    with pytest.raises(ValueError, match=r"cannot hold .*q_proj.weight; use at least"):
        release.shards(100_000_000)
    for limit in range(3_000_000_000, 3_006_000_000, 300_000):  # some of these end between codes and scales
        shards = release.shards(limit)
        assert max(shard.size_bytes for shard in shards) <= limit
        assert [n for shard in shards for n in shard.names] == [tensor.name for tensor in release.tensors()]
        assert all(not shard.names[0].endswith("_scale") for shard in shards)


def test_reading_an_index_needs_no_torch():
    """The audit imports no torch, whose import alone would take longer than the audit."""
    code = "import sys, k3.checkpoint.index, k3.config; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
