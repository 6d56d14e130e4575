"""Submission to Slurm through submitit's executor: groups jobs of one shape into arrays and places them once.

submitit writes the batch script, calls sbatch and reads the id. Nothing is pickled: the script starts
`harness.enter`, which finds its order in a table beside the script. So what runs is the snapshot, and a submitter
that dies loses nothing. No teardown: it would hide the exit code.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shlex
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
from submitit import SlurmExecutor
from submitit.core.utils import FailedJobError, FailedSubmissionError, JobPaths

from harness import journal, scheduler
from harness.cluster import Cluster, fits
from harness.journal import Group, Intent, Order, Placed, Refused
from harness.spec import HarnessError, JobSpec, load, store

TABLE = "table.json"
DEFAULT_ARRAY_LIMIT = 1001
# Words with which sbatch says that nobody answered: not a refusal, and the job may even have been taken.
SILENT = re.compile(
    r"unable to contact|connection (refused|timed out)|socket timed out|temporarily|zero bytes|connect failure", re.I
)
# Which site settings a job that submits from inside another job keeps.
KEPT = ("SLURM_CONF", "SLURM_CLUSTERS", "SLURM_CONF_SERVER", "SLURM_TIME_FORMAT")
FOREIGN = ("SLURM_ARRAY_", "SUBMITIT_", "TRITON_CACHE", "TORCHINDUCTOR_CACHE", "TORCHELASTIC_")


class Silence(HarnessError):
    """The scheduler did not answer; the group stays open and is looked for by name later."""


@dataclass(frozen=True)
class Shape:
    """What a job asks of the scheduler; jobs of one shape go into one array."""

    nodes: int
    ranks: int
    gpus_per_node: int
    time_min: int


def shape_of(spec: JobSpec, cluster: Cluster) -> Shape:
    """A job's shape there. Raises HarnessError when the cluster can never run it."""
    topology, minutes = spec.topology, -(-int(spec.timeout_s) // 60)
    if reason := fits(cluster, topology.gpus_per_node, minutes):
        raise HarnessError(f"job {spec.job} {reason}; choose another topology or profile")
    return Shape(topology.nodes, topology.ranks, topology.gpus_per_node, minutes + cluster.margin_min)


def arrange(specs: Sequence[JobSpec], cluster: Cluster, limit: int = DEFAULT_ARRAY_LIMIT) -> list[list[JobSpec]]:
    """The fewest submissions: one per shape, cut where an array would exceed the site's limit."""
    shapes: dict[Shape, list[JobSpec]] = {}
    for spec in specs:
        shapes.setdefault(shape_of(spec, cluster), []).append(spec)
    size = max(1, limit - 1)
    return [jobs[i : i + size] for jobs in shapes.values() for i in range(0, len(jobs), size)]


def array_limit() -> int:
    """The site's MaxArraySize; the usual default when it does not say."""
    answer = scheduler.ask(["scontrol", "show", "config"])
    found = re.search(r"^MaxArraySize\s*=\s*(\d+)", answer.output, re.MULTILINE)
    return int(found[1]) if found else DEFAULT_ARRAY_LIMIT


def executor(run_dir: Path, cluster: Cluster, group: str, name: str, specs: Sequence[JobSpec]) -> SlurmExecutor:
    """submitit's executor, set up for one group. Raises RuntimeError where Slurm's commands are missing."""
    made = SlurmExecutor(folder=run_dir / "slurm" / group, max_num_timeout=0, python=python_of(cluster))
    made.update_parameters(**parameters(run_dir, cluster, name, shape_of(specs[0], cluster)))
    if len(specs) > 1:
        made.parameters["map_count"] = len(specs)
    return made


def python_of(cluster: Cluster) -> str:
    """The command that starts python on a node, inside the profile's container if there is one."""
    return f"{cluster.container} {shlex.quote(cluster.python or sys.executable)}".strip()


def parameters(run_dir: Path, cluster: Cluster, name: str, shape: Shape) -> dict:
    """submitit's parameters for a job of this shape; empty profile fields are left to the site."""
    per_node = shape.ranks // shape.nodes
    tasks = per_node if cluster.launcher == "rank" else 1
    cpus = cluster.cpus_per_rank * per_node // tasks
    named = ("partition", "account", "qos", "constraint", "exclude", "dependency")
    wanted = {key: value for key in named if (value := getattr(cluster, key))}
    if cluster.memory_gb_per_node:
        wanted["mem"] = f"{int(cluster.memory_gb_per_node * 1024)}M"
    if shape.gpus_per_node:
        wanted["gpus_per_node"] = shape.gpus_per_node
    bind = ["--gpus-per-task=1"] if shape.gpus_per_node and cluster.launcher == "rank" else []
    more = {"chdir": str(run_dir / "snapshot"), ("requeue" if cluster.requeue else "no-requeue"): True}
    more |= {"reservation": cluster.reservation} if cluster.reservation else {}
    snapshot = shlex.quote(str(run_dir / "snapshot"))
    return wanted | {
        "job_name": name, "time": shape.time_min, "nodes": shape.nodes, "ntasks_per_node": tasks,
        "cpus_per_task": cpus, "signal_delay_s": cluster.warning_s, "array_parallelism": cluster.array_parallelism,
        "setup": [
            *cluster.setup,
            f'export PYTHONDONTWRITEBYTECODE=1 PYTHONPATH={snapshot}"${{PYTHONPATH:+:$PYTHONPATH}}"',
        ],
        "srun_args": ["--kill-on-bad-exit=1", f"--cpus-per-task={cpus}", *bind, *cluster.srun_args],
        "additional_parameters": {**more, **cluster.sbatch},
    }  # fmt: skip


def script(run_dir: Path, cluster: Cluster, group: str, name: str, specs: Sequence[JobSpec]) -> str:
    """The exact batch script that `place` would submit."""
    made = executor(run_dir, cluster, group, name, specs)
    return made._make_submission_file_text(_command(made), uid="")


def _command(made: SlurmExecutor) -> str:
    return f"{made.python} -u -m harness.enter {shlex.quote(str(made.folder))}"


def submit(run_dir: Path, cluster: Cluster, orders: Sequence[Order]) -> list[Group]:
    """Place new groups for these orders. A refusal is kept as such; silence leaves a group open for the collector."""
    with journal.lock(run_dir):
        return submit_locked(run_dir, cluster, orders)


def submit_locked(run_dir: Path, cluster: Cluster, orders: Sequence[Order]) -> list[Group]:
    """`submit` for a caller that holds the journal's lock."""
    specs = [load(run_dir / "jobs" / order.job / "spec.json", JobSpec) for order in orders]
    by_job = {order.job: order for order in orders}
    batches = arrange(specs, cluster, array_limit()) if specs else []
    return [place(run_dir, cluster, _intend(run_dir, [by_job[spec.job] for spec in batch])) for batch in batches]


def _intend(run_dir: Path, orders: Sequence[Order]) -> Intent:
    """Write down what is about to be submitted; the name carries a nonce of its own, so it is never another's job."""
    group = f"g{len(journal.groups(journal.read(run_dir)))}"
    name = f"k3-{run_dir.name[-8:]}-{group}-{secrets.token_hex(4)}"
    intent = Intent(group=group, name=name, orders=tuple(orders), time=time.time())
    for order in orders:
        (run_dir / "jobs" / order.job / "attempts" / str(order.attempt)).mkdir(parents=True, exist_ok=True)
    journal.append(run_dir, intent)
    return intent


def place(run_dir: Path, cluster: Cluster, intent: Intent) -> Group:
    """Hand one group to sbatch and note what it said. The caller holds the journal's lock."""
    specs = [load(run_dir / "jobs" / order.job / "spec.json", JobSpec) for order in intent.orders]
    folder = run_dir / "slurm" / intent.group
    JobPaths.get_first_id_independent_folder(folder).mkdir(parents=True, exist_ok=True)
    _write_table(folder, cluster, intent)
    group = Group(intent)
    try:
        made = executor(run_dir, cluster, intent.group, intent.name, specs)
        with own_environment():
            group.scheduler_id = made._submit_command(_command(made)).job_id
    except (FailedJobError, FailedSubmissionError) as error:
        text = str(error).strip()
        if not SILENT.search(text):
            group.refused = text
            journal.append(run_dir, Refused(group=intent.group, text=text, time=time.time()))
        return group
    journal.append(run_dir, Placed(group=intent.group, scheduler_id=group.scheduler_id, time=time.time()))
    return group


def _write_table(folder: Path, cluster: Cluster, intent: Intent) -> None:
    orders = [msgspec.to_builtins(order) for order in intent.orders]
    table = {"orders": orders, "environment": cluster.environment, "cache_folders": cluster.cache_folders}
    partial = folder / f".{TABLE}"
    partial.write_bytes(msgspec.json.encode(table))
    os.replace(partial, folder / TABLE)


@contextlib.contextmanager
def own_environment() -> Iterator[None]:
    """While sbatch runs: without what a surrounding job or an earlier one left; the site's own variables stay."""
    inside = "SLURM_JOB_ID" in os.environ
    dropped = {
        name: value
        for name, value in os.environ.items()
        if name.startswith(FOREIGN) or (inside and name.startswith("SLURM_") and name not in KEPT)
    }
    for name in dropped:
        del os.environ[name]
    try:
        yield
    finally:
        os.environ.update(dropped)


def settle_open(run_dir: Path, cluster: Cluster, group: Group, patience_s: float) -> None:
    """A group of unknown fate: adopt the job of its name where there is one, else place it after `patience_s`."""
    found = find_by_name(group.intent.name, since=group.intent.time)
    if found is None:
        return  # nobody answers: ask later
    if found:
        group.scheduler_id = found
        journal.append(run_dir, Placed(group=group.intent.group, scheduler_id=found, time=time.time()))
    elif time.time() - group.intent.time > patience_s:
        again = place(run_dir, cluster, group.intent)
        group.scheduler_id, group.refused = again.scheduler_id, again.refused


def find_by_name(name: str, since: float) -> str | None:
    """The id of the job with this name, '' when there is none, None when the controller does not answer."""
    live = scheduler.ask(["squeue", "-h", "-t", "all", "-o", "%F", "--name", name])
    if live.exit_code:
        return None
    start = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(since - 3600))
    past = scheduler.ask(["sacct", "-X", "-n", "-P", "-o", "JobID", "--name", name, "-S", start])
    words = live.output.split() or past.output.split()
    return re.split(r"[_.]", words[0])[0] if words else ""


def save_cluster(run_dir: Path, cluster: Cluster) -> None:
    """Keep the profile as it was when submitting: whoever collects later needs no profile of his own."""
    store(run_dir / "cluster.json", cluster)


def load_cluster(run_dir: Path) -> Cluster:
    """The profile this run was submitted with."""
    return msgspec.json.decode((run_dir / "cluster.json").read_bytes(), type=Cluster)
