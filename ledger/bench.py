"""Compares measured numbers: fresh processes, paired and interleaved, by an exact rank test with Holm's correction.

The sampling unit is a process (one rank's stream); its value is the median of its samples. What cannot be compared
gets a word, never a number. Needs the extra `analysis` (scipy) for verdicts; listing does not.
"""

from __future__ import annotations

import json
import math
import sqlite3
import statistics
from collections.abc import Iterable, Sequence
from typing import Literal

from ledger.db import LedgerError
from ledger.record import Record

Verdict = Literal["faster", "same", "slower", "slower-unconfirmed", "cannot-tell", "not-measured", "not-comparable"]
MINIMUM_PROCESSES = 6
MINIMUM_EFFECT = 0.02
RESOLUTION = 0.05
LEVEL = 0.05
# What must be equal on both sides for a number to mean anything.
MUST_MATCH = ("cpu", "driver", "cuda", "triton", "ptxas")


class Key(Record, kw_only=True):
    """What is measured: a test's quantity at one shape and dtype."""

    test: str
    measure: str
    unit: str
    direction: str
    shape: str
    dtype: str


class Sample(Record, kw_only=True):
    """One process's value, where and when it ran, and its in-process peers."""

    run: str
    node: str
    started_at: float
    value: float
    place: dict[str, str]
    choice: str  # path and autotune choice: another one is another program
    is_void: bool  # the test did not pass: the number does not count
    peers: dict[str, float] = {}
    floor: float | None = None


class Comparison(Record, kw_only=True):
    """The verdict on one key. `ratio` is new over old in the better-is-smaller sense; `seen` the smallest change."""

    key: Key
    verdict: Verdict
    reason: str = ""
    against: str = ""
    processes: int = 0
    ratio: float | None = None
    p: float | None = None
    seen: float | None = None


QUERY = """
    SELECT test.name, measure.name, unit, direction, shape, dtype, samples, context, outcome, stream.run, stream.head
    FROM measure JOIN record USING (stream, line) JOIN test ON test.id = record.test
    JOIN stream ON stream.id = measure.stream
    WHERE stream.rank = 0 AND stream.run IN (SELECT value FROM json_each(?))
      AND stream.id IN (SELECT max(id) FROM stream GROUP BY run, job, attempt, rank)"""


def samples(connection: sqlite3.Connection, runs: Sequence[str]) -> dict[Key, list[Sample]]:
    """Every process's value of every key in some runs, oldest first."""
    found: dict[Key, list[Sample]] = {}
    for row in connection.execute(QUERY, (json.dumps(list(runs)),)):
        test, measure, unit, direction, shape, dtype, values, context, outcome, run, head = row
        key = Key(test=test, measure=measure, unit=unit, direction=direction, shape=shape, dtype=dtype)
        sample = _sample(json.loads(values), json.loads(context), outcome, run, json.loads(head))
        found.setdefault(key, []).append(sample)
    return {key: sorted(of_key, key=lambda s: s.started_at) for key, of_key in found.items()}


def _sample(values: list[float], context: dict, outcome: str, run: str, head: dict) -> Sample:
    where = (head["environments"] or [{"fingerprint": {}}])[0]["fingerprint"]
    place = {name: str(where.get(name, "")) for name in MUST_MATCH}
    place["gpu"] = ", ".join(sorted(str(gpu.get("uuid") or gpu.get("name")) for gpu in where.get("gpus", ())))
    choice = json.dumps({name: context[name] for name in ("path", "autotune") if name in context}, sort_keys=True)
    peers = {label: statistics.median(times) for label, times in context.get("peers", {}).items() if times}
    return Sample(run=run, node=where.get("node", ""), started_at=head["starts"][0]["time"] if head["starts"] else 0.0,
                  value=statistics.median(values), place=place, choice=choice, is_void=outcome != "passed",
                  peers=peers, floor=context.get("floor_s"))  # fmt: skip


def runs_named(connection: sqlite3.Connection, prefix: str) -> list[str]:
    """Runs by id or commit prefix. Raises LedgerError if there are none."""
    query = "SELECT run FROM run WHERE run LIKE ? || '%' OR (commit_id != '' AND commit_id LIKE ? || '%')"
    found = [run for (run,) in connection.execute(query, (prefix, prefix))]
    if not found:
        raise LedgerError(f"{prefix!r} is the beginning of no run and no commit in this ledger; see `k3-ledger show`")
    return found


