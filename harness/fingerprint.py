"""Where a rank ran: machine, accelerator, toolchain, and the environment that matters. Imports torch never.

What torch knows is asked of it only where it was imported already; else it is read from installed metadata.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import socket
import subprocess
import sys
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

from ledger.record import Fingerprint

MATTERS = (
    "OMP_", "MKL_", "CUDA_", "NCCL_", "GLOO_", "TORCH_", "TORCHINDUCTOR_", "TRITON_", "FLA_", "CUBLAS_", "K3_",
)  # fmt: skip
NOT_MINE = ("K3_BEAT", "K3_LAUNCHER", "K3_STATE_DIR")
GPU_QUERY = "index,name,uuid,memory.total,driver_version"


def take() -> Fingerprint:
    """The fingerprint of this process."""
    gpus, driver = gpus_here()
    return Fingerprint(
        host=socket.gethostname(), node=os.environ.get("SLURMD_NODENAME", socket.gethostname()),
        os=platform.platform(), cpu=cpu_name(), cpu_count=len(os.sched_getaffinity(0)), gpus=gpus, driver=driver,
        cuda=torch_cuda(), nccl=_nccl(), ptxas=_ptxas() if gpus else "", torch=installed("torch"),
        triton=installed("triton"), fla=installed("flash-linear-attention"), python=platform.python_version(),
        env=_environment(),
    )  # fmt: skip


def toolchain_here() -> dict[str, str]:
    """The versions by which evidence is told apart, of this interpreter; what is not installed is left out."""
    python = ".".join(platform.python_version_tuple()[:2])
    packages = {"torch": "torch", "triton": "triton", "fla": "flash-linear-attention"}
    versions = {name: version for name, package in packages.items() if (version := installed(package))}
    return versions | {"python": python}


def installed(package: str) -> str:
    """Version of an installed package, '' when it is not there."""
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


@cache
def torch_cuda() -> str:
    """The CUDA version torch was built for, read from its version file; '' for a CPU build."""
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        return ""
    text = (Path(spec.origin).parent / "version.py").read_text()
    found = re.search(r"^cuda\b.*=\s*['\"]([\d.]+)['\"]", text, re.MULTILINE)
    return found[1] if found else ""


@cache
def gpus_here() -> tuple[tuple[dict, ...], str]:
    """The GPUs this process may use and their driver, from nvidia-smi; nothing where there is none."""
    if shutil.which("nvidia-smi") is None:
        return (), ""
    command = ["nvidia-smi", f"--query-gpu={GPU_QUERY}", "--format=csv,noheader,nounits"]
    asked = subprocess.run(command, capture_output=True, text=True, check=False)
    rows = [[field.strip() for field in line.split(",")] for line in asked.stdout.splitlines() if line.count(",") == 4]
    gpus = tuple(
        {"index": int(row[0]), "name": row[1], "uuid": row[2], "memory_bytes": _mebibytes(row[3])}
        for row in rows
        if _visible(row[0], row[2])
    )
    return gpus, rows[0][4] if rows else ""


def cpu_name() -> str:
    """The processor's model name."""
    found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return found[1] if found else platform.machine()


def _visible(index: str, uuid: str) -> bool:
    shown = os.environ.get("CUDA_VISIBLE_DEVICES")
    return shown is None or any(entry and (entry == index or uuid.startswith(entry)) for entry in shown.split(","))


def _mebibytes(field: str) -> int:
    return int(field) * 1024**2 if field.isdigit() else 0


def _nccl() -> str:
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available():
        return ""
    return ".".join(str(part) for part in torch.cuda.nccl.version())


def _ptxas() -> str:
    spec = find_spec("triton")
    bundled = Path(spec.origin).parent / "backends" / "nvidia" / "bin" / "ptxas" if spec and spec.origin else None
    binary = str(bundled) if bundled and bundled.exists() else shutil.which("ptxas")
    if binary is None:
        return ""
    asked = subprocess.run([binary, "--version"], capture_output=True, text=True, check=False)
    found = re.search(r"V([\d.]+)", asked.stdout)
    return found[1] if found else ""


def _environment() -> dict[str, str]:
    return {k: v for k, v in sorted(os.environ.items()) if k.startswith(MATTERS) and k not in NOT_MINE}
