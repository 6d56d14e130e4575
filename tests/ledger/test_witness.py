"""Witness T1: the scheduler's raw answers agree with the ranks, or the disagreement is named and blocks."""

import pytest

from ledger.claims import statuses
from ledger.ingest import ingest
from ledger.witness import expand_nodes, read_sacct
from tests.ledger import make

JOB = "nodes2.kda.golden"


def judged(root, spool, ledger, change=lambda made: None, topology="nodes2"):
    made = make.run(root, spool, cells=[("kda.golden", topology)], scheduler="slurm")
    change(made)
    ingest(made.write(), ledger)
    return next(s for s in statuses(root, ledger=ledger) if s.topology == topology)


def answer(made, old, new):
    """Change the scheduler's raw words."""
    found = made.jobs[JOB]["answers"][0]
    assert old in found["output"]
    found["output"] = found["output"].replace(old, new)


def attempt(made):
    return made.jobs[JOB]["attempts"][0]


def test_agreement_is_t1(root, spool, ledger):
    """Job, attempt, nodes, tasks, state, exit code and times agree: T1."""
    found = judged(root, spool, ledger)
    assert (found.state, found.witness) == ("proven", "T1")


DISAGREEMENTS = {
    "job": (lambda m: m.lines("start")[1]["scheduler_env"].update(SLURM_JOB_ID="7"), "rank 1 ran in job 7, not in 100"),
    "no job": (lambda m: m.lines("start")[0].update(scheduler_env={}), "rank 0 ran in job none"),
    "state": (lambda m: answer(m, "COMPLETED", "FAILED"), "it says FAILED, the record says completed"),
    "exit code": (lambda m: answer(m, "COMPLETED|0:0|0:0", "COMPLETED|3:0|0:0"), "it says exit code 3"),
    "step": (lambda m: answer(m, "COMPLETED|0:0|0:0", "COMPLETED|0:0|0:125"), "a step ended with 0:125"),
    "nodes": (lambda m: answer(m, "n[1-2]", "n[1,3]"), "it says nodes n1,n3"),
    "count": (lambda m: answer(m, "n[1-2]", "n1") or attempt(m).update(nodes=["n1"]), "it gave 1 nodes"),
    "tasks": (lambda m: answer(m, "|n[1-2]|2|2|", "|n[1-2]|2|8|"), "its step had 8 tasks"),
    "start": (lambda m: attempt(m).update(started_at=attempt(m)["started_at"] + 9), "it says start"),
    "end": (lambda m: attempt(m).update(ended_at=attempt(m)["ended_at"] + 9), "it says end"),
    "submit": (lambda m: attempt(m).update(submitted_at=attempt(m)["submitted_at"] - 9), "no row of job 100"),
    "early": (lambda m: m.lines("start")[2].update(time=attempt(m)["started_at"] - 9), "rank 2 started before its job"),
    "late": (lambda m: m.lines("end")[3].update(time=attempt(m)["ended_at"] + 9), "rank 3 wrote after its job"),
    "host": (lambda m: m.lines("start")[3]["scheduler_env"].update(SLURMD_NODENAME="n9"), "rank 3 ran on n9"),
}  # fmt: skip


@pytest.mark.parametrize("name", DISAGREEMENTS)
def test_disagreement_is_named_and_blocks(root, spool, ledger, name):
    """Whatever differs between the scheduler's words and the ranks' is named, and the cell is not green."""
    change, words = DISAGREEMENTS[name]
    found = judged(root, spool, ledger, change)
    assert found.state == "unproven"
    assert words in found.reason


def test_idle_node_is_a_disagreement(root, spool, ledger):
    """A node that the job had and on which no rank ran is no place of a proof."""

    def idle(made):
        for line in made.lines("start"):
            line["scheduler_env"]["SLURMD_NODENAME"] = "n1"

    assert "no rank ran on n2" in judged(root, spool, ledger, idle).reason


def test_more_gpus_than_granted(root, spool, ledger):
    """Ranks that saw more devices than the scheduler gave are not believed."""

    def stolen(made):
        job = made.jobs["cuda2.kda.golden"]
        job["answers"][0]["output"] = job["answers"][0]["output"].replace("gres/gpu=2", "gres/gpu=1")

    assert "saw 2 GPUs, the scheduler gave 1" in judged(root, spool, ledger, stolen, "cuda2").reason


def test_without_accounting_t0_and_why(root, spool, ledger):
    """No accounting: the cell is proven at T0, and the run says why no higher."""

    def silent(made):
        made.jobs[JOB].update(answers=[], note="sacct: accounting storage is disabled; T0 at most")

    found = judged(root, spool, ledger, silent)
    assert (found.state, found.witness) == ("proven", "T0")


def test_reused_job_id_is_told_apart(root, spool, ledger):
    """Rows of an older job under the same id do not confirm this one."""

    def reused(made):
        times = [made.jobs[JOB]["attempts"][0][k] for k in ("submitted_at", "started_at", "ended_at")]
        for value in times:
            answer(made, str(int(value)), str(int(value) - 100_000))

    assert "no row of job 100 was submitted when this was" in judged(root, spool, ledger, reused).reason


def test_reads_steps_and_node_lists():
    """Steps belong to the job before them; node lists expand with their zeros."""
    text = "JobID|State|NodeList\n4|COMPLETED|n[01-03],gpu7\n4.0|COMPLETED|n01\n5|FAILED|n01"
    rows = read_sacct(("sacct", "-o", "JobID,State,NodeList"), text)
    assert [(row["JobID"], len(row["steps"])) for row in rows] == [("4", 1), ("5", 0)]
    assert expand_nodes("n[01-03],gpu7") == ["n01", "n02", "n03", "gpu7"]
    assert expand_nodes("a[1-2]b[3-4]") == ["a1b3", "a1b4", "a2b3", "a2b4"]
