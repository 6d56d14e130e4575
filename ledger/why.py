"""The chain of evidence of one claim: from its sentence to the bytes that bear it, and what would revoke it."""

from __future__ import annotations

import contextlib
import json
from collections import defaultdict
from operator import attrgetter
from pathlib import Path

import msgspec

from ledger.claimfile import ClaimFileError
from ledger.claims import Judge, open_judge
from ledger.record import Claim, Topology
from ledger.survivors import survivors
from ledger.windows import reach


def chain(root: Path, claim_id: str, ledger: Path | None, evidence: Path | None) -> dict:
    """Everything `why` prints, as plain data. Raises ClaimFileError for an unknown claim."""
    judge = open_judge(root, ledger, evidence)
    claim = judge.claims.claims.get(claim_id)
    if claim is None:
        close = [name for name in judge.claims.claims if claim_id in name][:5]
        raise ClaimFileError(f"no claim {claim_id!r}; {'did you mean ' + ', '.join(close) if close else 'see claims'}")
    cells = [_cell(judge, claim, judge.claims.topologies[name], ledger, evidence) for name in claim.topologies]
    judge.memory.save()
    passed = [one.fact.toolchain for (name, _), found in judge.facts.real.items() if name == claim.id
              for one in found if one.fact.outcome == "passed"]  # fmt: skip
    return {
        "id": claim.id,
        "text": claim.text,
        "tests": claim.tests,
        "paths": claim.paths,
        "inputs": claim.inputs,
        "scope": claim.scope,
        "kill_rate_declared": claim.kill_rate,
        "sabotages": {k: "killed" if v else "survived" for k, v in judge.sabotages(claim).items()},
        "survivors": {name: reason for owner, name, reason in survivors(judge, root) if owner == claim.id},
        "reach": reach(claim, passed, root),
        "cells": cells,
    }


def _cell(judge: Judge, claim: Claim, topology: Topology, ledger: Path | None, evidence: Path | None) -> dict:
    status = judge.status(claim, topology)
    found = msgspec.to_builtins(status)
    known = [one for one in judge.facts.real.get((claim.id, topology.name), []) if one.fact.run == status.run]
    if known:
        fact = known[-1].fact
        closure = judge.facts.closure(fact.closure)
        found |= {
            "tests_planned": fact.tests,
            "jobs": fact.jobs,
            "nodes": fact.nodes,
            "paths_observed": fact.paths,
            "duration_s": fact.duration_s,
            "keys": known[-1].keys,
            "scheduler": fact.witness_note,
            "closure": _by_file(closure),
            "scheduler_answers": _answers(ledger, fact.run, fact.jobs),
            "measures": _measures(ledger, fact.run, fact.jobs),
            "revoked_by": _revokers(claim, closure),
        }
        if not found["scheduler_answers"] and evidence is not None:
            found |= _published(Path(evidence) / f"{fact.run}.jsonl", fact.jobs)
    return found


def _by_file(closure: dict[str, str]) -> dict[str, list[str]]:
    files: dict[str, list[str]] = defaultdict(list)
    for key in sorted(closure):
        file, _, name = key.removeprefix("data::").partition("::")
        files[file].append(name or "(data)")
    return dict(files)


def _revokers(claim: Claim, closure: dict[str, str]) -> list[str]:
    pieces = sum(1 for key in closure if not key.startswith("data::"))
    files = len(_by_file(closure))
    return [
        f"a change to any of {pieces} pieces of code or {len(closure) - pieces} data files, in {files} files",
        "a change to the claim's text, tests, paths or scope in suites/claims.toml",
        f"a failure, crash or lost rank of {', '.join(claim.tests)} at the same code and toolchain",
        f"a kill rate below {claim.kill_rate:.0%}",
        "a raise of the recorder version",
    ]


def _rows(ledger: Path | None, query: str, run: str, jobs: tuple[str, ...]) -> list[tuple]:
    if ledger is None or not Path(ledger).is_file():
        return []
    from ledger.db import connect_read

    with contextlib.closing(connect_read(ledger)) as connection:
        return connection.execute(query, (run, json.dumps(jobs))).fetchall()


