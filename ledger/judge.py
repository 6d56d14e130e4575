"""Turns one run into facts: for each planned (claim, topology), whether this run proves it, fails it, or neither.

Pure: the same run gives the same facts anywhere. Comparing with a tree and with other runs is `claims.py`'s.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from ledger.attempts import BAD, Examined, examine
from ledger.facts import Fact, claim_digest, selected_by
from ledger.paths import path_faults
from ledger.record import Claim, Expected, digest
from ledger.runs import Run, Stream, TestRow
from ledger.witness import Word, question

Cell = tuple[str, str]


def facts(run: Run, known: Mapping[Cell, frozenset[str]] | None = None) -> list[Fact]:
    """Judge every planned cell of a run; merged closures are added to `run.closures`.

    `known` holds, per cell, the pieces it used when it last reported: the closure of a crash is those pieces as they
    were in this run's snapshot, else all of k3 and the suite.
    """
    streams: dict[tuple[str, int], list[Stream]] = {}
    for stream in run.streams:
        streams.setdefault((stream.job, stream.attempt), []).append(stream)
    examined = {e.job: _attempts(run, e, streams) for e in run.record.expected if e.job in run.jobs}
    words = {job: [question(run, run.jobs[job], one) for one in found] for job, found in examined.items()}
    judged: list[Fact] = []
    for claim in run.record.claims:
        for topology in dict.fromkeys(e.topology.name for e in run.record.expected if claim.id in e.claims):
            cell = _Cell(run, claim, topology, examined, words, (known or {}).get((claim.id, topology)))
            judged += cell.facts()
    return judged


def _attempts(run: Run, expected: Expected, streams: dict[tuple[str, int], list[Stream]]) -> list[Examined]:
    attempts = sorted(run.jobs[expected.job].attempts, key=lambda a: a.number)
    return [examine(run, expected, attempt, streams.get((expected.job, attempt.number), [])) for attempt in attempts]


class _Cell:
    """One claim on one topology in one run."""

    def __init__(self, run: Run, claim: Claim, topology: str, examined, words, known):
        self.run, self.claim, self.topology, self.known = run, claim, topology, known
        self.expected = [e for e in run.record.expected if e.topology.name == topology and claim.id in e.claims]
        self.examined: dict[str, list[Examined]] = {e.job: examined.get(e.job, []) for e in self.expected}
        self.words: dict[str, list[Word]] = words
        self.patterns = frozenset(claim.tests)
        self.tests = {e.job: [t for t in e.tests if selected_by(self.patterns, t)] for e in self.expected}

    def facts(self) -> list[Fact]:
        failures = [text for e in self.expected for text in self.failures(e)]
        obstacles = self.obstacles()
        found = []
        if failures:
            found.append(self.fact("failed", failures[0], self.failure_closure()))
        if not obstacles:
            found.append(self.fact("passed", "", self.closure()))
        elif not failures:
            found.append(self.fact("unproven", obstacles[0], self.closure()))
        return found

    def failures(self, expected: Expected) -> list[str]:
        """Verdicts on the code: bad outcomes in any attempt that no machine fault ended, worst told first."""
        found = []
        for one in self.examined[expected.job]:
            if one.is_machine_fault or one.is_open:
                continue
            bad = [t for t in self.tests[expected.job] if one.outcomes[t] in BAD and self.is_verdict(one, t)]
            found += [one.details[t] for t in sorted(bad, key=lambda t: one.outcomes[t] == "lost")]
        return found

    def is_verdict(self, one: Examined, test: str) -> bool:
        """A lost test is a verdict only where every rank's records exist: else records are missing, not code wrong."""
        return one.outcomes[test] != "lost" or set(one.streams) >= set(range(self.expected[0].topology.ranks))

    def obstacles(self) -> list[str]:
        """Everything that keeps this run from proving the cell, most telling first."""
        found = self.run.faults + self.planning()
        for expected in self.expected:
            found += self.job_obstacles(expected)
        return found or self.code_faults()

    def planning(self) -> list[str]:
        planned = [test for tests in self.tests.values() for test in tests]
        covered = {selected_by(self.patterns, test) for test in planned}
        found = [f"nothing was planned for {pattern}" for pattern in self.claim.tests if pattern not in covered]
        found += [f"{test} was planned twice" for test, n in sorted(Counter(planned).items()) if n > 1]
        if self.topology not in self.claim.topologies:
            found.append(f"the claim is not made for topology {self.topology}")
        return found

    def job_obstacles(self, expected: Expected) -> list[str]:
        job = self.run.jobs.get(expected.job)
        if job is None:
            return [f"job {expected.job} is not collected"]
        found = [f"job {job.job}: {fault}" for fault in _job_faults(self.run, expected)]
        attempts = self.examined[expected.job]
        if not attempts:
            return [*found, f"job {job.job} has no attempt: {job.note or 'it was never started'}"]
        last, word = attempts[-1], self.words[expected.job][-1]
        if last.is_open or last.is_machine_fault:
            reason = f": {last.attempt.reason}" if last.attempt.reason else ""
            return [*found, f"job {job.job} attempt {last.number} ended as {last.attempt.state}{reason}"]
        tests = self.tests[expected.job]
        found += [last.details[t] for t in sorted(tests) if last.outcomes[t] != "passed"]
        found += [f"job {job.job}: {fault}" for fault in last.faults + self.unplanned(last)]
        found += [f"scheduler disagrees: {fault}" for fault in word.disagreements]
        return found or path_faults(self.claim, expected.topology, tests, last)

    def unplanned(self, last: Examined) -> list[str]:
        """Tests of this claim that the node found and the plan left out: a plan may not choose what suits it."""
        planned = {test for tests in self.tests.values() for test in tests}
        collected = {t for s in last.streams.values() for end in s.ends for t in end.collected} - planned
        mine = sorted(test for test in collected if selected_by(self.patterns, test))
        return [f"{test} exists on the node and was not planned" for test in mine]

    def code_faults(self) -> list[str]:
        """Closures must name pieces as they are in the snapshot that was planned."""
        tree, found = self.run.tree, []
        for name in sorted({self.run.closure_of(row) for row in self.rows()}):  # each on its own: none may hide another
            other = sorted(key for key, value in self.run.closures[name].items() if tree.get(key) != value)
            found += [f"{key} ran with other code than the snapshot's" for key in other]
        found += self.data_faults()
        empty = sorted({row.test for row in self.rows() if len(bytes(row.closure)) < 3})
        found = found or [f"{test} recorded no closure: it could never expire" for test in empty]
        rows = [(row.test, self.run.closures[self.run.closure_of(row)]) for row in self.rows()]
        bare = sorted({test for test, closure in rows if _own_piece(test) not in closure})
        return found or [f"{test} recorded no code of its own" for test in bare]

    def data_faults(self) -> list[str]:
        """Every rank must have read the same data, and files of the snapshot as the manifest has them."""
        seen: dict[str, set[str]] = {}
        for row in self.rows():
            for path, value in row.data.items():
                seen.setdefault(path, set()).add(value)
        found = [f"ranks or tests read different contents of {path}" for path, v in sorted(seen.items()) if len(v) > 1]
        manifest = self.run.record.manifest
        return found + [f"data file {path} is not the snapshot's" for path, values in sorted(seen.items())
                        if path in manifest and {manifest[path]} != values]  # fmt: skip

    # --- what a fact is made of -------------------------------------------------------------------------------

    def last(self) -> list[Examined]:
        return [found[-1] for found in self.examined.values() if found]

    def rows(self) -> list[TestRow]:
        return [row for job, found in self.examined.items() if found
                for test in self.tests[job] for row in found[-1].rows.get(test, {}).values()]  # fmt: skip

    def pieces(self) -> dict[str, str]:
        """The union over this claim's tests and ranks; data files by digest under 'data::'."""
        rows = self.rows()
        merged: dict[str, str] = {}
        for name in sorted({self.run.closure_of(row) for row in rows}):
            merged |= self.run.closures[name]
        for row in rows:
            merged |= {f"data::{path}": value for path, value in row.data.items()}
        return merged

    def closure(self) -> str:
        return self.keep(self.pieces())

    def failure_closure(self) -> str:
        """A crash leaves no closure: take the last known pieces, else all of k3 and the suite, from the snapshot."""
        tree = self.run.tree
        files = {test.split("::")[0] for tests in self.tests.values() for test in tests}
        whole = {key for key in tree if key.startswith("k3/") or key.split("::")[0] in files}
        known = self.known or whole
        if self.run.record.sabotage:  # counts while the tests are the same; the product is wrong on purpose
            known = {key for key in whole if key.split("::")[0] in files}
        cut_short = any(one.outcomes[t] == "lost" for found in self.examined.values() for one in found
                        for t in one.outcomes if selected_by(self.patterns, t))  # fmt: skip
        merged = self.pieces()
        if cut_short or not merged:
            merged |= {key: tree[key] for key in known if key in tree}
        return self.keep(merged)

    def keep(self, merged: dict[str, str]) -> str:
        name = digest(merged)
        self.run.closures.setdefault(name, merged)
        return name

    def fact(self, outcome: str, reason: str, closure: str) -> Fact:
        head, last = self.run.record, self.last()
        seen = [s.environments[0] for one in last for s in one.streams.values() if s.environments]
        words = [self.words[job][-1] for job, found in self.examined.items() if found]
        return Fact(
            run=head.run, claim=self.claim.id, topology=self.topology, outcome=outcome, reason=reason,
            created_at=head.created_at, claim_digest=claim_digest(self.claim), closure=closure,
            recorder=head.recorder, snapshot=head.snapshot, sabotage=head.sabotage, scope=self.claim.scope,
            toolchain=_one_of(env.fingerprint.toolchain for env in seen),
            device=_one_of(_device(env) for env in seen),
            transport=_one_of(env.backend or "none" for env in seen),
            ranks=max((len(one.streams) for one in last), default=0),
            nodes=tuple(sorted({env.fingerprint.node or env.fingerprint.host for env in seen})),
            witness=min((w.level for w in words), default="") if words else "",
            witness_note=next((w.note for w in words if w.note), ""),
            paths=tuple(sorted({path for row in self.rows() for path in row.paths})),
            jobs=tuple(self.examined), tests=sum(map(len, self.tests.values())),
            duration_s=_duration(last),
        )  # fmt: skip