def compare(old: dict[Key, list[Sample]], new: dict[Key, list[Sample]], confirm=None) -> list[Comparison]:
    """Compare every key of both sides; `confirm` is an (old, new) pair from a later allocation."""
    keys = sorted({*old, *new}, key=lambda key: (key.test, key.measure, key.shape, key.dtype))
    found = holm([_one(key, old.get(key, []), new.get(key, [])) for key in keys])
    if confirm is not None:
        again = {c.key: c.verdict for c in compare(*confirm)}
        found = [_confirmed(c) if again.get(c.key) == "slower-unconfirmed" else c for c in found]
    return found


def against_peers(found: dict[Key, list[Sample]]) -> list[Comparison]:
    """Each key against every peer timed in the same processes: the peer is the old side."""
    tests = []
    for key, processes in found.items():
        good = [sample for sample in processes if not sample.is_void]
        for label in sorted({label for sample in good for label in sample.peers}):
            pairs = [(sample.peers[label], sample.value) for sample in good if label in sample.peers]
            tests.append(_tested(key, pairs, label))
    return [_confirmed(c) for c in holm(tests)]  # peers share every process: there is no allocation to blame


def _confirmed(c: Comparison) -> Comparison:
    return _with(c, verdict="slower") if c.verdict == "slower-unconfirmed" else c


def _one(key: Key, old: list[Sample], new: list[Sample]) -> Comparison:
    good = [[sample for sample in side if not sample.is_void] for side in (old, new)]
    for name, side, kept in (("old", old, good[0]), ("new", new, good[1])):
        if not kept:
            reason = f"the {name} side's test failed: its number is void" if side else f"no number on the {name} side"
            return Comparison(key=key, verdict="not-measured", reason=reason)
    if reason := _differs(*good):
        return Comparison(key=key, verdict="not-comparable", reason=reason)
    if not _interleaved(*good):
        return Comparison(key=key, verdict="cannot-tell", reason="the processes of both sides were not interleaved")
    pairs = [(a.value, b.value) for a, b in zip(*good, strict=False)]
    return _tested(key, pairs)


def _differs(old: list[Sample], new: list[Sample]) -> str:
    for name in (*MUST_MATCH, "gpu"):
        values = sorted({sample.place[name] for sample in (*old, *new)})
        if len(values) > 1:
            return f"different {name}: {' / '.join(value or 'unknown' for value in values)}"
    choices = {sample.choice for sample in (*old, *new)}
    nodes = {sample.node for sample in (*old, *new)}
    return "another path or autotune choice" if len(choices) > 1 else "different machines" if len(nodes) > 1 else ""


def _interleaved(old: list[Sample], new: list[Sample]) -> bool:
    """Each successive pair of processes holds one of each side."""
    marked = sorted([(s.started_at, 0) for s in old] + [(s.started_at, 1) for s in new])
    sides = [side for _, side in marked]
    return len(old) == len(new) and all({a, b} == {0, 1} for a, b in zip(sides[::2], sides[1::2], strict=True))


def _tested(key: Key, pairs: list[tuple[float, float]], against: str = "") -> Comparison:
    """One exact signed-rank test of the pairs' ratios; the verdict comes with Holm's correction."""
    n = len(pairs)
    if n < MINIMUM_PROCESSES:
        reason = f"{n} pairs of processes, {MINIMUM_PROCESSES} are needed"
        return Comparison(key=key, verdict="cannot-tell", reason=reason, against=against, processes=n,
                          ratio=_ratio(key, pairs) if pairs else None)  # fmt: skip
    if any(value <= 0 for pair in pairs for value in pair):
        return Comparison(key=key, verdict="not-comparable", reason="a value is not positive", against=against)
    logs = _logs(key, pairs)
    return Comparison(key=key, verdict="cannot-tell", against=against, processes=n, ratio=_ratio(key, pairs),
                      p=_p_value(logs), seen=_half_width(logs))  # fmt: skip


def _logs(key: Key, pairs: list[tuple[float, float]]) -> list[float]:
    sign = 1.0 if key.direction == "lower" else -1.0
    return [sign * math.log(new / old) for old, new in pairs]


def _ratio(key: Key, pairs: list[tuple[float, float]]) -> float:
    return math.exp(statistics.median(_walsh(_logs(key, pairs))))


