"""Cluster profiles, the journal of submissions, and what a node is told: no scheduler needed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from harness import enter, journal
from harness.cluster import Cluster, ProfileError, find, fits, parse
from harness.journal import Intent, Order, Placed, Refused
from harness.slurm import arrange, own_environment
from harness.spec import JobSpec
from ledger.record import Topology


def test_every_fault_at_once():
    """All faults of a profile are told together, and an unknown field lists the valid ones."""
    with pytest.raises(ProfileError) as caught:
        parse({"partion": "x", "retries": -1, "gpus_per_node": "8", "environment": {"A B": "c"}, "spool": "runs"})
    text = str(caught.value)
    for part in (
        "unknown field(s) partion",
        "partition = ''",
        "retries = -1",
        "gpus_per_node = '8'",
        "'A B'",
        "'runs'",
    ):
        assert part in text


def test_options_of_ours_are_refused():
    """A profile may add any sbatch option but those the harness must set itself."""
    assert parse({"sbatch": {"mail-user": "me"}}).sbatch == {"mail-user": "me"}
    with pytest.raises(ProfileError, match="sbatch.array: is set by the harness"):
        parse({"sbatch": {"array": "1-2"}})


def test_found_by_name_and_path(tmp_path, monkeypatch):
    """A name is looked for in the user's folder before the project's; a path is taken as it is."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    (tmp_path / "k3/clusters").mkdir(parents=True)
    (tmp_path / "k3/clusters/mine.toml").write_text('partition = "gpu"\n')
    assert find("mine").partition == "gpu"
    assert find(str(tmp_path / "k3/clusters/mine.toml")).name == "mine"
    assert find("local").scheduler == "local"
    with pytest.raises(ProfileError, match="known: .*local.*mine"):
        find("yours")


def test_too_large_a_job():
    """A job that the profile says can never run is told so before it is submitted."""
    cluster = Cluster(name="c", gpus_per_node=4, max_time_min=60)
    assert "wants 8 GPUs a node" in fits(cluster, 8, 10)
    assert "wants 59 + 2 minutes" in fits(cluster, 4, 59)
    assert fits(cluster, 4, 58) == ""


def specs(count: int, **topology) -> list[JobSpec]:
    """Some jobs of one shape."""
    place = Topology(name="t", **topology)
    return [
        JobSpec(run="r", nonce="n", job=f"j{place.ranks}.{i}", topology=place, tests=("t",), snapshot="s")
        for i in range(count)
    ]


def test_fewest_submissions():
    """Jobs of one shape share an array, cut at the site's limit; other shapes have their own."""
    batches = arrange([*specs(5), *specs(2, ranks=4, nodes=2)], Cluster(), limit=4)
    assert [len(batch) for batch in batches] == [3, 2, 2]


def test_journal_survives_a_crash(tmp_path):
    """A line cut short is left out, the next one stands on its own, and an intent without outcome stays open."""
    journal.append(tmp_path, Intent(group="g0", name="a", orders=(Order("x", 0), Order("y", 0)), time=1))
    journal.append(tmp_path, Placed(group="g0", scheduler_id="12", time=2))
    with open(tmp_path / journal.NAME, "ab") as file:
        file.write(b'{"type":"placed","gro')
    journal.append(tmp_path, Intent(group="g1", name="b", orders=(Order("z", 0),), time=3))
    groups = journal.groups(journal.read(tmp_path))
    assert (groups["g0"].task_id(Order("y", 0)), groups["g1"].open) == ("12_1", True)
    journal.append(tmp_path, Refused(group="g1", text="Invalid account", time=4))
    assert journal.groups(journal.read(tmp_path))["g1"].refused == "Invalid account"


def test_site_variables_survive(monkeypatch):
    """A submission from inside another job leaves that job's variables behind and keeps the site's."""
    values = {"SLURM_JOB_ID": "1", "SLURM_ARRAY_TASK_ID": "3", "SLURM_NTASKS": "8", "TRITON_CACHE_DIR": "/x"}
    kept = {"SLURM_CONF": "/etc/x.conf", "SITE_LICENSE": "yes"}
    for name, value in {**values, **kept}.items():
        monkeypatch.setenv(name, value)
    with own_environment():
        import os

        assert not set(values) & set(os.environ)
        assert {name: os.environ[name] for name in kept} == kept
    assert os.environ["SLURM_ARRAY_TASK_ID"] == "3"


def test_caches_are_the_jobs_own(tmp_path, monkeypatch):
    """A node's job has compiler caches of its own; a leaked one is dropped, a declared one is placed as told."""
    monkeypatch.setenv("TRITON_CACHE_DIR", "/somebody/elses")
    monkeypatch.setenv("SLURM_CONF", "/etc/x.conf")
    monkeypatch.setenv("SCRATCH", "/scratch/me")
    job_dir = tmp_path / "run1/jobs/cpu1.a.0"
    table = {"cache_folders": {"FLA_CONFIG_DIR": "$SCRATCH/{run}/{job}"}, "environment": {"MINE": "1"}}
    env = enter.environment(table, {"attempt": 2, "address": "n1", "port": 5}, job_dir)
    site = json.loads(env["K3_SITE_ENV"])
    assert site["TRITON_CACHE_DIR"].startswith(str(job_dir / "attempts/2"))
    assert site["FLA_CONFIG_DIR"] == "/scratch/me/run1/cpu1.a.0"
    assert (env["MINE"], env["SLURM_CONF"]) == ("1", "/etc/x.conf")


@pytest.mark.parametrize("declared", [True, False])
def test_site_packages_survive(tmp_path, monkeypatch, declared):
    """Packages that a site or a profile puts on PYTHONPATH are found on the node, after the snapshot."""
    monkeypatch.setenv("PYTHONPATH", "/site/packages")
    table = {"cache_folders": {}, "environment": {"PYTHONPATH": "/mine"} if declared else {}}
    env = enter.environment(table, {"attempt": 0, "address": "n1", "port": 5}, tmp_path / "run1/jobs/cpu1.a.0")
    found = env["PYTHONPATH"].split(":")
    assert found == [str(tmp_path / "run1/snapshot"), *(["/mine"] if declared else []), "/site/packages"]
    assert "PYTHONPATH" not in json.loads(env["K3_SITE_ENV"])


def test_ports_are_not_those_of_outgoing_connections():
    """A rendezvous port cannot be given to another process's connection before rank 0 listens on it."""
    (low, _) = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    assert all(1024 < enter.free_port("127.0.0.1") < low for _ in range(200))


def test_restart_numbers(tmp_path):
    """Node and collector agree on the number of a start that the scheduler repeated, whoever asks first."""
    (tmp_path / "attempts/0").mkdir(parents=True)
    assert enter.claim_number(tmp_path, "7", 1) == 1
    assert enter.claim_number(tmp_path, "7", 2) == 2
    assert enter.claim_number(tmp_path, "7", 1) == 1
    assert enter.next_number(tmp_path) == 3
