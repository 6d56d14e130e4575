"""What running tests costs, from the durations the ledger has seen; a guess where it has seen none."""

from __future__ import annotations

import sqlite3
from dataclasses import dataclass
from pathlib import Path

from ledger.record import Topology
from ledger.state import ledger_path

UNKNOWN_TEST_S = 2.0
START_S = 4.0  # a rank's interpreter, torch and the suite's imports


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Seconds of CPU and GPU, and whether some of it is guessed."""

    cpu_s: float = 0.0
    gpu_s: float = 0.0
    estimated: bool = False


def of(tests: tuple[str, ...], topology: Topology, durations: dict[str, float]) -> Cost:
    """The cost of running `tests` on every rank of `topology`, one process per rank and suite file."""
    if not tests:
        return Cost()
    files = {test.split("::")[0] for test in tests}
    seconds = START_S * len(files) + sum(durations.get(test, UNKNOWN_TEST_S) for test in tests)
    gpus = max(topology.gpus_per_node * topology.nodes, topology.ranks) if topology.device == "cuda" else 0
    guessed = any(test not in durations for test in tests)
    return Cost(cpu_s=seconds * topology.ranks, gpu_s=seconds * gpus, estimated=guessed)


def durations(path: Path | None = None) -> dict[str, float]:
    """Mean duration of each test that ever passed, from the ledger; empty where there is no ledger yet."""
    where = ledger_path(path)
    if not where.is_file():
        return {}
    connection = sqlite3.connect(f"{where.resolve().as_uri()}?mode=ro", uri=True)
    question = """SELECT test.name, avg(record.duration_s) FROM record JOIN test ON test.id = record.test
                  WHERE record.outcome = 'passed' GROUP BY test.id"""
    try:
        return dict(connection.execute(question))
    finally:
        connection.close()
