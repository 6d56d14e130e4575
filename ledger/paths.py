"""Path evidence: did the run take the path its claim is about, on every rank."""

from __future__ import annotations

from ledger.attempts import Examined
from ledger.record import Claim, Topology

# Path prefix -> what a kernel's name must contain for the announcement to be believed on a GPU.
KERNEL_MARKS: dict[str, tuple[str, ...]] = {
    "nccl.": ("nccl",),
    "fla.": ("kda", "attnres", "chunk", "fused", "conv", "l2norm", "gate"),
}


def path_faults(claim: Claim, topology: Topology, tests: list[str], found: Examined) -> list[str]:
    """Name the first required path that some rank did not announce, and what it announced instead."""
    for path in claim.paths:
        for rank in range(topology.ranks):
            rows = [found.rows[test][rank] for test in tests]
            announced = {name for row in rows for name in row.paths}
            if path not in announced:
                others = ", ".join(sorted(announced - set(claim.paths))) or "no announced path"
                return [f"fell back to {others} on rank {rank}; the claim is about {path}"]
            if fault := _kernel_fault(path, topology, {k.lower() for row in rows for k in row.kernels}):
                return [f"rank {rank}: {fault}"]
    return []


def _kernel_fault(path: str, topology: Topology, kernels: set[str]) -> str:
    """On a GPU the profiler must have seen a kernel that fits the announcement."""
    marks = next((marks for prefix, marks in KERNEL_MARKS.items() if path.startswith(prefix)), ())
    if topology.device != "cuda" or not marks or not kernels:
        return ""
    seen = any(mark in kernel for mark in marks for kernel in kernels)
    return "" if seen else f"announced {path} and the profiler saw no kernel of it"
