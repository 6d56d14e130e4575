"""What must run: every expected (job, test, rank) for the named claims, what is proven already, and the cost.

Planning reads a snapshot and the ledger; it submits nothing. Job names do not depend on the machine.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from msgspec.structs import replace

from harness import costs
from harness.discover import Discovery, discover
from harness.inputs import resolve
from harness.revision import Snapshot
from harness.spec import Cell, Claim, ClaimStatus, Expected, HarnessError, Plan, TestItem, Topology
from ledger import claimfile

SETTLED = ("proven", "refuted", "flaky")
BUDGET = re.compile(r"^(\d+(?:\.\d+)?)(cpu|gpu)(s|min|h)$")
SECONDS = {"s": 1, "min": 60, "h": 3600}


@dataclass(frozen=True, kw_only=True)
class Request:
    """What the user asked for."""

    names: tuple[str, ...] = ()  # suites, claims, families of claims, test files or test ids; none: everything
    everything: bool = False  # run what is settled, too
    budget: str = ""
    cluster: str = ""
    sabotage: str = ""
    tests_per_job: int = 0  # a suite file with more of them is cut into shards, each a job; 0: never cut


@dataclass
class Planner:
    """The material of one plan."""

    root: Path
    snapshot: Snapshot
    request: Request
    statuses: list[ClaimStatus]
    durations: dict[str, float] = field(default_factory=dict)
    unavailable: dict[str, str] = field(default_factory=dict)  # topology -> why it cannot run there
    toolchain: dict[str, str] = field(default_factory=dict)  # part -> version where jobs will run; unknown parts absent
    collect: Callable[[Path, list[str]], Discovery] = discover  # which tests files of the snapshot have

    def plan(self) -> Plan:
        """Decide about each selected cell, and lay out the jobs of those that run."""
        self.file = claimfile.load(self.snapshot.path)
        claims = select(self.file, self.request.names)
        wanted = {name for claim in claims for name in claim.inputs}
        self.inputs = {name: resolve(self.file.inputs[name], self.root) for name in sorted(wanted)}
        pairs = [(claim, self.file.topologies[name]) for claim in claims for name in claim.topologies]
        cells = [self._before_collection(claim, topology) for claim, topology in pairs]
        going = {cell.claim for cell in cells if cell.action == "run"}
        files = [test.split("::")[0] for claim in claims if claim.id in going for test in claim.tests]
        found = self.collect(self.snapshot.path, list(dict.fromkeys(files)))
        cells = [self._after_collection(cell, found) if cell.action == "run" else cell for cell in cells]
        cells = self._within_budget([self._cost(cell) for cell in cells])
        return self._layout(claims, cells, found)

    def _before_collection(self, claim: Claim, topology: Topology) -> Cell:
        """Everything that can be said of a cell without looking at its tests."""
        cell = Cell(claim=claim.id, topology=topology.name, action="run", reason="")
        for name in claim.inputs:
            if self.inputs[name].folder is None:
                return replace(cell, action="needs", reason=self.inputs[name].reason)
        if reason := self.unavailable.get(topology.name):
            return replace(cell, action="elsewhere", reason=reason)
        status = next((s for s in self.statuses if (s.id, s.topology) == (claim.id, topology.name)), None)
        if status is None:
            return replace(cell, reason="no record")
        if status.state in SETTLED and not self.request.everything:
            return self._settled(cell, status)
        words = {"expired": f"expired by {status.expired_by}", "needs": "never run"}
        return replace(cell, reason=words.get(status.state, status.reason))

    def _settled(self, cell: Cell, status: ClaimStatus) -> Cell:
        """Settled for this very code: kept, unless it was with another toolchain than jobs will find."""
        by = f"{status.state} at this tree by run {status.run or 'unknown'}"
        if status.toolchain and not is_here(status.toolchain, self.toolchain):
            return replace(cell, reason=f"{by} with {status.toolchain}; not yet with this toolchain")
        return replace(cell, action="keep", reason=by)

    def _after_collection(self, cell: Cell, found: Discovery) -> Cell:
        """Resolve the cell's tests; one that cannot be collected, or that wants another world size, breaks the cell."""
        tests: dict[str, None] = {}
        ranks = self.file.topologies[cell.topology].ranks
        for wanted in self.file.claims[cell.claim].tests:
            items = found.select(wanted)
            if fault := found.errors.get(wanted.split("::")[0]) or _unfit(wanted, items, ranks, cell.topology):
                return replace(cell, action="broken", reason=fault)
            tests |= dict.fromkeys(item.id for item in items)
        return replace(cell, tests=tuple(tests))

    def _cost(self, cell: Cell) -> Cell:
        topology = self.file.topologies[cell.topology]
        cost = costs.of(cell.tests, topology, self.durations)
        return replace(cell, cpu_s=cost.cpu_s, gpu_s=cost.gpu_s, estimated=cost.estimated)

    def _within_budget(self, cells: list[Cell]) -> list[Cell]:
        """Cheapest first, as long as the budget lasts: that proves the most cells."""
        if not self.request.budget:
            return cells
        unit, left = parse_budget(self.request.budget)
        kept = []
        for cell in sorted((cell for cell in cells if cell.action == "run"), key=lambda cell: getattr(cell, unit)):
            left -= getattr(cell, unit)
            kept += [cell] if left >= 0 else []
        text = f"over the budget of {self.request.budget}"
        out = [cell for cell in cells if cell.action == "run" and cell not in kept]
        return [replace(cell, action="over_budget", reason=text) if cell in out else cell for cell in cells]

    def _layout(self, claims: list[Claim], cells: list[Cell], found: Discovery) -> Plan:
        """One job per (topology, suite file, shard of its tests), the tests in collection order on every rank."""
        order = {item.id: position for position, item in enumerate(found.items)}
        running = [cell for cell in cells if cell.action == "run"]
        keys = dict.fromkeys((cell.topology, test.split("::")[0]) for cell in running for test in cell.tests)
        expected = tuple(job for topology, file in keys for job in self._jobs(topology, file, running, order))
        cells = [replace(cell, jobs=tuple(job.job for job in expected if cell.claim in job.claims
                                          and job.topology.name == cell.topology)) for cell in cells]  # fmt: skip
        total = [costs.of(job.tests, job.topology, self.durations) for job in expected]
        return Plan(
            names=self.request.names, snapshot=self.snapshot.hash, claims=tuple(claims), expected=expected,
            cells=tuple(cells), cluster=self.request.cluster, sabotage=self.request.sabotage,
            inputs={name: self.file.inputs[name].files for name, found in self.inputs.items() if found.folder},
            env=self._environment(), cpu_s=sum(cost.cpu_s for cost in total), gpu_s=sum(cost.gpu_s for cost in total),
        )  # fmt: skip

    def _jobs(self, topology: str, file: str, cells: list[Cell], order: dict[str, int]) -> Iterator[Expected]:
        """The jobs of one suite file: its tests in order, cut where the request says so."""
        here = [cell for cell in cells if cell.topology == topology]
        found = {test for cell in here for test in cell.tests if test.split("::")[0] == file}
        tests, place = sorted(found, key=order.get), self.file.topologies[topology]
        size = self.request.tests_per_job or len(tests)
        for shard, start in enumerate(range(0, len(tests), size)):
            part = tuple(tests[start : start + size])
            yield Expected(
                job=job_name(topology, file, shard), topology=place, tests=part, timeout_min=place.timeout_min,
                claims=tuple(dict.fromkeys(cell.claim for cell in here if set(part) & set(cell.tests))),
            )  # fmt: skip

    def _environment(self) -> dict[str, str]:
        variables = {name: self.file.inputs[name].env for name in self.inputs}
        found = {variables[name]: str(place.folder) for name, place in self.inputs.items() if place.folder}
        return {variable: folder for variable, folder in found.items() if variable}


