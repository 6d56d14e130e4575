"""Cluster profiles: what a site is like, as data. Owns finding, reading and checking a profile; asks no scheduler.

A profile is a TOML file. It is found as a path, then as NAME.toml in the user's `clusters` folder, then in the
project's `harness/clusters`. `k3-harness doctor --cluster NAME` checks each field against the real scheduler.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any, Literal

import msgspec
import platformdirs

PROJECT_PROFILES = Path(__file__).parent / "clusters"


class ProfileError(ValueError):
    """A profile that cannot be used; the message names every fault at once."""


class Cluster(msgspec.Struct, frozen=True, kw_only=True):
    """One site. Empty strings and zeros mean: say nothing of it to the scheduler, the site's default holds."""

    name: str = ""
    scheduler: Literal["local", "slurm"] = "slurm"
    # what to ask the scheduler for
    partition: str = ""
    account: str = ""
    qos: str = ""
    constraint: str = ""
    reservation: str = ""
    exclude: str = ""  # nodes never to be used
    dependency: str = ""  # e.g. "afterok:123": holds for every job of a submission
    gpus_per_node: int = 0  # how many a node has; a topology that wants more is refused when planning
    cpus_per_rank: int = 1
    memory_gb_per_node: float = 0
    max_time_min: int = 0  # the partition's own limit; a longer job is refused when planning
    margin_min: int = 2  # added to a job's own time-out, so that our launcher ends it first and says why
    warning_s: int = 30  # the scheduler's signal comes this long before its limit
    array_parallelism: int = 64
    tests_per_job: int = 0  # a suite file with more of them becomes several jobs (shards); 0: one job a file
    sbatch: dict[str, str | int | bool] = {}  # any further sbatch option
    srun_args: tuple[str, ...] = ()
    # how a rank is started on the node
    launcher: Literal["node", "rank"] = "node"  # one task a node with our launcher, or one task a rank through srun
    setup: tuple[str, ...] = ()  # shell lines before the launch, e.g. "module load cuda"
    container: str = ""  # command in front of python, e.g. "apptainer exec --nv image.sif"
    python: str = ""  # interpreter on the node; '' is the submitting one
    environment: dict[str, str] = {}
    cache_folders: dict[str, str] = {}  # e.g. TRITON_CACHE_DIR = "/scratch/$USER/triton"; {run} and {job} are filled in
    spool: str = ""  # folder every node sees; '' is the user's state folder
    # what to do about machine faults
    requeue: bool = False  # may the scheduler itself start a job again? Each start is an attempt of its own
    retries: int = 1  # new attempts after a machine fault, for each job
    answer_deadline_s: float = 600  # how long "no answer" may stay unknown before the attempt is given up as unknown
    queue_limit_min: int = 0  # a job that has not started by then is cancelled; 0 waits for ever


def find(name: str) -> Cluster:
    """The profile called `name`, or at that path. Raises ProfileError naming where it looked and what is there."""
    for path in _candidates(name):
        if path.is_file():
            return load(path)
    looked = ", ".join(str(path.parent) for path in _candidates(name))
    raise ProfileError(f"no cluster profile {name!r} in {looked}; known: {', '.join(names()) or 'none'}")


def names() -> list[str]:
    """Every profile that `find` would find by its bare name."""
    return sorted({path.stem for folder in _folders() for path in folder.glob("*.toml")})


def _folders() -> list[Path]:
    return [Path(platformdirs.user_config_dir("k3")) / "clusters", PROJECT_PROFILES]


def _candidates(name: str) -> list[Path]:
    if name.endswith(".toml") or "/" in name:
        return [Path(name).expanduser()]
    return [folder / f"{name}.toml" for folder in _folders()]


def load(path: Path) -> Cluster:
    """Read one profile file. Raises ProfileError with every fault in it."""
    try:
        raw = tomllib.loads(path.read_text())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ProfileError(f"{path}: not TOML: {error}") from error
    try:
        return parse({"name": path.stem, **raw})
    except ProfileError as error:
        raise ProfileError(f"{path}:\n{error}") from error


def parse(raw: dict[str, Any]) -> Cluster:
    """Build a profile from plain data. Raises ProfileError with all faults; an unknown field prints every valid one."""
    fields = {field.name: field for field in msgspec.structs.fields(Cluster)}
    values, faults = {}, []
    for name, value in raw.items():
        if name not in fields:
            continue
        try:
            values[name] = msgspec.convert(value, fields[name].type)
        except msgspec.ValidationError as error:
            faults.append(f"{name} = {value!r}: {error}")
    faults += _rules(Cluster(**values))
    unknown = sorted(set(raw) - set(fields))
    if unknown:
        faults.append(f"unknown field(s) {', '.join(unknown)}; valid ones are\n{describe()}")
    if faults:
        raise ProfileError("\n".join(f"- {fault}" for fault in faults))
    return Cluster(**values)


def _rules(cluster: Cluster) -> list[str]:
    """What the types alone do not say."""
    numbers = ("gpus_per_node", "cpus_per_rank", "memory_gb_per_node", "max_time_min", "margin_min", "warning_s",
               "array_parallelism", "tests_per_job", "retries", "answer_deadline_s", "queue_limit_min")  # fmt: skip
    at_least_one = {"cpus_per_rank", "margin_min", "array_parallelism", "answer_deadline_s"}
    faults = [
        f"{name} = {value}: must be {least} or more"
        for name in numbers
        if (value := getattr(cluster, name)) < (least := int(name in at_least_one))
    ]
    if cluster.warning_s >= 60 * cluster.margin_min:
        faults.append(f"warning_s = {cluster.warning_s}: must be less than margin_min = {cluster.margin_min} minutes")
    if cluster.spool and not cluster.spool.startswith(("/", "~")):
        faults.append(f"spool = {cluster.spool!r}: must be an absolute path, the same on every node")
    bad = [key for table in (cluster.environment, cluster.cache_folders) for key in table if not _is_variable(key)]
    faults += [f"{key!r} is no name of an environment variable; use letters, digits and _" for key in bad]
    reserved = sorted({"requeue", "no-requeue", "array", "job-name", "output", "error", "chdir"} & set(cluster.sbatch))
    faults += [f"sbatch.{key}: is set by the harness; leave it out" for key in reserved]
    return faults


def _is_variable(name: str) -> bool:
    return re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name) is not None


def describe() -> str:
    """Every valid field with its default, one a line."""
    plain = msgspec.to_builtins(Cluster())
    return "\n".join(f"    {name} = {value!r}" for name, value in plain.items() if name != "name")


def fits(cluster: Cluster, gpus_per_node: int, timeout_min: int) -> str:
    """Why a job of this size can never run there; '' when it can."""
    if gpus_per_node > cluster.gpus_per_node:
        return f"wants {gpus_per_node} GPUs a node, {cluster.name} has gpus_per_node = {cluster.gpus_per_node}"
    limit = cluster.max_time_min
    if limit and timeout_min + cluster.margin_min > limit:
        return f"wants {timeout_min} + {cluster.margin_min} minutes, {cluster.name} has max_time_min = {limit}"
    return ""
