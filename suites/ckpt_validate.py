"""`k3-validate-checkpoint` end to end: what it proves at each depth, and that any mismatch is named and never reported.

The command runs in this process through its entry point; its exit code and files are what a shell would see.
"""

import json
import os
import signal
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file

from k3.checkpoint import payloads, save_hf_weights
from k3.checkpoint.index import INDEX_FILE
from k3.checkpoint.validate import main
from k3.ops import mxfp4
from suites import ckpt_folders as folders
from suites.ckpt_folders import LAYER, MOE

SHARD = "model-00002-of-000007.safetensors"
PAIR = LAYER + "1." + MOE + "experts.1.w3.weight"
BIAS = LAYER + "1." + MOE + "gate.e_score_correction_bias"


def _run(folder, *options):
    report = folder.parent / "report.json"
    code = main([str(folder), "--output", str(report), *options])
    return code, json.loads(report.read_text()) if report.exists() else None


def _change(folder, change, file=SHARD):
    tensors = load_file(folder / file)
    change(tensors)
    save_file(tensors, folder / file)


@pytest.fixture
def release(tmp_path):
    """A complete small release: packed experts, vision tower and projector."""
    return folders.release(tmp_path / "release", vision=True, num_hidden_layers=4, kda_layers=(1, 2, 4))


def test_complete_release_passes(release):
    """Every tensor is covered once, by structure and transform, and the sample holds what it must."""
    code, report = _run(release)
    assert code == 0 and report["depth"] == "payloads"
    counts = {structure: sum(by.values()) for structure, by in report["coverage"].items()}
    assert sum(counts.values()) == report["keys"] == len(folders.raw(release))
    assert counts["routed experts"] == 3 * 4 * 3 * 2 and counts["router"] == 6 and counts["dense"] == 3
    assert counts["KDA"] == 3 * 14 and counts["MLA"] == 8 and counts["vision and projector"] == 18
    assert report["coverage"]["KDA"]["cut and padded"] == 3
    sampled = {entry["name"] for entry in report["sample"]}
    assert {LAYER + f"{layer}.mlp_res_norm.weight" for layer in (0, 1, 2, 3)} <= sampled


def test_signed_zeros_and_nan_payloads_survive(release):
    """-0 and NaN with any payload, in BF16 and F32, are compared as bits and pass."""

    def odd(tensors):
        plain = tensors[LAYER + "1.self_attn.q_proj.weight"].view(torch.int16)
        plain[0, :3] = torch.tensor([-32768, 0x7FC1, 0x7F81]).to(torch.int16)
        tensors[BIAS].view(torch.int32)[:2] = torch.tensor([0x7FA0BEEF, -2147483648])

    _change(release, odd)
    assert _run(release)[0] == 0


@pytest.mark.parametrize("rows", [1, 100, 256])
def test_only_scales_beyond_the_range_fail_the_codec(rows):
    """Every byte comes back under every scale up to 252; 253 and 254 lose what overflows, 255 all but zero codes."""
    codes, codec = torch.arange(256, dtype=torch.uint8)[:, None].expand(256, 16).contiguous(), mxfp4.Survival()
    lost = [codec.first_lost(codes.split(rows), torch.full((256,), scale, dtype=torch.uint8)) for scale in range(256)]
    assert lost[:253] == [None] * 253 and lost[253:] == [6, 4, 1]


def test_every_block_goes_through_the_codec(release, monkeypatch):
    """The codec is given each block of each pair once, in whatever pieces it is read; no other byte."""
    given, first_lost = [], mxfp4.Survival.first_lost
    monkeypatch.setattr(payloads, "CHUNK_BYTES", 1 << 9)

    def watched(self, pieces, scale):
        return first_lost(self, (given.append((piece.clone(), len(scale))) or piece for piece in pieces), scale)

    monkeypatch.setattr(mxfp4.Survival, "first_lost", watched)
    assert _run(release, "--jobs", "1")[0] == 0
    pairs = {n: t for n, t in folders.raw(release).items() if n.endswith("_packed")}
    assert max(len(piece) for piece, _ in given) == 32 and {blocks for _, blocks in given} == {
        tensor.numel() // 16 for tensor in pairs.values()
    }
    seen = torch.cat([piece.flatten() for piece, _ in given]).bincount(minlength=256)
    assert torch.equal(seen, torch.cat([tensor.flatten() for tensor in pairs.values()]).bincount(minlength=256))


def test_extreme_scales_survive(release):
    """Blocks under the two smallest scales, whose values are subnormal in bf16, survive beside others."""
    _change(release, lambda t: t[PAIR + "_scale"].flatten()[:5].copy_(torch.tensor([0, 1, 2, 252, 120]).byte()))
    assert _run(release)[0] == 0


@pytest.mark.parametrize(
    "change, named",
    [
        (lambda t: t[LAYER + "1.self_attn.A_log"][-1:].fill_(0.5), "A_log"),
        (lambda t: t[PAIR + "_scale"].fill_(255), PAIR),
        (lambda t: t.update({PAIR + "_scale": t[PAIR + "_scale"].to(torch.int8)}), PAIR),
        (lambda t: t.update({BIAS: t[BIAS].bfloat16()}), BIAS),
        (lambda t: t.pop(BIAS), BIAS),
    ],
)  # fmt: skip
def test_mismatch_is_named_and_not_reported(release, change, named, capsys):
    """A dropped value, an undecodable block, a wrong dtype or a lost key: exit 1, the tensor's name, no report."""
    assert _run(release)[0] == 0
    _change(release, change)
    code, report = _run(release)
    assert code == 1 and report is None
    assert named in capsys.readouterr().err


