"""Examines one attempt at one job: do its ranks agree with the plan, the launcher and each other, and what came out.

Every disagreement is named; the judge decides which claims it blocks. The scheduler's word is `witness.py`'s.
"""

from __future__ import annotations

import time
from collections import Counter

import msgspec

from ledger.record import Attempt, Expected, Fingerprint, Topology, worst
from ledger.runs import Run, Stream, TestRow

CLOCK_SKEW_S = 60.0
# States that say nothing about the code under test: a new attempt is due, not a verdict.
MACHINE_STATES = frozenset(
    ["node_fail", "preempted", "timeout", "out_of_memory", "cancelled", "requeued", "launch_failed", "rejected"]
)
OPEN_STATES = frozenset(["pending", "running", "suspended", "unknown"])
BAD = frozenset(["failed", "error", "lost"])


class Examined(msgspec.Struct, kw_only=True):
    """One attempt as found. `faults` block every claim of the job; `outcomes` are worst over ranks."""

    number: int
    attempt: Attempt
    streams: dict[int, Stream]
    faults: list[str] = []
    outcomes: dict[str, str] = {}
    details: dict[str, str] = {}  # test -> what happened, on which rank
    rows: dict[str, dict[int, TestRow]] = {}  # test -> rank -> row

    @property
    def is_machine_fault(self) -> bool:
        return self.attempt.machine_fault or self.attempt.state in MACHINE_STATES

    @property
    def is_open(self) -> bool:
        return self.attempt.state in OPEN_STATES


def examine(run: Run, expected: Expected, attempt: Attempt, streams: list[Stream]) -> Examined:
    """Check one attempt's records against the plan and the launcher's word, and fold ranks into outcomes."""
    found = Examined(number=attempt.number, attempt=attempt, streams={s.rank: s for s in streams},
                     faults=[], outcomes={}, details={}, rows={})  # fmt: skip
    topology = expected.topology
    for rank in range(topology.ranks):
        if stream := found.streams.get(rank):
            found.faults += [f"rank {rank}: {fault}" for fault in _stream_faults(run, expected, attempt, stream)]
        else:
            found.faults.append(f"rank {rank}: no records of this rank")
    for rank in sorted(set(found.streams) - set(range(topology.ranks))):
        found.faults.append(f"rank {rank}: records of a rank beyond the planned {topology.ranks}")
    found.faults += _across_ranks(topology, found.streams)
    _fold(expected, found)
    _exit_codes(expected, found)
    return found


def _stream_faults(run: Run, expected: Expected, attempt: Attempt, stream: Stream) -> list[str]:
    faults = list(stream.faults)
    if len(stream.starts) != 1 or len(stream.environments) > 1 or len(stream.ends) > 1:
        counts = f"{len(stream.starts)} start, {len(stream.environments)} environment, {len(stream.ends)} end lines"
        return [*faults, f"{counts}; a rank writes one of each"]
    faults += _identity(run, expected, attempt, stream)
    faults += _place(expected.topology, stream)
    faults += _times(run, stream)
    return faults + _tests(expected, stream)


def _identity(run: Run, expected: Expected, attempt: Attempt, stream: Stream) -> list[str]:
    start, head = stream.starts[0], run.record
    pairs = [
        ("run", start.run, head.run),
        ("nonce", start.nonce, head.nonce),
        ("job", start.job, expected.job),
        ("attempt", start.attempt, attempt.number),
        ("rank", start.rank, stream.rank),
        ("world size", start.world_size, expected.topology.ranks),
        ("snapshot", start.snapshot[:16], head.snapshot[:16]),
        ("recorder version", start.recorder, head.recorder),
    ]
    return [f"{name} is {found}, planned was {wanted}" for name, found, wanted in pairs if found != wanted]


def _place(topology: Topology, stream: Stream) -> list[str]:
    if not stream.environments:
        return ["never reported its environment"]
    seen = stream.environments[0]
    device = seen.device.split(":")[0]
    faults = [f"{name} is {found or 'none'}, the topology asks for {wanted}"
              for name, found, wanted in (("device", device, topology.device),
                                          ("backend", seen.backend or "none", topology.backend))
              if found != wanted]  # fmt: skip
    if topology.device == "cuda" and not seen.fingerprint.gpus:
        faults.append("no GPU is visible to a rank that claims to run on cuda")
    outside = [name for name, path in seen.modules.items() if path.startswith(("/", "..", "<")) or ":" in path]
    return faults + [f"imported {name} from outside the snapshot" for name in sorted(outside)]


def _times(run: Run, stream: Stream) -> list[str]:
    first, last = stream.starts[0].time, stream.last_time
    faults = []
    if first < run.record.created_at - CLOCK_SKEW_S:
        faults.append("started before the run was planned: an old record was replayed")
    if last > time.time() + CLOCK_SKEW_S:
        faults.append("ends in the future: a record of the future is refused")
    return faults


def _tests(expected: Expected, stream: Stream) -> list[str]:
    counts = Counter(row.test for _, row, _ in stream.tests)
    planned = set(expected.tests)
    faults = [f"{test} reported {n} times" for test, n in counts.items() if n > 1]
    faults += [f"{test} was reported and never planned" for test in counts if test not in planned]
    for line, row, begun in stream.tests:
        if begun is None:
            faults.append(f"line {line}: {row.test} has an outcome and never started")
        elif row.duration_s > (row.time - begun) * 1.05 + 1.0:
            faults.append(f"line {line}: {row.test} took {row.duration_s} s in {row.time - begun:.3f} s of clock")
    if stream.ends:
        missing = planned - set(stream.ends[0].collected)
        faults += [f"{test} was planned and not collected on the node" for test in sorted(missing)]
    return faults


