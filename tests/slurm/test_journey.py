"""The daily use, through the commands: submit, go home, find the ledger right; with the scheduler as witness."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from dataclasses import replace

import pytest
from msgspec import structs

from harness.spec import load, store
from ledger.record import JobRecord
from tests.harness import toy as toys

pytestmark = pytest.mark.slurm

PAIR = '''
"""Ranks that really meet."""
import pytest
from k3.math import double


@pytest.mark.ranks(4)
def test_double(group):
    import torch, torch.distributed as dist
    total = torch.tensor([double(1.0)])
    dist.all_reduce(total)
    assert total.item() == 2.0 * dist.get_world_size()
'''
PROFILE = """
partition = "main"
account = "acc"
memory_gb_per_node = 0.4
margin_min = 1
retries = 0
answer_deadline_s = 45
spool = "{spool}"
"""


@pytest.fixture
def home(tmp_path, lab, monkeypatch):
    """A user with a small project and a profile of the lab."""
    made = toys.make(tmp_path)
    (tmp_path / "spool").mkdir()
    (tmp_path / "lab.toml").write_text(PROFILE.format(spool=tmp_path / "spool"))
    monkeypatch.chdir(made.root)
    return made


def harness(home, *arguments, code=0, timeout=150):
    """Run a harness command and expect its exit code."""
    done = home.run(*arguments, timeout=timeout)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout


def profile(home):
    return ("--cluster", str(home.root.parent / "lab.toml"))


def claims(home):
    """Every cell as `k3-ledger claims --json` tells it, by claim."""
    done = home.run("claims", "--json", module="ledger.cli")
    return {cell["id"]: cell for cell in json.loads(done.stdout)}


def the_run(home):
    return next((home.root.parent / "spool").glob("*/run.json")).parent


@pytest.fixture(scope="module")
def proven(tmp_path_factory, lab):
    """A user whose claim has been run on the cluster; the tests that follow only read, or forge copies."""
    folder = tmp_path_factory.mktemp("proven")
    made = toys.make(folder)
    (folder / "spool").mkdir()
    (folder / "lab.toml").write_text(PROFILE.format(spool=folder / "spool"))
    harness(made, "run", "quick", *profile(made))
    return made


def test_run_reaches_t1(proven):
    """A claim run on the cluster is proven with the scheduler as witness, and the scheduler stands by its answers."""
    cell = claims(proven)["toy.double"]
    assert (cell["state"], cell["witness"]) == ("proven", "T1"), cell
    verdicts = json.loads(harness(proven, "verify", *profile(proven), "--json"))
    assert [row["verdict"] for row in verdicts] == ["agrees"]


def test_submitter_goes_home(home):
    """Submitting returns at once; another shell, later, collects, shows, and finds the claim proven."""
    out = harness(home, "submit", "quick", *profile(home))
    name = the_run(home).name
    assert name in out
    harness(home, "collect", name, *profile(home))
    rows = json.loads(harness(home, "status", name, *profile(home), "--json", "--stored"))
    assert [(row["state"], row["settled"]) for row in rows] == [("completed", True)]
    assert "1 passed" in harness(home, "logs", rows[0]["job"], "--rank", "0", "--run", name, *profile(home))
    assert claims(home)["toy.double"]["witness"] == "T1"


@pytest.mark.parametrize("field", ["state", "nodes", "times", "answer"])
def test_disagreement_blocks(proven, tmp_path, field):
    """A record that differs from the scheduler's raw answer, or an answer from what the ranks saw, is named."""
    run_dir = tmp_path / the_run(proven).name
    shutil.copytree(the_run(proven), run_dir)
    (path,) = run_dir.glob("jobs/*/job.json")
    store(path, FORGERIES[field](load(path, JobRecord)))
    forged = replace(proven, state=tmp_path / "state")
    harness(forged, "collect", str(run_dir), "--stored")
    cell = claims(forged)["toy.double"]
    assert cell["state"] != "proven"
    assert WORDS[field] in cell["reason"], cell


WORDS = {"state": "it says exit code", "nodes": "it says nodes", "times": "it says start", "answer": "rank 0 ran on"}


def _attempt(record, **changes):
    return structs.replace(record, attempts=(structs.replace(record.attempts[0], **changes),))


def _answer(record):
    """Every answer says another node, and the record agrees with it."""
    answers = tuple(structs.replace(one, output=one.output.replace("|n", "|m")) for one in record.answers)
    nodes = tuple(node.replace("n", "m") for node in record.attempts[0].nodes)
    return structs.replace(_attempt(record, nodes=nodes), answers=answers)


FORGERIES = {
    "state": lambda record: _attempt(record, exit_code=3),
    "nodes": lambda record: _attempt(record, nodes=("n9",)),
    "times": lambda record: _attempt(record, started_at=record.attempts[0].started_at - 60),
    "answer": _answer,
}


@pytest.mark.parametrize("nodes, launcher", [(2, "node"), (4, "node"), (2, "rank")])
def test_several_nodes(home, nodes, launcher):
    """Two ranks on each of several nodes meet through the scheduler's node list, and the witness counts them all."""
    ranks = 2 * nodes
    home.write("suites/toy.py", PAIR.replace("ranks(4)", f"ranks({ranks})").replace("(group)", "()"))
    home.claim("toy.meet", "suites/toy.py::test_double", topology="wide")
    text = (home.root / "suites/claims.toml").read_text()
    wide = f'[topologies.wide]\nranks = {ranks}\nnodes = {nodes}\nbackend = "gloo"\n'
    home.write("suites/claims.toml", text.replace("[topologies.toy4]", f"{wide}[topologies.toy4]"))
    with open(home.root.parent / "lab.toml", "a") as file:
        file.write(f'launcher = "{launcher}"\n')
    harness(home, "run", "toy.meet", *profile(home))
    cell = claims(home)["toy.meet"]
    assert (cell["state"], cell["witness"], cell["ranks"]) == ("proven", "T1", ranks), cell


