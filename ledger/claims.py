"""The verdict on every cell: facts of all runs, compared with a tree, become one state and one grade.

Rules, in order: a failure stands while its code, tests and toolchain stand; only a clean pass of this very code
proves; evidence for other code has expired; too low a kill rate proves nothing.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path

from ledger import claimfile
from ledger.facts import Fact, claim_digest
from ledger.freshness import Tree
from ledger.memory import Memory
from ledger.record import RECORDER_VERSION, Claim, ClaimStatus, Topology
from ledger.source import Facts, Sourced, from_evidence, from_ledger, merge

CLOCK_SKEW_S = 600.0


def statuses(
    root: Path | str, ledger: Path | str | None = None, evidence: Path | str | None = None, *, use_cache: bool = True
) -> list[ClaimStatus]:
    """Every cell of the project at `root` as its tree is now, in the order of claims.toml.

    Reads the ledger at `ledger`, the evidence files in `evidence`, or both; with neither, this user's ledger.
    """
    judge = open_judge(root, ledger, evidence, use_cache=use_cache)
    found = [judge.status(claim, topology) for claim, topology in judge.claims.cells()]
    judge.memory.save()
    return found


def open_judge(
    root: Path | str, ledger: Path | str | None = None, evidence: Path | str | None = None, *, use_cache: bool = True
) -> Judge:
    """The judge of a tree, with the facts that `statuses` would use."""
    memory = Memory(root, read=use_cache)
    claims = claimfile.remembered(Path(root), memory)
    facts = gather(Path(root), ledger, evidence, memory)
    return Judge(claims, Tree(Path(root), known_inputs(claims), memory), facts)


def gather(root: Path, ledger: Path | str | None, evidence: Path | str | None, memory: Memory) -> Facts:
    """Facts of the ledger and of the evidence folder, as asked; a ledger that was named must exist."""
    from ledger.state import ledger_path

    found = Facts()
    if ledger is not None or (evidence is None and ledger_path().is_file()):
        found = from_ledger(ledger, root / "ledger" / "keys", memory)
    return found if evidence is None else merge(found, from_evidence(Path(evidence), memory))


def known_inputs(claims: claimfile.ClaimFile) -> frozenset[str]:
    """Digests of the declared external inputs: fixed by the claim file, wherever the files lie."""
    return frozenset(value for item in claims.inputs.values() for value in item.files.values())


class Judge:
    """Weighs the facts of one tree."""

    def __init__(self, claims: claimfile.ClaimFile, tree: Tree, facts: Facts):
        self.claims, self.tree, self.facts, self.memory = claims, tree, facts, tree.memory
        self.last_words: dict[str, list[Fact]] = {}  # by claim, of its sabotages
        self.tests_are_here: dict[str, bool] = {}  # by closure digest: whether its suites are those of the tree
        self.now = time.time()

    def status(self, claim: Claim, topology: Topology) -> ClaimStatus:
        """The state and grade of one cell."""
        dated = self.dated(claim, topology)
        fresh = [one for one, why in dated if not why]
        rate = self.kill_rate(claim)
        verdict = self.standing(fresh) or self.fallen(claim, dated)
        state, reason, one, expired_by = verdict
        if state == "proven" and rate is not None and rate < claim.kill_rate:
            state, reason = "unproven", f"kill rate {rate:.0%} is below the declared {claim.kill_rate:.0%}"
        return self.render(claim, topology, state, reason, one, expired_by, fresh, rate)

    def dated(self, claim: Claim, topology: Topology) -> list[tuple[Sourced, str]]:
        """Every fact of a cell, oldest first, with why it is stale."""
        found = sorted(self.facts.real.get((claim.id, topology.name), []), key=lambda one: one.fact.created_at)
        return [(one, self.stale(claim, one.fact) or _misfit(topology, one.fact)) for one in found]

    def decided(self, claim: Claim, topology: Topology) -> list[Sourced]:
        """The verdicts about this very code: what has to be published for the cell to read as it does."""
        return [one for one, why in self.dated(claim, topology) if not why and one.fact.outcome != "unproven"]

    def stale(self, claim: Claim, fact: Fact) -> str:
        """Why a fact says nothing of this tree; '' if it does."""
        if fact.created_at > self.now + CLOCK_SKEW_S:
            return "a record of the future"
        if fact.recorder != RECORDER_VERSION:
            return f"recorder version {fact.recorder}; now {RECORDER_VERSION}"
        if fact.claim_digest != claim_digest(claim):
            return "suites/claims.toml: the claim's text, tests or paths changed"
        known = self.tree.seen.get(fact.closure)
        return self.tree.difference(self.facts.closure(fact.closure), fact.closure) if known is None else known

    def standing(self, fresh: list[Sourced]):
        """The verdict of facts about this very code, for the toolchain that was tried last; None if there is none."""
        decided = [one for one in fresh if one.fact.outcome != "unproven"]
        if not decided:
            return None
        last = decided[-1].fact
        same = [one for one in decided if one.fact.toolchain == last.toolchain]
        failed = [one for one in same if one.fact.outcome == "failed"]
        passed = [one for one in same if one.fact.outcome == "passed"]
        if failed and passed:
            bad, good = failed[-1].fact, passed[-1].fact
            return "flaky", f"failed in {bad.run} ({bad.reason}), passed in {good.run}, same code", failed[-1], ""
        if failed:
            return "refuted", failed[-1].fact.reason, failed[-1], ""
        return "proven", _elsewhere(decided, last), max(passed, key=_rank), ""

    def fallen(self, claim: Claim, dated: list[tuple[Sourced, str]]):
        """No standing verdict: tried and not proven, expired, in need of an input, or never run."""
        passed = [pair for pair in dated if pair[0].fact.outcome == "passed"]
        tried = [one for one, why in dated if not why]
        if tried and (not passed or tried[-1].fact.created_at > passed[-1][0].fact.created_at):
            return "unproven", tried[-1].fact.reason, tried[-1], ""
        if passed:
            one, why = passed[-1]
            return "expired", why, one, why
        if claim.inputs:
            return "needs", f"needs {', '.join(claim.inputs)}", None, ""
        if dated:
            one, why = dated[-1]
            return "unproven", f"{one.fact.reason or one.fact.outcome} (then {why})", one, ""
        return "unproven", "never run", None, ""

    def kill_rate(self, claim: Claim) -> float | None:
        """Share of sabotages that this claim's tests noticed; None without evidence for these very tests."""
        killed = self.sabotages(claim)
        return sum(killed.values()) / len(killed) if killed else None

    def sabotages(self, claim: Claim) -> dict[str, bool]:
        """Sabotage -> whether some topology's tests noticed it when last tried."""
        found: dict[str, bool] = {}
        for fact in self.counted(claim):
            found[fact.sabotage] = found.get(fact.sabotage, False) or fact.outcome == "failed"
        return found

    def counted(self, claim: Claim) -> list[Fact]:
        """The last word of each (sabotage, topology) under these very tests."""
        if claim.id not in self.last_words:
            self.last_words[claim.id] = self._counted(claim)
        return self.last_words[claim.id]

    def _counted(self, claim: Claim) -> list[Fact]:
        last: dict[tuple[str, str], Fact] = {}
        for fact in sorted(self.facts.sabotage.get(claim.id, []), key=lambda f: f.created_at):
            if fact.outcome != "unproven" and fact.claim_digest == claim_digest(claim) and self.same_tests(fact):
                last[fact.sabotage, fact.topology] = fact
        return list(last.values())

    def same_tests(self, fact: Fact) -> bool:
        if fact.closure not in self.tests_are_here:
            closure = self.facts.closure(fact.closure)
            suites = {key: value for key, value in closure.items() if key.startswith("suites/")}
            self.tests_are_here[fact.closure] = not self.tree.difference(suites)
        return self.tests_are_here[fact.closure]

    def render(self, claim, topology, state, reason, one, expired_by, fresh, rate) -> ClaimStatus:
        fact = one.fact if one else None
        graded = fact if state in ("proven", "expired", "flaky", "refuted") else None
        return ClaimStatus(
            id=claim.id, text=claim.text, topology=topology.name, state=state, reason=reason,
            device=graded.device if graded else topology.device,
            ranks=graded.ranks if graded else topology.ranks,
            transport=graded.transport if graded else topology.backend,
            scope=claim.scope, kill_rate=rate, expired_by=expired_by,
            kills_sealed=all(fact.run in self.facts.sealed for fact in self.counted(claim)),
            witness=self.witness(state, graded, fresh), sealed=bool(one and one.keys and graded),
            toolchain=graded.toolchain if graded else "", run=fact.run if fact else "",
        )  # fmt: skip

    def witness(self, state: str, fact: Fact | None, fresh: list[Sourced]) -> str:
        """T2 needs two sealed proofs that schedulers confirmed, under keys declared for different clusters.

        A file that two keys sealed is one run on one cluster, whoever signed beside its owner: it is no part of it.
        """
        if fact is None:
            return ""
        proofs = [
            one for one in fresh if one.fact.outcome == "passed" and one.fact.witness == "T1" and len(one.keys) == 1
        ]
        keys = {(key, cluster) for one in proofs for key, cluster in zip(one.keys, one.clusters, strict=True)}
        apart = any(a[0] != b[0] and a[1] != b[1] and a[1] and b[1] for a in keys for b in keys)
        return "T2" if state == "proven" and apart else fact.witness