def test_key_beyond_the_model_is_named(release, capsys):
    """A tensor that the model has no place for, in its shard and in the index alike, fails by name."""
    extra, path = LAYER + "1.self_attn.unheard_of.weight", release / INDEX_FILE
    _change(release, lambda t: t.update({extra: torch.zeros(2, dtype=torch.bfloat16)}))
    index = json.loads(path.read_text())
    index["weight_map"][extra] = SHARD
    path.write_text(json.dumps(index))
    code, report = _run(release)
    assert code == 1 and report is None
    assert f"1 extra:\n  {extra}" in capsys.readouterr().err


def test_headers_only_says_what_it_does_not_prove(release):
    """With --headers-only a changed payload passes, and the report says that no payload was read."""
    _change(release, lambda t: t[PAIR + "_scale"].fill_(255))
    code, report = _run(release, "--headers-only")
    assert code == 0 and report["depth"] == "headers" and "no payload was read" in report["proves"]


def test_index_only_needs_no_shards(release, capsys):
    """With --index-only the shards may be absent; without it their absence is named."""
    for shard in release.glob("*.safetensors"):
        shard.unlink()
    assert _run(release, "--index-only")[0] == 0
    code, report = _run(release)
    assert code == 1 and report is None and "model-00001" in capsys.readouterr().err


def test_pin_of_another_release(release, tmp_path, capsys):
    """make-pin pins a release by its hashes; afterwards a single changed byte of its config is another release."""
    assert main(["make-pin", str(release), "--name", "abc", "--output", str(tmp_path / "pin.json")]) == 0
    code, report = _run(release, "--release", str(tmp_path / "pin.json"))
    assert code == 0 and report["release"] == "abc"
    (release / "config.json").write_text((release / "config.json").read_text() + " ")
    assert _run(release, "--release", str(tmp_path / "pin.json"))[0] == 1
    assert "config.json has SHA-256" in capsys.readouterr().err
    assert _run(release, "--release", "9f62e4e9")[0] == 1


def test_interrupted_validation_goes_on(release):
    """Shards that passed before an interruption are not read again unless they changed; the report counts them."""
    _change(release, lambda t: t[LAYER + "3.self_attn.A_log"].fill_(1), "model-00004-of-000007.safetensors")
    assert _run(release, "--jobs", "1")[0] == 1
    assert (release.parent / "report.json.progress").exists()
    _change(release, lambda t: t[LAYER + "3.self_attn.A_log"][4:].fill_(0), "model-00004-of-000007.safetensors")
    code, report = _run(release)
    assert code == 0 and 3 <= report["resumed_shards"] <= 6
    assert sum(sum(by.values()) for by in report["coverage"].values()) == report["keys"]
    assert not (release.parent / "report.json.progress").exists()


def _validate_and_die(folder, shards, torn):
    """Validate in a process that is killed once it has noted so many shards, in the middle of the next note."""
    pid = os.fork()
    if pid:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    add = payloads.Finished.add

    def dying(self, file, coverage):
        if len(self.files) == shards:
            with self.path.open("a") as log:
                log.write(torn)
            os.kill(os.getpid(), signal.SIGKILL)
        add(self, file, coverage)

    payloads.Finished.add = dying
    try:
        _run(folder, "--jobs", "1")
    finally:
        os._exit(1)


@pytest.mark.parametrize("shards", [0, 3, 6])
def test_killed_validation_goes_on(shards, release):
    """Killed after some shards it leaves no report; the next run reads only the others, and its report is complete."""
    expected = _run(release)[1] | {"resumed_shards": shards, "duration_s": 0}
    (release.parent / "report.json").unlink()
    assert _validate_and_die(release, shards, '{"identity": "') == -signal.SIGKILL
    assert not (release.parent / "report.json").exists()
    code, report = _run(release)
    assert code == 0 and report | {"duration_s": 0} == expected


@pytest.mark.parametrize("target", ["bf16", "mxfp4"])
@pytest.mark.parametrize("limit", [None, 25_000])
def test_own_saves_pass(target, limit, tmp_path):
    """What this package saves passes its own validation, at any shard size."""
    model = folders.model(torch.bfloat16)
    save_hf_weights(model, tmp_path / "saved", model.config, target=target, max_shard_size_bytes=limit)
    code, report = _run(tmp_path / "saved")
    assert code == 0 and report["experts"] == target


def test_public_index_through_the_command(public, tmp_path, data_file):
    """The real config and index pass as release 9f62e4e9 in a process of its own that never imports torch."""
    import gzip

    for name in ("config.json", INDEX_FILE + ".gz"):
        data_file(public / name)
    (tmp_path / "config.json").write_bytes((public / "config.json").read_bytes())
    (tmp_path / INDEX_FILE).write_bytes(gzip.decompress((public / (INDEX_FILE + ".gz")).read_bytes()))
    arguments = [str(tmp_path), "--index-only", "--release", "9f62e4e9", "--output", str(tmp_path / "report.json")]
    code = (
        "import sys; from k3.checkpoint.validate import main; code = main(sys.argv[1:]);"
        "status = dict(line.split(':') for line in open('/proc/self/status'));"
        "print('torch' in sys.modules, status['VmHWM'].split()[0]); sys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=True)
    torch_imported, peak_kib = done.stdout.split()[-2:]
    assert torch_imported == "False" and int(peak_kib) * 1024 < 400e6
    report = json.loads((tmp_path / "report.json").read_text())
    assert (report["keys"], report["shards"], report["total_bytes"]) == (497_220, 96, 1_560_860_324_864)
