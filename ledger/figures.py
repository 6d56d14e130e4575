"""What proven cells measured: the figures that the README prints below its matrix, from published evidence alone."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping
from pathlib import Path

from ledger.matrix import where
from ledger.memory import Memory
from ledger.record import Claim, ClaimStatus, Measure, digest

HEAD = "| claim, where | figure | shape | median | floor | peers |\n|---|---|---|---|---|---|"


def remembered(folder: Path, statuses: list[ClaimStatus], claims: Mapping[str, Claim], memory: Memory) -> list[str]:
    """`table`, worked out again only when the evidence or a status changed."""
    return memory.derived(
        "figures",
        list[str],
        lambda: digest([memory.of_folder(folder), statuses, [claims[status.id] for status in statuses]]),
        lambda: table(folder, statuses, claims),
    )


def table(folder: Path, statuses: Iterable[ClaimStatus], claims: Mapping[str, Claim]) -> list[str]:
    """Markdown lines: every measure of every proven cell, by rank 0 of its deciding run; [] if there are none."""
    from ledger.evidence import read_folder

    proven = [status for status in statuses if status.state == "proven"]
    runs = {file.run.record.run: file.run for file in read_folder(folder)} if proven else {}
    rows = [
        _row(status, measure)
        for status in proven
        if status.run in runs
        for measure in measures(runs[status.run], claims[status.id], status.topology)
    ]
    return [*HEAD.splitlines(), *rows] if rows else []


def measures(run, claim: Claim, topology: str) -> Iterable[Measure]:
    """The measures of a claim's passed tests on rank 0 of the jobs of one topology, in the order of the records."""
    jobs = {expected.job for expected in run.record.expected if expected.topology.name == topology}
    last = {}
    for stream in run.streams:
        if stream.job in jobs and stream.rank == 0:
            last[stream.job] = stream  # later attempts replace earlier ones
    for stream in last.values():
        for _, row, _ in stream.tests:
            if row.outcome == "passed" and {row.test, row.test.partition("[")[0]} & set(claim.tests):
                yield from row.measures


def _row(status: ClaimStatus, measure: Measure) -> str:
    value = statistics.median(measure.samples)
    floor = measure.context.get("floor_s")
    peers = [
        f"{label} {statistics.median(samples) / value:.2f}x"
        for label, samples in sorted(measure.context.get("peers", {}).items())
        if samples and value
    ]
    cells = [f"`{status.id}` {where(status)}", measure.name, f"{measure.shape} {measure.dtype}".strip(),
             f"{value:.3g} {measure.unit if measure.unit != '1' else ''}".strip(),
             f"{value / floor:.2f}x" if floor else "", ", ".join(peers)]  # fmt: skip
    return f"| {' | '.join(text.replace('|', '/') for text in cells)} |"
