"""k3.checkpoint.release and synthetic: looking tensors up, planning shards, deterministic synthetic bytes."""

import hashlib

import pytest

from k3 import K3Config
from k3.checkpoint.release import Release, Tensor, expert_format, shard_file
from k3.checkpoint.synthetic import tensor_bytes, write_release
from suites import ckpt_folders as folders


def test_find_knows_every_tensor_and_no_other():
    """Every planned name is found as planned; near misses are not."""
    release = Release(folders.config(), "mxfp4", folders.VISION)
    assert all(release.find(tensor.name) == tensor for tensor in release.tensors())
    layer = "language_model.model.layers."
    for name in ("x", layer + "3.mlp_res_norm.weight", layer + "01.mlp_res_norm.weight", layer + "0.gate.weight"):
        assert release.find(name) is None


def test_narrow_experts_cannot_be_planned_packed():
    """Packed experts whose input width is no multiple of 32 are refused with the width."""
    release = Release(K3Config(moe_intermediate_size=3056), "mxfp4")
    with pytest.raises(ValueError, match="w2.weight has input width 3056"):
        release.num_tensors  # noqa: B018


@pytest.mark.parametrize("where", ["text_config", "top"])
def test_unknown_quantization_is_refused(where):
    """Another quantisation than the published one is refused by its name, wherever the config states it."""
    quantization = {"quantization_config": {"quant_method": "awq", "format": "int4"}}
    hf = {"text_config": quantization} if where == "text_config" else {"text_config": {}, **quantization}
    with pytest.raises(NotImplementedError, match="awq"):
        expert_format(hf)


def test_shard_names_are_the_published_ones():
    """Five digits, then six."""
    assert shard_file(7, 96) == "model-00007-of-000096.safetensors"


def test_synthetic_release_is_deterministic(tmp_path):
    """The same seed gives the same files, another seed others."""
    digests = []
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        folder = folders.release(tmp_path / name, seed=seed)
        digests.append(hashlib.sha256(b"".join(p.read_bytes() for p in sorted(folder.iterdir()))).hexdigest())
    assert digests[0] == digests[1] != digests[2]


def test_synthetic_a_log_is_padded_with_zeros():
    """Only the live heads of A_log carry values."""
    data = tensor_bytes(Tensor("language_model.model.layers.0.self_attn.A_log", "F32", (16,)), 4, 0)
    assert any(data[:16]) and not any(data[16:])


def test_write_release_returns_what_it_wrote(tmp_path):
    """The returned release has the folder's size."""
    release = write_release(tmp_path, folders.config().to_hf())
    headers = 8 * len(list(tmp_path.glob("*.safetensors")))
    on_disk = sum(path.stat().st_size for path in tmp_path.glob("*.safetensors"))
    assert release.size_bytes < on_disk - headers < release.size_bytes * 1.2