def _published(file: Path, jobs: tuple[str, ...]) -> dict:
    """Answers and measures from the run's evidence file, where the ledger has no such run."""
    if not file.is_file():
        return {}
    from ledger.evidence import content

    run = content(file.read_bytes())
    streams = [stream for stream in run.streams if stream.job in jobs and stream.rank == 0]
    measured = [m for stream in streams for _, row, _ in stream.tests for m in row.measures]
    return {
        "scheduler_answers": [
            _answer(job.job, msgspec.to_builtins(job)) for job in run.jobs.values() if job.job in jobs
        ],
        "measures": [
            _figure(m.name, m.unit, m.shape, m.dtype, m.samples) for m in sorted(measured, key=attrgetter("name"))
        ],
    }


def _answer(job: str, record: dict) -> dict:
    return {"job": job, "scheduler": record["scheduler"], "note": record["note"],
            "attempts": [f"{a['number']}: {a['state']} {a['scheduler_id']}" for a in record["attempts"]],
            "asked": [" ".join(answer["command"]) for answer in record["answers"]]}  # fmt: skip


def _figure(name: str, unit: str, shape: str, dtype: str, samples) -> dict:
    ordered = sorted(samples)
    middle = (ordered[(len(ordered) - 1) // 2] + ordered[len(ordered) // 2]) / 2
    return {"measure": name, "unit": unit, "shape": shape, "dtype": dtype, "median": middle}


def _answers(ledger: Path | None, run: str, jobs: tuple[str, ...]) -> list[dict]:
    query = """SELECT job, record, max(generation) FROM job
               WHERE run = ? AND job IN (SELECT value FROM json_each(?)) GROUP BY job"""
    return [_answer(job, json.loads(text)) for job, text, _ in _rows(ledger, query, run, jobs)]


def _measures(ledger: Path | None, run: str, jobs: tuple[str, ...]) -> list[dict]:
    query = """SELECT measure.name, unit, shape, dtype, samples FROM measure JOIN stream ON stream.id = measure.stream
               WHERE stream.run = ? AND stream.job IN (SELECT value FROM json_each(?)) AND rank = 0
               ORDER BY measure.name"""
    return [_figure(*columns, json.loads(samples)) for *columns, samples in _rows(ledger, query, run, jobs)]


def print_chain(found: dict) -> None:
    """The same as text, one step a line."""
    print(f"claim      {found['id']}: {found['text']}")
    print(f"tests      {', '.join(found['tests'])}")
    if found["paths"]:
        print(f"paths      must be {', '.join(found['paths'])}")
    killed = [name for name, word in found["sabotages"].items() if word == "killed"]
    survived = [f"{name} ({reason})" for name, reason in found["survivors"].items()]
    kills = f"{len(killed)} of {len(found['sabotages'])} sabotages noticed" if found["sabotages"] else "no evidence yet"
    print(f"kill rate  {kills}, {found['kill_rate_declared']:.0%} declared" + _listed("; survived: ", survived))
    for name, texts in found["reach"].items():
        print(f"{name.replace('_', ' ')}  {'; '.join(texts) or 'none'}")
    for cell in found["cells"]:
        _print_cell(cell)


def _listed(prefix: str, names) -> str:
    return prefix + ", ".join(names) if names else ""


def _print_cell(cell: dict) -> None:
    print(f"\n{cell['topology']}: {cell['state']}" + (f", {cell['reason']}" if cell["reason"] else ""))
    if "closure" not in cell:
        return
    ranks = "1 rank" if cell["ranks"] == 1 else f"{cell['ranks']} ranks"
    print(f"  ran        {cell['device']}, {ranks}, transport {cell['transport']}, {cell['toolchain']}")
    print(
        f"  run        {cell['run']}, {cell['tests_planned']} tests, {cell['duration_s']} s"
        + _listed(", jobs ", cell["jobs"])
    )
    seal = f"sealed by {', '.join(cell['keys'])}" if cell["keys"] else "not sealed"
    print(f"  witness    {cell['witness'] or 'none'}, {seal}" + (f": {cell['scheduler']}" if cell["scheduler"] else ""))
    for answer in cell["scheduler_answers"]:
        print(f"  scheduler  {answer['job']}: {answer['scheduler']}; attempts {'; '.join(answer['attempts'])}"
              + _listed("; asked ", answer["asked"]))  # fmt: skip
    print(f"  paths      {', '.join(cell['paths_observed']) or 'none announced'}")
    for m in cell["measures"]:
        print(f"  figure     {m['measure']} {m['median']:.6g} {m['unit']} {m['shape']} {m['dtype']}".rstrip())
    for file, names in cell["closure"].items():
        print(f"  closure    {file}: {', '.join(names)}")
    for text in cell["revoked_by"]:
        print(f"  revoked by {text}")
