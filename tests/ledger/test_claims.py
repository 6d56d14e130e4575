"""The verdict algebra: what proves, what refutes, what expires, and what is merely unproven."""

import pytest

from ledger.claims import statuses
from ledger.ingest import ingest
from ledger.paths import _kernel_fault
from ledger.record import Topology
from tests.ledger import make

CELL = ("kda.golden", "gloo2")
JOB = "gloo2.kda.golden"


def status(root, ledger, claim="kda.golden", topology="gloo2"):
    return next(s for s in statuses(root, ledger=ledger) if (s.id, s.topology) == (claim, topology))


def make_run(root, spool, ledger, change=lambda made: None, **options):
    """Make a run of the cell, change it, ingest it."""
    made = make.run(root, spool, cells=[CELL], **options)
    change(made)
    ingest(made.write(), ledger)
    return made


def end(made, rank=0, number=0):
    return made.lines("test_end", JOB, rank)[number]


def fail(made, rank=1):
    """One rank reports a failure and the launcher sees its exit code."""
    end(made, rank).update(outcome="failed", message="E  assert 1 == 2")
    made.lines("end", JOB, rank)[0]["exit_code"] = 1
    attempt = made.jobs[JOB]["attempts"][0]
    attempt.update(state="failed", exit_code=1)
    attempt["rank_exit_codes"][str(rank)] = 1


def lose(made, rank=1, code=-9):
    """A rank dies while its second test runs."""
    lines = made.ranks[JOB, 0, rank]
    del lines[-2:]
    attempt = made.jobs[JOB]["attempts"][0]
    attempt.update(state="failed", exit_code=1)
    attempt["rank_exit_codes"][str(rank)] = code


def test_clean_run_proves(root, spool, ledger):
    """All tests passed on all ranks: proven, graded as observed."""
    make_run(root, spool, ledger)
    found = status(root, ledger)
    assert (found.state, found.device, found.ranks, found.transport, found.witness) == (
        "proven",
        "cpu",
        2,
        "gloo",
        "T0",
    )
    assert found.toolchain == "torch 2.13.0+cpu, python 3.11"
    assert not found.sealed


def test_worst_rank_wins(root, spool, ledger):
    """One failed rank refutes, and the reason names test, rank and message."""
    make_run(root, spool, ledger, fail)
    found = status(root, ledger)
    assert found.state == "refuted"
    assert found.reason == "suites/kda_suite.py::test_state failed on rank 1: assert 1 == 2"


@pytest.mark.parametrize("outcome", ["skipped", "xfailed", "xpassed"])
def test_only_passed_proves(root, spool, ledger, outcome):
    """Skips and expected failures prove nothing, and are no verdict on the code."""
    make_run(root, spool, ledger, lambda made: end(made, 1).update(outcome=outcome))
    found = status(root, ledger)
    assert found.state == "unproven"
    assert f"{outcome} on rank 1" in found.reason


def test_killed_rank_is_lost(root, spool, ledger):
    """A killed rank loses its test: refuted, with signal, rank and the test that ran."""
    make_run(root, spool, ledger, lose)
    found = status(root, ledger)
    assert found.state == "refuted"
    assert "lost on rank 1: rank 1 was killed by signal 9 while suites/kda_suite.py::test_grad ran" in found.reason


def test_exit_zero_half_way_is_lost(root, spool, ledger):
    """A rank that leaves with 0 before its tests end has lost them."""

    def leave(made):
        lose(made, code=0)
        made.jobs[JOB]["attempts"][0].update(state="completed", exit_code=0)

    make_run(root, spool, ledger, leave)
    found = status(root, ledger)
    assert found.state == "refuted"
    assert "rank 1 stopped without an end line" in found.reason


@pytest.mark.parametrize("state", ["node_fail", "preempted", "timeout", "out_of_memory", "cancelled"])
def test_machine_fault_is_no_verdict(root, spool, ledger, state):
    """What the machine did refutes nothing and proves nothing, whatever the ranks had reported by then."""

    def fault(made):
        fail(made)
        made.jobs[JOB]["attempts"][0].update(state=state, machine_fault=True, reason="Node n1 down")

    make_run(root, spool, ledger, fault)
    found = status(root, ledger)
    assert found.state == "unproven"
    assert f"ended as {state}" in found.reason