def select(file: claimfile.ClaimFile, names: tuple[str, ...]) -> list[Claim]:
    """The claims that `names` mean, in file order. Raises HarnessError with the closest names for an unknown one."""
    chosen: set[str] = set() if names else set(file.claims)
    for name in names:
        found = set(file.suites.get(name, ()))
        found |= {claim for claim in file.claims if claim == name or claim.startswith(f"{name}.")}
        found |= {claim.id for claim in file.claims.values() if any(_under(test, name) for test in claim.tests)}
        if not found:
            raise HarnessError(_unknown(file, name))
        chosen |= found
    return [claim for claim in file.claims.values() if claim.id in chosen]


def is_here(toolchain: str, here: dict[str, str]) -> bool:
    """Whether evidence from `toolchain` ('torch 2.13.0, python 3.11') is of the versions that are `here`."""
    found = dict(part.rsplit(" ", 1) for part in toolchain.split(", "))
    return all(found.get(name, version) == version for name, version in here.items())


def parse_budget(text: str) -> tuple[str, float]:
    """'4gpuh' -> ('gpu_s', 14400.0)."""
    found = BUDGET.match(text)
    if found is None:
        raise HarnessError(f"budget {text!r} is not a number with a unit; write 4gpuh, 30gpumin, 90cpus or the like")
    return f"{found[2]}_s", float(found[1]) * SECONDS[found[3]]


def job_name(topology: str, file: str, shard: int = 0) -> str:
    """E.g. 'gloo4.golden_kda.0'."""
    stem = file.removeprefix("suites/").removesuffix(".py").replace("/", "-")
    return f"{topology}.{stem}.{shard}"


def _under(test: str, name: str) -> bool:
    return test == name or test.split("::")[0] == name or test.startswith(f"{name}[")


def _unknown(file: claimfile.ClaimFile, name: str) -> str:
    tests = {test.split("::")[0] for claim in file.claims.values() for test in claim.tests}
    close = difflib.get_close_matches(name, [*file.suites, *file.claims, *tests], n=3)
    hint = f"did you mean {' or '.join(close)}?" if close else f"suites are {', '.join(file.suites) or 'none'}"
    return f"no suite, claim or test file is called {name!r}; {hint} (k3-ledger claims lists every claim)"


def _unfit(wanted: str, items: list[TestItem], ranks: int, topology: str) -> str:
    if not items:
        return f"{wanted} is claimed and not collected; was it renamed, deleted or deselected?"
    other = next((item for item in items if item.ranks and ranks not in item.ranks), None)
    return f"{other.id} is marked ranks({other.ranks[0]}), but {topology} has {ranks}; fix one of them" if other else ""
