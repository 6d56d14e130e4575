"""Checkpoint work beside a plain read or a SHA-256 of the same bytes: audit, load, save, validate, pack, unpack.

Ours and the peer alternate in one process (whole processes for the audit and the validation, whose peak memory is
measured too); every number follows a check of what was computed, and carries its peer's samples. Files are read again
after they were written, so they come from the page cache. K3_BENCH_RELEASE_GB sets the size of the validated release:
0.1 by default, 8.2 for the published figure, which takes minutes and as much disk; a large one is measured from the
disk as well, its files put out of the cache before each reading.
"""

import gzip
import hashlib
import json
import os
import subprocess
import sys
import time

import pytest
import torch

from k3 import K3Config, K3Model
from k3.checkpoint import load_hf_weights, save_hf_weights
from k3.checkpoint.index import INDEX_FILE
from k3.checkpoint.synthetic import write_release
from k3.hf_config import PUBLISHED_QUANTIZATION
from k3.ops import mxfp4

ROUNDS = 5
BYTES_PER_EXPERT = 10_030_000  # six routed layers of this width
HASH = (
    "import hashlib, sys\nfor path in sys.argv[1:]: print(hashlib.file_digest(open(path, 'rb'), 'sha256').hexdigest())"
)
CHUNK = 1 << 24


def _hf(num_experts):
    """A release of seven layers whose experts have the public proportions at a third of the width."""
    config = K3Config(
        num_hidden_layers=7, full_attention_layers=(4, 7), kda_layers=(1, 2, 3, 5, 6), hidden_size=1024,
        intermediate_size=2048, vocab_size=8192, num_attention_heads=8, kda_num_heads=8, q_lora_rank=256,
        kv_lora_rank=128, moe_intermediate_size=1024, routed_expert_hidden_size=1024, num_experts=num_experts,
        num_experts_per_token=4,
    )  # fmt: skip
    hf = config.to_hf()
    hf["text_config"]["quantization_config"] = PUBLISHED_QUANTIZATION
    return hf


def _timed(call):
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def _race(measure, name, size_bytes, ours, peer, peer_name, rounds=ROUNDS):
    """Alternate ours and the peer; record ours with the peer's samples."""
    samples = [(_timed(ours), _timed(peer)) for _ in range(rounds)]
    _record(measure, f"{name}_s", f"{size_bytes} bytes", samples, peer_name)


def _record(measure, name, shape, samples, peer_name):
    """One measure in seconds: ours, and the peer of the same rounds."""
    mine, other = ([pair[side] for pair in samples] for side in (0, 1))
    measure(name, "s", "lower", mine, shape=shape, peers={peer_name: other})


def _process(code_or_module, *arguments):
    """Run a fresh interpreter; return wall seconds and its peak memory in bytes."""
    report = "\nimport sys; status = dict(l.split(':', 1) for l in open('/proc/self/status'))"
    report += "\nprint(status['VmHWM'].split()[0], file=sys.stderr)"
    started = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-c", code_or_module + report, *map(str, arguments)],
        capture_output=True,
        text=True,
        check=True,
    )
    return time.perf_counter() - started, int(done.stderr.split()[-1]) * 1024


def _read(paths):
    """A plain read of whole files, in pieces."""
    buffer = bytearray(CHUNK)
    for path in paths:
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass


def _evict(paths):
    """Put files out of the page cache, and make sure of it: what is not cached cannot be read without waiting."""
    os.sync()
    for path in paths:
        file = os.open(path, os.O_RDONLY)
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        with pytest.raises(BlockingIOError):
            os.preadv(file, [bytearray(1)], os.fstat(file).st_size // 2, os.RWF_NOWAIT)
        os.close(file)


VALIDATE = "import sys; from k3.checkpoint.validate import main; assert main(sys.argv[1:]) == 0"


def test_audit_of_the_public_index(public, tmp_path, data_file, measure):
    """The whole process that audits the real index, its SHA-256 included, under 400 MB; beside hashing it alone."""
    data_file(public / "config.json")
    data_file(public / (INDEX_FILE + ".gz"))
    (tmp_path / "config.json").write_bytes((public / "config.json").read_bytes())
    (tmp_path / INDEX_FILE).write_bytes(gzip.decompress((public / (INDEX_FILE + ".gz")).read_bytes()))
    size, output = (tmp_path / INDEX_FILE).stat().st_size, tmp_path / "report.json"
    arguments = (tmp_path, "--index-only", "--release", "9f62e4e9", "--output", output)
    runs = [(_process(VALIDATE, *arguments), _process(HASH, tmp_path / INDEX_FILE)) for _ in range(ROUNDS)]
    assert json.loads(output.read_text())["keys"] == 497_220
    shape = f"{size} bytes"
    _record(measure, "audit_process_s", shape, [(ours[0], peer[0]) for ours, peer in runs], "SHA-256 of the index")
    measure("audit_peak_bytes", "B", "lower", [ours[1] for ours, _ in runs], shape=shape)
    assert max(ours[1] for ours, _ in runs) < 400e6


def test_validate_beside_sha256(tmp_path, measure):
    """Validating a whole release in a process of its own, beside hashing the same files in one."""
    gigabytes = float(os.environ.get("K3_BENCH_RELEASE_GB", "0.1"))
    release = write_release(tmp_path / "release", _hf(max(8, round(gigabytes * 1e9 / BYTES_PER_EXPERT))))
    files, output = sorted((tmp_path / "release").glob("*.safetensors")), tmp_path / "report.json"
    ours, peer = (VALIDATE, tmp_path / "release", "--output", output), (HASH, *files)
    states = [("in page cache", _read, ROUNDS)]
    if gigabytes >= 1:
        states = [("in page cache", _read, 3), ("on disk", _evict, 1)]
    for state, ready, rounds in states:
        runs = [[(ready(files), _process(*call))[1] for call in (ours, peer)] for _ in range(rounds)]
        coverage = json.loads(output.read_text())["coverage"]
        assert sum(sum(row.values()) for row in coverage.values()) == release.num_tensors
        samples, shape = [(mine[0], other[0]) for mine, other in runs], f"{release.size_bytes} bytes {state}"
        _record(measure, "validate_process_s", shape, samples, "SHA-256 of the files")
        measure("validate_to_sha256", "1", "lower", [mine / other for mine, other in samples], shape=shape)
        measure("validate_peak_bytes", "B", "lower", [mine[1] for mine, _ in runs], shape=shape)
        assert max(mine[1] for mine, _ in runs) < 1.5e9


@pytest.fixture
def small(tmp_path):
    """A packed release of about 90 MB, its model in bf16, and its files."""
    hf = _hf(8)
    write_release(tmp_path / "release", hf)
    model = K3Model(K3Config.from_hf(hf), dtype=torch.bfloat16)
    return tmp_path / "release", model, sorted((tmp_path / "release").glob("*.safetensors"))


def test_load_beside_read(small, measure):
    """Loading a packed release, decoded to bf16, beside reading its files."""
    folder, model, files = small
    report = load_hf_weights(model, folder, model.config)
    assert not any(tensor.isnan().any() for tensor in model.state_dict().values())
    load = lambda: load_hf_weights(model, folder, model.config)  # noqa: E731
    _race(measure, "load", report.read_bytes, load, lambda: _read(files), "plain read of the files")


@pytest.mark.parametrize("target", ["bf16", "mxfp4"])
def test_save_beside_write(target, small, tmp_path, measure):
    """Saving, durable and published as a whole, beside writing and syncing the same bytes."""
    folder, model, _ = small
    load_hf_weights(model, folder, model.config)
    report = save_hf_weights(model, tmp_path / "saved", model.config, target=target)
    payload = b"".join(path.read_bytes() for path in sorted((tmp_path / "saved").glob("*.safetensors")))

    def write():
        with (tmp_path / "plain").open("wb") as file:
            file.write(payload)
            os.fsync(file.fileno())

    save = lambda: save_hf_weights(model, tmp_path / "saved", model.config, target=target)  # noqa: E731
    _race(measure, f"save_{target}", report.total_bytes, save, write, "plain write and fsync of the same bytes")


@pytest.mark.parametrize("work", ["pack_bf16", "pack_f32", "unpack_bf16", "fake_quantise_bf16"])
def test_codec_beside_sha256(work, measure):
    """Packing and unpacking one routed expert weight of the public width, beside SHA-256 of the wide bytes."""
    weight = torch.randn(3072, 3584, generator=torch.Generator().manual_seed(1)).mul(0.02)
    wide = weight if work.endswith("f32") else weight.bfloat16()
    pair = mxfp4.pack(weight.bfloat16())
    naive = mxfp4.pack_naive(weight[:64].bfloat16().float())
    assert torch.equal(pair[0][:64], naive[0]) and torch.equal(pair[1][:64], naive[1])
    calls = {
        "pack": lambda: mxfp4.pack(wide),
        "unpack": lambda: mxfp4.unpack(*pair),
        "fake": lambda: mxfp4.fake_quantise(wide),
    }
    data = wide.view(torch.uint8).numpy()
    peer = lambda: hashlib.sha256(data).digest()  # noqa: E731
    _race(measure, work, wide.nbytes, calls[work.split("_")[0]], peer, "SHA-256 of the wide bytes", rounds=9)