def test_retry_after_machine_fault_proves(root, spool, ledger):
    """A second attempt that passes after a machine fault proves; the first is kept and decides nothing."""

    def retried(made):
        job = made.jobs[JOB]
        job["attempts"].append({**job["attempts"][0], "number": 1})
        job["attempts"][0] = {**job["attempts"][0], "state": "node_fail", "machine_fault": True}
        for rank in range(2):
            lines = made.ranks[JOB, 0, rank]
            made.ranks[JOB, 1, rank] = [{**lines[0], "attempt": 1}, *lines[1:]]
            made.ranks[JOB, 0, rank] = lines[:3]

    make_run(root, spool, ledger, retried)
    assert status(root, ledger).state == "proven"


def test_failure_is_not_erased_by_a_later_pass(root, spool, ledger):
    """Failed, then passed, same code and toolchain: flaky, both runs named."""
    bad = make_run(root, spool, ledger, fail, number=1)
    good = make_run(root, spool, ledger, number=2)
    found = status(root, ledger)
    assert found.state == "flaky"
    assert bad.head["run"] in found.reason
    assert good.head["run"] in found.reason


def test_failure_falls_with_its_code(root, spool, ledger):
    """Once the code is changed, a failure of the old code says nothing; a pass of the new one proves."""
    make_run(root, spool, ledger, fail, number=1)
    make.edit(root, "k3/ops.py", "x + 1", "1 + x")
    assert status(root, ledger).state == "unproven"
    make_run(root, spool, ledger, number=2)
    assert status(root, ledger).state == "proven"


def test_crash_is_charged_to_the_last_known_pieces(root, spool, ledger):
    """A crash leaves no closure: it stands while the pieces of the last pass stand, and falls when one changes."""
    make_run(root, spool, ledger, number=1)
    make_run(root, spool, ledger, lose, number=2)
    assert status(root, ledger).state == "flaky"
    make.edit(root, "k3/moe.py", "TOP = 2", "TOP = 3")
    assert status(root, ledger).state == "flaky"
    make.edit(root, "k3/ops.py", "x + 1", "1 + x")
    assert status(root, ledger).state == "expired"


def test_first_crash_is_charged_to_everything(root, spool, ledger):
    """Without a last known closure, a crash stands until anything in k3 or the suite changes."""
    make_run(root, spool, ledger, lose)
    make.edit(root, "suites/moe_suite.py", "[1, 2, 3]", "[1, 2, 4]")
    assert status(root, ledger).state == "refuted"
    make.edit(root, "k3/moe.py", "TOP = 2", "TOP = 3")
    assert status(root, ledger).state == "unproven"


def test_other_toolchain_does_not_erase(root, spool, ledger):
    """Refuted on one toolchain and proven on a later one: proven there, and the reason says where not."""
    make_run(root, spool, ledger, fail, number=1, torch="2.12.0")
    make_run(root, spool, ledger, number=2, torch="2.13.0")
    found = status(root, ledger)
    assert (found.state, found.reason) == ("proven", "refuted on torch 2.12.0, python 3.11")


def test_other_path_is_unproven(root, spool, ledger):
    """A rank that took another path than the claim is about proves nothing, and the path is named."""
    make_run(
        root, spool, ledger, lambda made: [line.update(paths=["torch.slow"]) for line in made.lines("test_end", JOB, 1)]
    )
    found = status(root, ledger)
    assert found.state == "unproven"
    assert found.reason == "fell back to torch.slow on rank 1; the claim is about torch.kda"


@pytest.mark.parametrize(
    ("path", "kernel", "fault"),
    [
        ("fla.cross_entropy", "cross_entropy_fwd_kernel", ""),
        ("fla.cross_entropy", "chunk_kda_fwd_kernel", "fla.cross_entropy and the profiler saw no kernel of it"),
        ("triton.situ", "vectorized_elementwise_kernel", "triton.situ and the profiler saw no kernel of it"),
        ("torch.kda", "anything", ""),
    ],
)
def test_a_kernel_fits_its_path(path, kernel, fault):
    """On a GPU an announced library path needs a kernel of its own among those that the profiler saw."""
    assert _kernel_fault(path, Topology(name="t", device="cuda"), {kernel}) == (f"announced {fault}" if fault else "")


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("KDA equals", "KDA nearly equals"),
        ('"suites/kda_suite.py::test_state", ', ""),
        ('["torch.kda"]', '["fla.kda"]'),
    ],
)
def test_other_words_expire(root, spool, ledger, old, new):
    """Evidence for another sentence, other tests or another path is none."""
    make_run(root, spool, ledger)
    make.edit(root, "suites/claims.toml", old, new)
    found = status(root, ledger)
    assert found.state == "expired"
    assert "claims.toml" in found.expired_by


