"""What a node is like, found out on the node for `k3-harness doctor`: one JSON file in the spool.

A script of its own, with nothing but the standard library: it must be able to say that everything else is missing.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import socket
import sys
from pathlib import Path

PACKAGES = ("torch", "pytest", "msgspec", "coverage", "pytest-timeout", "submitit", "triton", "flash-linear-attention")


def main(folder: Path) -> int:
    """Read FOLDER/question.json, write FOLDER/answer.json."""
    question = json.loads((folder / "question.json").read_text())
    folders = {name: os.path.expandvars(os.path.expanduser(path)) for name, path in question["cache_folders"].items()}
    answer = {
        "nonce": question["nonce"],
        "node": os.environ.get("SLURMD_NODENAME") or socket.gethostname(),
        "python": sys.version.split()[0],
        "executable": sys.executable,
        "packages": {name: version(name) for name in PACKAGES},
        "cache_folders": {name: writable(path) for name, path in folders.items()},
        "gpus": [gpu for gpu in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if gpu],
        "cpus": len(os.sched_getaffinity(0)),
        "scheduler_answers_here": scheduler_is_there(),
    }
    partial = folder / ".answer.json"
    partial.write_text(json.dumps(answer))
    os.replace(partial, folder / "answer.json")
    return 0


def version(package: str) -> str:
    """Version of an installed package, '' when it is missing."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def writable(path: str) -> str:
    """'' when a file can be made there, else why not."""
    try:
        Path(path).mkdir(parents=True, exist_ok=True)
        probe = Path(path) / f".k3-probe-{os.getpid()}"
        probe.touch()
        probe.unlink()
    except OSError as error:
        return f"{path}: {error.strerror}"
    return "" if "$" not in path else f"{path}: a variable in it is not set on the node"


def scheduler_is_there() -> bool:
    """Can a node resolve other nodes through the scheduler? Needed where their names do not resolve."""
    return any((Path(folder) / "scontrol").exists() for folder in os.environ.get("PATH", "").split(os.pathsep))


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