def _walsh(values: list[float]) -> list[float]:
    """All pairwise averages: their median is the Hodges-Lehmann estimate."""
    return sorted((a + b) / 2 for i, a in enumerate(values) for b in values[i:])


def _p_value(logs: list[float]) -> float:
    if all(value == 0 for value in logs):
        return 1.0
    try:
        from scipy.stats import wilcoxon
    except ImportError as error:
        raise LedgerError(
            "comparing needs scipy; install the extra: pip install 'k3-proving-ground[analysis]'"
        ) from error
    return float(wilcoxon([value for value in logs if value], method="exact").pvalue)


def _half_width(logs: list[float]) -> float:
    """Half the width of the exact confidence interval of the change: a smaller one could not have been seen."""
    walsh, n = _walsh(logs), len(logs)
    cut, total = 0, 2**n
    counts = [1] + [0] * (n * (n + 1) // 2)
    for rank in range(1, n + 1):
        counts = [c + (counts[i - rank] if i >= rank else 0) for i, c in enumerate(counts)]
    below = 0
    while 2 * (below + counts[cut]) <= LEVEL * total:
        below += counts[cut]
        cut += 1
    low, high = walsh[max(cut - 1, 0)], walsh[-max(cut, 1)]
    return math.expm1(max(high - low, 0.0) / 2)


def holm(found: Iterable[Comparison]) -> list[Comparison]:
    """Holm's correction over all tests that have a p, and the verdict of each."""
    found = list(found)
    order = sorted((c.p, i) for i, c in enumerate(found) if c.p is not None)
    adjusted, running = {}, 0.0
    for place, (p, index) in enumerate(order):
        running = max(running, min(1.0, p * (len(order) - place)))
        adjusted[index] = running
    return [_decided(c, adjusted[i]) if i in adjusted else c for i, c in enumerate(found)]


def _decided(c: Comparison, p: float) -> Comparison:
    change = c.ratio - 1.0
    if p <= LEVEL and abs(change) >= MINIMUM_EFFECT:
        return _with(c, p=p, verdict="faster" if change < 0 else "slower-unconfirmed")
    if p <= LEVEL or c.seen <= RESOLUTION:
        return _with(c, p=p, verdict="same", reason=f"smallest change it could have seen {c.seen:.1%}")
    return _with(c, p=p, reason=f"changes below {c.seen:.1%} could not be seen; use more processes")


def _with(c: Comparison, **changes) -> Comparison:
    return Comparison(**{name: getattr(c, name) for name in c.__struct_fields__} | changes)


# --- listing --------------------------------------------------------------------------------------------------


def latest_runs(connection: sqlite3.Connection) -> list[str]:
    """The newest run that measured each test."""
    query = """
        SELECT DISTINCT run FROM (
            SELECT stream.run AS run, record.test, max(stream.id) FROM measure JOIN record USING (stream, line)
            JOIN stream ON stream.id = measure.stream JOIN run USING (run)
            WHERE sabotage = '' GROUP BY record.test)"""
    return [run for (run,) in connection.execute(query)]


def listing(found: dict[Key, list[Sample]], peers: list[Comparison]) -> list[dict]:
    """One row per key and peer, as plain data."""
    rows = []
    for key, processes in found.items():
        good = [sample for sample in processes if not sample.is_void]
        value = statistics.median(sample.value for sample in good) if good else None
        floors = [sample.floor for sample in good if sample.floor]
        row = {"test": key.test, "measure": key.measure, "unit": key.unit, "shape": key.shape, "dtype": key.dtype,
               "median": value, "floors": value / statistics.median(floors) if floors else None,
               "processes": len(good), "void": len(processes) - len(good)}  # fmt: skip
        mine = [c for c in peers if c.key == key]
        for c in mine or [None]:
            rows.append(row | {"peer": c.against if c else "", "ratio": c.ratio if c else None,
                               "verdict": c.verdict if c else "", "reason": c.reason if c else ""})  # fmt: skip
    return rows


def as_row(c: Comparison) -> dict:
    """A comparison as plain data."""
    return {"test": c.key.test, "measure": c.key.measure, "shape": c.key.shape, "dtype": c.key.dtype,
            "against": c.against, "verdict": c.verdict, "ratio": c.ratio, "p": c.p, "processes": c.processes,
            "reason": c.reason}  # fmt: skip