def test_recorder_version_expires_everything(root, spool, ledger):
    """Evidence of another recorder version has expired on purpose."""

    def older(made):
        made.head["recorder"] = 7
        for line in made.lines("start"):
            line["recorder"] = 7

    make_run(root, spool, ledger, older)
    assert status(root, ledger).expired_by == "recorder version 7; now 1"


def test_needs_names_the_input(root, ledger, clean):
    """A claim whose input was never there says what it needs."""
    found = status(root, ledger, "io.release", "cpu1")
    assert (found.state, found.reason) == ("needs", "needs release")


def test_kill_rate_below_declared_is_not_proven(root, spool, ledger):
    """Sabotages that survive lower the kill rate; below the declared rate a pass proves nothing."""
    make_run(root, spool, ledger, number=1)
    for number in range(2, 6):
        make_run(root, spool, ledger, fail, number=number, sabotage=f"s{number}")
    assert (status(root, ledger).state, status(root, ledger).kill_rate) == ("proven", 1.0)
    make_run(root, spool, ledger, number=9, sabotage="survivor")
    found = status(root, ledger)
    assert (found.state, found.kill_rate) == ("unproven", 0.8)
    assert found.reason == "kill rate 80% is below the declared 95%"


def test_sabotage_is_never_a_verdict(root, spool, ledger):
    """A failing sabotage run refutes nothing and a passing one proves nothing."""
    make_run(root, spool, ledger, sabotage="gate_sign")
    assert status(root, ledger).state == "unproven"
    make_run(root, spool, ledger, fail, number=2, sabotage="scale")
    assert status(root, ledger).state == "unproven"


def test_red_blue(root, spool, ledger):
    """The same claim expires with an operator, survives a comment, and returns with the operator."""
    make_run(root, spool, ledger)
    make.edit(root, "k3/kda.py", "scan(x) * scale", "scan(x) / scale")
    assert (status(root, ledger).state, status(root, ledger).expired_by) == ("expired", "k3/kda.py: kda changed")
    make.edit(root, "k3/kda.py", "scan(x) / scale", "scan(x) * scale")
    assert status(root, ledger).state == "proven"
    make.edit(root, "k3/kda.py", "# comment", "# another word")
    assert status(root, ledger).state == "proven"
    make.edit(root, "k3/kda.py", "return -x", "return +x")  # a function that no test ran
    assert status(root, ledger).state == "proven"
    make.edit(root, "k3/kda.py", "SCALE = 2.0", "SCALE = 3.0")
    assert status(root, ledger).expired_by == "k3/kda.py: <module> changed"


def test_data_files_expire_by_digest(root, spool, ledger, tmp_path):
    """A declared data file is part of the closure by content; one outside the tree must be a declared input."""
    (root / "suites" / "golden.json").write_text("{}")
    value = "44136fa355b3678a1146ad16f7e8649e94fb4fc21fe77e8310c060f61caaff8a"
    make_run(
        root, spool, ledger, lambda made: end(made).update(data={"suites/golden.json": value, "<input>": "a" * 64})
    )
    assert status(root, ledger).state == "proven"
    (root / "suites" / "golden.json").write_text("{ }")
    assert status(root, ledger).expired_by == "data file suites/golden.json changed"


@pytest.mark.parametrize(("count", "state"), [(2, "passed"), (1, "unproven")])
def test_ranks_may_share_gpus_over_gloo(root, spool, ledger, count, state):
    """Four gloo ranks on the two GPUs that the topology names are what was planned; on one they are not."""
    make.edit(root, "suites/claims.toml", '"nodes2", "cuda2"]', '"nodes2", "shared4"]')
    made = make.run(root, spool, cells=[("kda.golden", "shared4")])
    for rank, line in enumerate(made.lines("environment")):
        line["fingerprint"]["gpus"] = [{"name": "NVIDIA H200", "uuid": f"GPU-{rank % count}"}]
    assert [fact.outcome for fact in ingest(made.write(), ledger).facts] == [state]