def _across_ranks(topology: Topology, streams: dict[int, Stream]) -> list[str]:
    found = {rank: s for rank, s in streams.items() if len(s.starts) == 1 and len(s.environments) == 1}
    prints = {rank: s.environments[0].fingerprint for rank, s in found.items()}
    nodes = {rank: p.node or p.host for rank, p in prints.items()}
    faults = []
    if found and len(set(nodes.values())) != topology.nodes:
        faults.append(f"ranks ran on {len(set(nodes.values()))} nodes, the topology asks for {topology.nodes}")
    processes = Counter((nodes[rank], s.starts[0].pid) for rank, s in found.items())
    faults += [f"process {pid} wrote the records of {n} ranks" for (_, pid), n in processes.items() if n > 1]
    if len(toolchains := sorted({p.toolchain for p in prints.values()})) > 1:
        faults.append(f"ranks used different toolchains: {' / '.join(toolchains)}")
    if topology.device == "cuda":
        faults += _gpus(topology, nodes, prints)
    return faults


def _gpus(topology: Topology, nodes: dict[int, str], prints: dict[int, Fingerprint]) -> list[str]:
    """Every rank needs a GPU of its own; over gloo, ranks may share the GPUs that the topology names."""
    shared = topology.gpus_per_node if topology.backend == "gloo" else 0
    faults = []
    for node in sorted(set(nodes.values())):
        ranks = [rank for rank in nodes if nodes[rank] == node]
        uuids = {gpu.get("uuid", "") for rank in ranks for gpu in prints[rank].gpus}
        if len(uuids) < (min(shared, len(ranks)) or len(ranks)):
            faults.append(f"{len(ranks)} ranks saw {len(uuids)} different GPUs on one node")
    return faults


def _fold(expected: Expected, found: Examined) -> None:
    """Worst rank wins; a planned test that a rank never reported is lost on that rank."""
    for test in expected.tests:
        found.rows[test] = {}
    for rank, stream in found.streams.items():
        for _, row, _ in stream.tests:
            if row.test in found.rows:
                found.rows[row.test][rank] = row
    for test, rows in found.rows.items():
        by_rank = {rank: rows[rank].outcome if rank in rows else "lost" for rank in range(expected.topology.ranks)}
        outcome = found.outcomes[test] = worst(by_rank.values())
        if outcome != "passed":
            ranks = [rank for rank, value in by_rank.items() if value == outcome]
            found.details[test] = _detail(test, outcome, ranks, found)


def _detail(test: str, outcome: str, ranks: list[int], found: Examined) -> str:
    where = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {','.join(map(str, ranks))}"
    if outcome != "lost":
        told = _headline(found.rows[test][ranks[0]].message)
        return f"{test} {outcome} on {where}" + (f": {told}" if told else "")
    return f"{test} lost on {where}: {_why_lost(test, ranks, found)}"


def _headline(message: str) -> str:
    """The line of a traceback that says what went wrong: pytest marks it with E, else it is the last."""
    lines = [line.strip() for line in message.strip().splitlines()]
    marked = [line.removeprefix("E ").strip() for line in lines if line.startswith("E ")]
    return (marked or lines[-1:] or [""])[0][:200]


def _why_lost(test: str, ranks: list[int], found: Examined) -> str:
    """The launcher's word on who was first at fault, where there is one: it ended the other ranks itself."""
    if found.attempt.reason:
        return found.attempt.reason
    for rank in ranks:
        stream = found.streams.get(rank)
        code = found.attempt.rank_exit_codes.get(str(rank))
        if code is not None and code < 0:
            return f"rank {rank} was killed by signal {-code}" + _during(stream)
        if code:
            return f"rank {rank} exited {code}" + _during(stream)
        if stream and not stream.ends:
            return f"rank {rank} stopped without an end line" + _during(stream)
    if any(rank not in found.streams for rank in ranks):
        return "no records of this rank"
    return "it was planned and never reported"


def _during(stream: Stream | None) -> str:
    return f" while {stream.unfinished} ran" if stream and stream.unfinished else ""


def _exit_codes(expected: Expected, found: Examined) -> None:
    """A non-zero exit is explained by a reported bad outcome on that rank, and by nothing else."""
    if found.is_open or found.is_machine_fault:
        return
    explained = False
    for rank in range(expected.topology.ranks):
        code, stream = found.attempt.rank_exit_codes.get(str(rank)), found.streams.get(rank)
        bad = any(row.outcome != "passed" for _, row, _ in stream.tests) if stream else False
        explained |= bad
        if code is None:
            found.faults.append(f"rank {rank}: the launcher reported no exit code")
        elif code != 0 and not (code == 1 and bad):
            found.faults.append(f"rank {rank}: " + (f"killed by signal {-code}" if code < 0 else f"exited {code}"))
        if stream and not stream.ends:
            found.faults.append(f"rank {rank}: no end line; the records are cut short")
        elif stream and code is not None and stream.ends[0].exit_code != code:
            found.faults.append(f"rank {rank}: recorded exit {stream.ends[0].exit_code}, the launcher saw {code}")
    if found.attempt.state != "completed" and not explained:
        reason = found.attempt.reason or "no reason given"
        found.faults.append(f"attempt {found.number} is {found.attempt.state}: {reason}")