def _misfit(topology: Topology, fact: Fact) -> str:
    """How a pass differs from what its topology's name means now; '' if it does not."""
    if fact.outcome != "passed":
        return ""
    pairs = [
        (f"{topology.ranks} ranks", f"{fact.ranks}", topology.ranks == fact.ranks),
        (f"{topology.nodes} nodes", f"{len(fact.nodes)}", topology.nodes == len(fact.nodes)),
        (topology.device, fact.device, fact.device.split(" ")[0] == topology.device),
        (topology.backend, fact.transport, fact.transport == topology.backend),
    ]
    wrong = [f"{wanted}, the run had {had}" for wanted, had, fits in pairs if not fits]
    return f"suites/claims.toml: {topology.name} is {wrong[0]}" if wrong else ""


def _rank(one: Sourced) -> tuple:
    return (one.fact.witness, bool(one.keys), one.fact.created_at)


def _elsewhere(decided: list[Sourced], last: Fact) -> str:
    others = {one.fact.toolchain for one in decided if one.fact.outcome == "failed"}
    return f"refuted on {' / '.join(sorted(others))}" if others else ""


def here() -> Mapping[str, str]:
    """This machine's toolchain as far as it can be known without importing it."""
    import platform
    from importlib.metadata import PackageNotFoundError, version

    found = {"python": ".".join(platform.python_version_tuple()[:2])}
    for name, package in (("torch", "torch"), ("triton", "triton"), ("fla", "fla-core")):
        try:
            found[name] = version(package)
        except PackageNotFoundError:
            continue
    return found
