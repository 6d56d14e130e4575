"""Path evidence: did the run take the path its claim is about, on every rank."""

from __future__ import annotations

from ledger.attempts import Examined
from ledger.record import Claim, Topology

# Path prefix -> what some kernel's name must contain for the announcement to be believed on a GPU.
KERNEL_MARKS = {
    "nccl.": "nccl",
    "cudnn.": "cudnn",
    "fla.attnres": "attnres_fwd",
    "fla.causal_conv1d": "causal_conv1d_fwd",
    "fla.chunk_kda": "chunk_kda_fwd",
    "fla.cross_entropy": "cross_entropy_fwd",
    "fla.fused_recurrent_kda": "fused_recurrent_kda_fwd",
    "fla.rms_norm_gated": "layer_norm_gated_fwd",
    "fla.": "kda",
    "torch.grouped_mm": "grouped_gemm",
    "triton.attnres": "_mix",
    "triton.mxfp4_pack": "_quantise",
    "triton.mxfp4_unpack": "_dequantise",
    "triton.route": "_gather",
    "triton.short_conv": "_forward",
    "triton.situ": "_situ",
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
    mark = next((mark for prefix, mark in KERNEL_MARKS.items() if path.startswith(prefix)), "")
    if topology.device != "cuda" or not mark or not kernels:
        return ""
    return "" if any(mark in kernel for kernel in kernels) else f"announced {path} and the profiler saw no kernel of it"