def test_dry_run(home):
    """A dry run prints the exact batch script and the cost, and leaves nothing at the scheduler or in the spool."""
    out = harness(home, "submit", "quick", *profile(home), "--dry-run")
    for line in ("#SBATCH --no-requeue", "#SBATCH --partition=main", "--kill-on-bad-exit=1", "GPU-hours"):
        assert line in out
    assert not list((home.root.parent / "spool").iterdir())


def test_cancel(home):
    """Cancelling a run ends its jobs as cancelled, for good, and nothing of it is proven."""
    home.write("suites/toy.py", "import time\n\ndef test_double():\n    time.sleep(100)\n")
    harness(home, "submit", "quick", *profile(home))
    harness(home, "cancel", *profile(home))
    harness(home, "collect", *profile(home))
    rows = json.loads(harness(home, "status", *profile(home), "--json", "--stored"))
    assert [row["state"] for row in rows] == ["cancelled"]
    assert claims(home)["toy.double"]["state"] == "unproven"


def test_pack_and_exec(home, tmp_path):
    """A packed run goes to a host without git, runs under its scheduler, and proves the claim at home with T1."""
    harness(home, "pack", "quick", *profile(home), "-o", str(tmp_path / "out.tar.gz"))
    away = tmp_path / "away"
    away.mkdir()
    command = [sys.executable, "-m", "harness.cli", "exec", str(tmp_path / "out.tar.gz"), *profile(home)]
    env = {**home.env, "K3_STATE_DIR": str(away), "PATH": without_git(home.env["PATH"], tmp_path)}
    done = subprocess.run(
        [*command, "-o", str(tmp_path / "back.tar.gz")], cwd=away, env=env, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert not (away / "ledger.db").exists()
    harness(home, "collect", str(tmp_path / "back.tar.gz"), "--stored")
    assert claims(home)["toy.double"]["witness"] == "T1"


def without_git(path, tmp_path):
    """A PATH on which git fails."""
    fake = tmp_path / "no-git"
    fake.mkdir()
    (fake / "git").write_text("#!/bin/sh\nexit 127\n")
    (fake / "git").chmod(0o755)
    return f"{fake}:{path}"


def test_doctor(home, tmp_path):
    """The doctor finds nothing wrong with a right profile, and names each wrong field of a wrong one with a remedy."""
    harness(home, "doctor", *profile(home))
    (tmp_path / "ill.toml").write_text(
        'partition = "main"\naccount = "nobody"\nqos = "gold"\nconstraint = "h200"\ngpus_per_node = 9\n'
        f'max_time_min = 999\nspool = "{tmp_path / "spool"}"\n'
    )
    out = harness(home, "doctor", "--cluster", str(tmp_path / "ill.toml"), "--json", "--no-job", code=1)
    wrong = {row["field"]: row["text"] for row in json.loads(out) if row["verdict"] == "wrong"}
    assert set(wrong) == {"account", "qos", "constraint", "gpus_per_node", "max_time_min", "sbatch"}
    assert "set it to 8" in wrong["gpus_per_node"] and "acc" in wrong["account"]


def test_doctor_looks_on_a_node(home, tmp_path):
    """A container that cannot start, a setup line that fails and the GPUs a job is given are told by field."""
    base = PROFILE.format(spool=home.root.parent / "spool") + "gpus_per_node = 8\n"
    (tmp_path / "boxed.toml").write_text(base + 'container = "unshare --mount --"\nsetup = ["no-such-module load x"]\n')
    rows = json.loads(harness(home, "doctor", "--cluster", str(tmp_path / "boxed.toml"), "--json"))
    said = {(row["field"], row["verdict"]): row["text"] for row in rows}
    assert "behind unshare --mount" in said["container", "ok"]
    assert "no-such-module" in said["setup", "beware"]
    assert "one GPU sees ['0']" in " ".join(row["text"] for row in rows)
    (tmp_path / "broken.toml").write_text(base + 'container = "/nowhere/apptainer exec image.sif"\n')
    rows = json.loads(harness(home, "doctor", "--cluster", str(tmp_path / "broken.toml"), "--json", code=1))
    (wrong,) = [row for row in rows if row["verdict"] == "wrong"]
    assert wrong["field"] == "container" and "No such file" in wrong["text"]


def test_container_shards_and_site_packages(home, tmp_path):
    """Behind a container command, cut into shards, with packages of the site's own: proven, and confirmed for each."""
    (tmp_path / "site").mkdir()
    (tmp_path / "site/only_here.py").write_text("PLACE = 'site'\n")
    suite = "import pytest, only_here\nfrom k3.math import double\n@pytest.mark.parametrize('x', [1, 2, 3])\n"
    home.write("suites/toy.py", f"{suite}def test_double(x):\n    assert double(x) == 2 * x\n")
    with open(home.root.parent / "lab.toml", "a") as file:
        file.write('container = "unshare --mount --"\ntests_per_job = 1\n')
        file.write(f'[environment]\nPYTHONPATH = "{tmp_path}/site"\n')
    with_site = replace(home, more={"PYTHONPATH": f"{home.root}:{tmp_path}/site"})
    harness(with_site, "run", "quick", *profile(home))
    cell = claims(home)["toy.double"]
    assert (cell["state"], cell["witness"]) == ("proven", "T1"), cell
    jobs = [load(path, JobRecord) for path in the_run(home).glob("jobs/*/job.json")]
    assert sorted(job.job for job in jobs) == ["cpu1.toy.0", "cpu1.toy.1", "cpu1.toy.2"]
