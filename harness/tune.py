"""`k3-harness tune`: warm the kernels' tuned configurations and binaries, and keep them where jobs will find them.

The folder is the cluster profile's `cache_folders.TRITON_CACHE_DIR`. Three stages run GPU suites themselves (default:
those of the claims; `suites/tune_training.py` holds what training at full width needs alone), so what is warm is what
jobs will ask for: workers compile every candidate side by side, one process measures them alone, benchmarks first, and
a last warm run shows which entries are used; the rest is deleted. `fla/` below the folder holds the choices in fla's
own form, which serve packed batches and states too; the profile's environment turns them on with FLA_CACHE_MODE=full
and FLA_CONFIG_DIR. Entries name their own folder, so it must not move. `tuned.json` says for which GPU and toolchain
this was made.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

from harness import cluster, fingerprint
from harness.spec import HarnessError
from ledger import claimfile

VARIABLE = "TRITON_CACHE_DIR"
NOTE, FLA = "tuned.json", "fla"
INTERMEDIATE = (".ttir", ".ttgir", ".llir", ".ptx", ".source")  # four fifths of the bytes of an entry
PLUGINS = ("pytest_timeout", "pytest_benchmark.plugin", "suites.warm")
# One compiling worker takes the models that fill a GPU. Long sequences launch the kernels of shorter ones again.
LARGE = "bench_model or gpu_model or test_training_step"
SMALL = f"not 32768 and not 4096 and not ({LARGE})"


def configure(parser: argparse.ArgumentParser) -> None:
    """Arguments of `k3-harness tune`."""
    parser.add_argument("files", nargs="*", help="suite files; default: every one that a claim runs on a GPU")
    parser.add_argument("--cluster", default="local", help="profile whose cache_folders.TRITON_CACHE_DIR is filled")
    parser.add_argument("--folder", help="fill this folder instead")
    parser.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 1) * 3 // 4), help="to compile with")
    parser.add_argument("--keep-all", action="store_true", help="keep entries that no warm run uses")


def command(options: argparse.Namespace) -> int:
    """Tune, replay, prune. 0 when the warm run passes without measuring anything anew."""
    root = Path.cwd()
    files = options.files or gpu_files(root)
    folder = Path(options.folder or folder_of(cluster.find(options.cluster))).expanduser().resolve()
    taken = fingerprint.take()
    if not taken.gpus:
        raise HarnessError("tune needs a GPU and this host shows none; run it on a GPU node of the cluster")
    folder.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    compile_all(files, folder, options.workers)
    _stage("measure", started)
    if code := run_tests(sorted(files, key=lambda file: "bench" not in file), folder):
        return code
    write_fla_configs(folder)
    choices = digest(folder)
    _stage("replay", started)
    trace, began = folder / "used.txt", time.monotonic()
    trace.unlink(missing_ok=True)
    code = run_tests(files, folder, f"trace:{trace}")
    if not options.keep_all and code == 0:
        prune(folder, set(trace.read_text().split()))
    trace.unlink(missing_ok=True)
    note = {"gpu": taken.gpus[0]["name"], "driver": taken.driver, "toolchain": taken.toolchain, "ptxas": taken.ptxas}
    note |= {"choices": choices, "files": files, "warm_s": round(time.monotonic() - began, 1)}
    (folder / NOTE).write_text(json.dumps(note, indent=1) + "\n")
    print(f"{folder.name}: {size_bytes(folder) / 2**20:.1f} MiB, choices {note['choices'][:12]}")
    return code


def folder_of(profile: cluster.Cluster) -> str:
    """The folder a profile names. Raises HarnessError where it names none."""
    if folder := profile.cache_folders.get(VARIABLE):
        return os.path.expandvars(folder)
    raise HarnessError(
        f"cluster {profile.name!r} names no cache_folders.{VARIABLE}; add it to the profile, or --folder"
    )


def gpu_files(root: Path) -> list[str]:
    """Suite files of every claim that has a topology with GPUs, in file order."""
    claims = claimfile.load(root)
    on_gpu = (claim for claim, topology in claims.cells() if topology.device == "cuda" and topology.ranks == 1)
    return list(dict.fromkeys(test.split("::")[0] for claim in on_gpu for test in claim.tests))


def compile_all(files: list[str], folder: Path, workers: int) -> None:
    """Compile every candidate of `files` in the cache with `workers` processes; none is measured."""
    began = time.monotonic()
    chosen = [LARGE] + [SMALL] * (workers - 1) if workers > 1 else [f"{LARGE} or ({SMALL})"]
    started = [_start(files, folder, f"compile:{i}/{workers}", ["-k", tests]) for i, tests in enumerate(chosen)]
    for left, process in zip(reversed(range(workers)), started, strict=True):
        process.wait()
        binaries = len(list(folder.glob("*/*.cubin")))
        print(f"compile: {binaries} binaries after {time.monotonic() - began:.1f} s, {left} workers left", flush=True)


def run_tests(files: list[str], folder: Path, warm: str = "") -> int:
    """Run `files` one after another against the cache, benchmarks once and untimed; the first failing exit code."""
    codes = []
    for file in files:
        began = time.monotonic()
        codes.append(_start([file], folder, warm).wait())
        print(f"{file}: exit {codes[-1]} after {time.monotonic() - began:.1f} s", flush=True)
    return next((code for code in codes if code), 0)


def _start(files: list[str], folder: Path, warm: str, more: list[str] = ()) -> subprocess.Popen:
    switches = ["-oaddopts=", "-q", "--no-header", "-pno:cacheprovider", *(f"-p{name}" for name in PLUGINS)]
    env = os.environ | {VARIABLE: str(folder), "K3_WARM": warm, "FLA_CACHE_RESULTS": "0" if "compile" in warm else "1"}
    mode = "full" if warm.startswith("trace") else "disabled"  # old choices must not stand in for a measurement
    env |= {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "FLA_CACHE_MODE": mode, "FLA_CONFIG_DIR": str(folder / FLA)}
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL} if "compile" in warm else {}
    return subprocess.Popen(
        [sys.executable, "-m", "pytest", *switches, "--benchmark-disable", *more, *files], env=env, **quiet
    )


def prune(folder: Path, used: set[str]) -> None:
    """Delete cache entries that the warm run did not look up, and of the others what a launch does not read."""
    for entry in folder.iterdir():
        if entry.is_dir() and entry.name not in used and entry != folder / FLA:
            shutil.rmtree(entry)
    for path in folder.glob("*/*"):
        if path.suffix in INTERMEDIATE:
            path.unlink()


def digest(folder: Path) -> str:
    """Hash of every tuned choice in the cache: kernel, key and the fastest configuration."""
    lines = [json.dumps([name, key, best], sort_keys=True) for name, key, best, _ in tuned(folder)]
    return hashlib.sha256("\n".join(sorted(lines)).encode()).hexdigest()


def tuned(folder: Path) -> list[tuple[str, list, dict, float]]:
    """Every tuned choice in the cache: kernel, key, the fastest configuration, and its milliseconds."""
    found = []
    for path in sorted(folder.glob("*/*.autotune.json")):
        record = json.loads(path.read_text())
        best, times = min(record["configs_timings"], key=lambda pair: _median(pair[1]))
        found.append((path.name.removesuffix(".autotune.json"), record["key"], best, _median(times)))
    return found


def write_fla_configs(folder: Path) -> None:
    """One file a kernel in fla's form: every key with its choice, and for other keys the choice of the longest run."""
    (folder / FLA).mkdir(exist_ok=True)
    kernels: dict[str, list] = {}
    for name, key, best, took in tuned(folder):
        kernels.setdefault(name, []).append((took, key, best))
    for name, choices in kernels.items():
        entries = {_key_hash(key): {"autotune_key": key, "config": best} for _, key, best in choices}
        longest = max(choices, key=lambda choice: choice[0])[2]
        text = json.dumps({"kernel_name": name, "autotune_entries": entries, "default_config": longest}, indent=1)
        (folder / FLA / f"{name}.json").write_text(text + "\n")


def _key_hash(key: list) -> str:
    """fla's own hash of a tuning key (`fla.ops.utils.cache.AutotuneKey.key_hash`)."""
    return hashlib.md5(json.dumps(key, separators=(",", ":"), sort_keys=True).encode()).hexdigest()


def _median(times: float | list[float]) -> float:
    """Triton records median, 20% and 80% quantile, or one number."""
    return times[0] if isinstance(times, list) else times


def size_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _stage(name: str, started: float) -> None:
    print(f"{name}: {time.monotonic() - started:.0f} s so far", flush=True)