def _own_piece(test: str) -> str:
    """The piece that holds a test's body: 'suites/a.py::TestB::test_c[1]' -> 'suites/a.py::TestB.test_c'."""
    file, _, name = test.partition("[")[0].partition("::")
    return f"{file}::{name.replace('::', '.')}"


def _job_faults(run: Run, expected: Expected) -> list[str]:
    job = run.jobs[expected.job]
    pairs = [
        ("run", job.run, run.record.run),
        ("nonce", job.nonce, run.record.nonce),
        ("tests", job.tests, expected.tests),
        ("topology", job.topology, expected.topology),
    ]
    faults = [f"its {name} differs from the plan's" for name, found, wanted in pairs if found != wanted]
    known = {attempt.number for attempt in job.attempts}
    strays = sorted({s.attempt for s in run.streams if s.job == job.job} - known)
    faults += [f"attempt {n} left records and the collector knows no such attempt" for n in strays]
    if len(known) != len(job.attempts):
        faults.append("two attempts share a number")
    return faults


def _device(environment) -> str:
    names = sorted({gpu.get("name", "") for gpu in environment.fingerprint.gpus} - {""})
    kind = environment.device.split(":")[0]
    return f"{kind} ({', '.join(names)})" if kind == "cuda" and names else kind


def _one_of(values) -> str:
    return " / ".join(sorted(set(values)))


def _duration(examined: list[Examined]) -> float:
    total = 0.0
    for one in examined:
        spans = [s.last_time - s.starts[0].time for s in one.streams.values() if s.starts]
        total += max(spans, default=0.0)
    return round(total, 3)
