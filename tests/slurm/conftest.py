"""One real cluster for the whole session; where none can be started its tests are skipped by name, in CI they fail."""

from __future__ import annotations

import os

import pytest

from harness.cluster import Cluster
from tests.slurm.cluster import SlurmCluster, missing
from tests.slurm.project import Project


def pytest_collection_modifyitems(items):
    """Everything that asks for the cluster is marked, so that no test of it runs unasked."""
    for item in items:
        if "lab" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.slurm)


def cluster_or_skip(folder, **options) -> SlurmCluster:
    """A cluster that is not started yet; skips, or fails where K3_REQUIRE_SLURM says that there must be one."""
    lack = missing(options.get("accounting", True))
    if lack and os.environ.get("K3_REQUIRE_SLURM") == "1":
        pytest.fail(f"a Slurm cluster is required here: {lack}")
    if lack:
        pytest.skip(f"no Slurm cluster: {lack}")
    return SlurmCluster(folder, **options)


@pytest.fixture(scope="session")
def lab(tmp_path_factory):
    """Four virtual nodes with accounting; SLURM_CONF points at them for the whole session."""
    # A short path: munge's socket must fit into 108 characters.
    cluster = cluster_or_skip(tmp_path_factory.mktemp("lab"))
    before = os.environ.get("SLURM_CONF")
    os.environ["SLURM_CONF"] = str(cluster.conf)
    with cluster:
        yield cluster
    os.environ.pop("SLURM_CONF")
    if before is not None:
        os.environ["SLURM_CONF"] = before


@pytest.fixture(scope="session")
def project(tmp_path_factory):
    """A project with a probe for a suite, and a spool."""
    return Project.make(tmp_path_factory.mktemp("k3"))


@pytest.fixture
def profile():
    """The lab as a cluster profile: small jobs, no retries, short deadlines."""
    return lab_profile()


def lab_profile(**changes) -> Cluster:
    """The lab's profile with some fields changed."""
    fields = {"name": "lab", "partition": "main", "account": "acc", "gpus_per_node": 8, "memory_gb_per_node": 0.4,
              "answer_deadline_s": 45, "retries": 0, "margin_min": 1}  # fmt: skip
    return Cluster(**{**fields, **changes})
