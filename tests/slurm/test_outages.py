"""When the scheduler does not answer: unknown, asked again later; never a success, never an error."""

from __future__ import annotations

import time

import pytest
from msgspec.structs import replace

from harness.gather import look
from harness.journal import Order
from harness.slurm import save_cluster
from harness.slurm import submit as submit_slurm
from tests.slurm.conftest import cluster_or_skip, lab_profile
from tests.slurm.project import settle, states, submit

pytestmark = pytest.mark.slurm


def test_accounting_down(lab, project, profile):
    """While slurmdbd is down a finished job stays unsettled; once it is back its row is there and confirms it."""
    run_dir = project.run({"one": "test_ok"})
    (job,) = submit(run_dir, profile)
    lab.stop_slurmdbd()
    try:
        lab.wait(lambda: lab.state(job) == "COMPLETED", 60)
        time.sleep(1)
        progress = look(run_dir)
        assert not progress.complete
        assert not (run_dir / "jobs/one/job.json").exists()
    finally:
        lab.start_slurmdbd()
    view = settle(run_dir).views[0]
    assert (view.state, view.note) == ("completed", "")


def test_controller_down_and_back(lab, project, profile):
    """A job that runs while the controller is away is found when it is back, once and complete."""
    run_dir = project.run({"one": "test_ok"})
    submit(run_dir, profile)
    lab.stop_slurmctld()
    try:
        progress = look(run_dir)
        assert not progress.complete
        assert progress.views[0].state in ("unknown", "pending", "running")
    finally:
        lab.start_slurmctld()
    assert states(settle(run_dir)) == {"one": ["completed"]}


def test_submission_unanswered(lab, project, profile):
    """A submission that nobody answers is no refusal: it is made once the controller is back, and only once."""
    run_dir = project.run({"one": "test_ok"})
    save_cluster(run_dir, profile)
    lab.stop_slurmctld()
    try:
        (group,) = submit_slurm(run_dir, profile, [Order("one", 0)])
        assert group.open
        assert look(run_dir).views[0].attempts[0].reason == "the scheduler has not answered the submission yet"
    finally:
        lab.start_slurmctld()
    assert states(settle(run_dir)) == {"one": ["completed"]}
    named = lab.run("sacct", "-Xn", "-o", "JobID", "--name", group.intent.name, "-S", "now-1hour").split()
    assert len(named) == 1


def test_deadline_of_silence(lab, project, profile):
    """Silence has an end: after the profile's deadline the controller's word alone is taken, and the note says so."""
    run_dir = project.run({"one": "test_ok"})
    (job,) = submit(run_dir, replace(profile, answer_deadline_s=2))
    lab.stop_slurmdbd()
    try:
        lab.wait(lambda: lab.state(job) == "COMPLETED", 60)
        view = settle(run_dir, 30).views[0]
    finally:
        lab.start_slurmdbd()
    assert view.state == "completed"
    assert "sacct did not confirm" in view.note and "T0 at most" in view.note


@pytest.fixture(scope="module")
def bare(tmp_path_factory):
    """A cluster that keeps no accounting, in place of the lab."""
    import os

    with cluster_or_skip(tmp_path_factory.mktemp("bare"), nodes=2, accounting=False) as cluster:
        before = os.environ.get("SLURM_CONF")
        os.environ["SLURM_CONF"] = str(cluster.conf)
        yield cluster
        del os.environ["SLURM_CONF"]
        if before:
            os.environ["SLURM_CONF"] = before


def test_no_accounting(bare, project):
    """Without accounting a run ends without a hang, and says why its evidence is of a lower tier."""
    run_dir = project.run({"good": "test_ok", "bad": "test_fails"})
    submit(run_dir, lab_profile(account=""))
    progress = settle(run_dir, 90)
    assert states(progress)["good"] == ["completed"] and states(progress)["bad"] == ["failed"]
    assert all("keeps no accounting" in view.note and "T0" in view.note for view in progress.views)


def test_ids_used_again(bare, project):
    """After a cluster's reset another job has our job's id: it is not taken for ours, which ends as unknown."""
    run_dir = project.run({"one": "test_sleeps"}, PROBE_S="600")
    (job,) = submit(run_dir, lab_profile(account="", answer_deadline_s=3))
    bare.wait(lambda: bare.state(job) == "RUNNING", 60)
    bare.stop_slurmctld()
    bare.start_slurmctld(fresh=True)
    ids = [
        bare.run("sbatch", "--parsable", "-o/dev/null", "--mem=10", "--wrap", "true").strip() for _ in range(int(job))
    ]
    assert job in ids and bare.state(job)
    view = settle(run_dir, 60).views[0]
    assert view.state == "unknown"
    assert "no job of this id and name" in view.attempts[0].reason or "no accounting" in view.note
