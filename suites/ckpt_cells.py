"""One cell per structure and operation: load, save, bf16 export, MXFP4 export, QAT names, shard rules."""

import json

import pytest
import torch

from k3 import K3Model, qat
from k3.checkpoint import export_hf_weights, load_hf_weights, save_hf_weights
from k3.checkpoint.release import Release
from suites import ckpt_folders as folders
from suites.ckpt_folders import LAYER, MOE, STRUCTURES

structures = pytest.mark.parametrize("structure", sorted(STRUCTURES))
QUANTISED = {"routed"}


def native(structure, state):
    """Native tensors of a structure: stacks stand for their experts."""
    if structure == "routed":
        return {name: tensor for name, tensor in state.items() if f"{MOE}experts." in name}
    return folders.of(structure, state)


@structures
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "f32"])
def test_load(structure, dtype, tmp_path):
    """Loading a packed release gives exactly its values: F32 stays F32, pairs are decoded, A_log keeps its heads."""
    folder = folders.release(tmp_path)
    model = K3Model(folders.config(), dtype=dtype)
    load_hf_weights(model, folder, model.config)
    wanted = native(structure, folders.as_loaded(folders.raw(folder)))
    found = native(structure, model.state_dict())
    wide = {name for name, tensor in wanted.items() if tensor.dtype == torch.float32}
    for name, tensor in found.items():
        assert tensor.dtype == (torch.float32 if name in wide else dtype), name
    folders.assert_same_bytes(found, {name: wanted[name].to(found[name].dtype) for name in wanted})


@structures
@pytest.mark.parametrize("experts", ["mxfp4", "bf16"])
def test_save_gives_the_source_back(structure, experts, tmp_path):
    """Load and save of an untouched release is byte-identical per tensor, packed pairs and padding included."""
    folder = folders.release(tmp_path / "source", experts)
    model = K3Model(folders.config(), dtype=torch.bfloat16)
    load_hf_weights(model, folder, model.config)
    rule = {"scale_rule": "like_source", "source": folder} if experts == "mxfp4" else {}
    save_hf_weights(model, tmp_path / "saved", model.config, target=experts, **rule)
    source, saved = folders.raw(folder), folders.raw(tmp_path / "saved")
    folders.assert_same_bytes(folders.of(structure, saved), folders.of(structure, source))


@structures
def test_bf16_export(structure):
    """The bf16 stream is the model itself: every weight under its public name, F32 kept, A_log padded with zeros."""
    model = folders.model(torch.bfloat16)
    exported = folders.of(structure, dict(export_hf_weights(model, model.config)))
    folders.assert_same_bytes(
        native(structure, folders.as_loaded(exported)), native(structure, model.state_dict())
    )  # fmt: skip
    for name, tensor in exported.items():
        if name.endswith("A_log"):
            assert tensor.shape == (16,) and not tensor[4:].any()


@structures
def test_mxfp4_export(structure):
    """Routed w1, w2, w3 become U8 pairs of the bf16-rounded weight; every other structure is exported as in bf16."""
    from k3.ops.mxfp4 import pack_naive

    model = folders.model()
    plain = folders.of(structure, dict(export_hf_weights(model, model.config)))
    packed = folders.of(structure, dict(export_hf_weights(model, model.config, target="mxfp4")))
    if structure not in QUANTISED:
        return folders.assert_same_bytes(packed, plain)
    wanted = {}
    for name, weight in plain.items():
        wanted[name + "_packed"], wanted[name + "_scale"] = pack_naive(weight.float())
    return folders.assert_same_bytes(packed, wanted)


@structures
def test_qat_names(structure):
    """Under QAT names resolve through `original`: loading state and both exports equal those of the plain model."""
    plain, trained = folders.model(), folders.model()
    report = qat.apply(trained, {"enabled": True, "format": "mxfp4"})
    names = native(structure, plain.state_dict())
    assert all((name in report["wrapped"]) == (structure in QUANTISED) for name in names)
    assert all((name in report["untouched"]) == (structure not in QUANTISED) for name in names)
    for target in ("bf16", "mxfp4"):
        streams = [dict(export_hf_weights(m, m.config, target=target)) for m in (trained, plain)]
        folders.assert_same_bytes(*(folders.of(structure, stream) for stream in streams))


@structures
def test_qat_load(structure, tmp_path):
    """A QAT model loads the same masters as a plain one."""
    folder = folders.release(tmp_path)
    trained = K3Model(folders.config(), dtype=torch.bfloat16)
    qat.apply(trained, {"enabled": True, "format": "mxfp4"})
    load_hf_weights(trained, folder, trained.config)
    exported = dict(export_hf_weights(trained, trained.config))
    found = native(structure, folders.as_loaded(folders.of(structure, exported)))
    folders.assert_same_bytes(found, native(structure, folders.as_loaded(folders.raw(folder))))


@structures
def test_shard_rules(structure, tmp_path):
    """Layer n is in shard n+1 as published; under a size limit no file exceeds it and no pair is split."""
    model = folders.model(torch.bfloat16)
    save_hf_weights(model, tmp_path / "whole", model.config, target="mxfp4", max_shard_size_bytes=None)
    save_hf_weights(model, tmp_path / "cut", model.config, target="mxfp4", max_shard_size_bytes=25_000)
    weight_map = json.loads((tmp_path / "whole/model.safetensors.index.json").read_text())["weight_map"]
    for name in folders.of(structure, weight_map):
        assert weight_map[name] == f"model-0000{int(name[len(LAYER)]) + 1}-of-000004.safetensors"
    cut = json.loads((tmp_path / "cut/model.safetensors.index.json").read_text())["weight_map"]
    assert set(cut) == set(weight_map) and len(set(cut.values())) > 4
    assert max(path.stat().st_size for path in (tmp_path / "cut").glob("*.safetensors")) <= 25_000
    for name in folders.of(structure, cut):
        if name.endswith("_packed"):
            assert cut[name] == cut[name.removesuffix("_packed") + "_scale"]
    for limit in range(17_000, 27_000, 500):
        for names in (set(shard.names) for shard in Release(model.config, "mxfp4").shards(limit)):
            assert {n.removesuffix("_packed") for n in names if n.endswith("_packed")} == {
                n.removesuffix("_scale") for n in names if n.endswith("_scale")
            }
    both = [folders.of(structure, folders.raw(tmp_path / kind)) for kind in ("whole", "cut")]
    folders.assert_same_bytes(*both)
