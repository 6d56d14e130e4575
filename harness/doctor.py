"""`k3-harness doctor`: checks each field of a cluster profile against the real scheduler and against a node.

Every finding is a sentence: what was asked, what was found, and what to do about it. Changes nothing but a folder of
its own in the spool, and runs one job of a minute.
"""

from __future__ import annotations

import argparse
import getpass
import json
import re
import secrets
import shutil
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from submitit.core.utils import FailedJobError, FailedSubmissionError, JobPaths

from harness import cluster as clusters
from harness import output, scheduler, slurm
from harness.cluster import Cluster
from harness.slurm import Shape
from harness.spool import runs_dir
from ledger import windows

COLUMNS = ("field", "verdict", "text")
COMMANDS = ("sbatch", "srun", "squeue", "sacct", "scontrol", "scancel", "sinfo")
NEEDED = ("torch", "pytest", "msgspec", "coverage", "pytest-timeout")


@dataclass(frozen=True)
class Finding:
    """About one field: ok, wrong, or not checked, in plain words."""

    field: str
    verdict: str
    text: str


def configure(parser: argparse.ArgumentParser) -> None:
    """Arguments of `k3-harness doctor`."""
    parser.add_argument("--cluster", default="local", help="a cluster profile: its name or its path")
    parser.add_argument("--no-job", action="store_true", help="ask the scheduler only; run nothing on a node")
    parser.add_argument("--wait", type=float, default=300, metavar="S", help="how long the probe may wait for a node")
    output.add_formats(parser)


def command(options: argparse.Namespace) -> int:
    """Check a profile. 0: nothing is wrong; 1: something is."""
    found = list(examine(clusters.find(options.cluster), 0 if options.no_job else options.wait))
    output.emit([vars(finding) for finding in found], COLUMNS, options)
    return int(any(finding.verdict == "wrong" for finding in found))


def examine(cluster: Cluster, wait_s: float) -> Iterator[Finding]:
    """All findings about a profile; a scheduler that does not answer ends the examination."""
    yield from _spool(cluster)
    for window in windows.installed():
        yield Finding("toolchain", "beware", f"known bad: {window}; evidence from here will be flagged")
    if cluster.scheduler == "local":
        yield Finding("scheduler", "ok", "local: jobs run here, one after another, and nobody confirms them (T0)")
        return
    missing = [name for name in COMMANDS if shutil.which(name) is None]
    if missing:
        yield Finding("scheduler", "wrong", f"not on PATH here: {', '.join(missing)}; run this on a submission host")
        return
    ping = scheduler.ask(["scontrol", "ping"])
    if "UP" not in ping.output:
        said = (ping.error or ping.output).strip()
        yield Finding("scheduler", "wrong", f"the controller does not answer: {said}; is SLURM_CONF set right?")
        return
    yield Finding("scheduler", "ok", ping.output.strip().splitlines()[0])
    yield _accounting()
    yield from _partition(cluster)
    yield from _association(cluster)
    yield from _nodes(cluster)
    yield from _reservation(cluster)
    yield from _as_a_whole(cluster, wait_s)


def _spool(cluster: Cluster) -> Iterator[Finding]:
    folder = runs_dir(cluster.spool)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            free = shutil.disk_usage(folder).free / 1e9
    except OSError as error:
        yield Finding("spool", "wrong", f"{folder}: {error.strerror}; name a folder that every node can write to")
        return
    verdict = "ok" if free > 1 else "wrong"
    yield Finding(
        "spool", verdict, f"{folder} can be written here, {free:.1f} GB are free" + ("" if free > 1 else "; too few")
    )
    if cluster.scheduler == "slurm" and not cluster.spool:
        yield Finding("spool", "not checked", "no spool is named: your state folder must be shared with every node")


def _accounting() -> Finding:
    asked = scheduler.ask(["sacct", "-X", "-n", "-P", "-o", "JobID", "-S", "now-1minute"])
    if not asked.exit_code:
        return Finding("accounting", "ok", "sacct answers: evidence from here can reach T1")
    if "disabled" in asked.error:
        return Finding("accounting", "not checked", "this cluster keeps no accounting: evidence from here stays at T0")
    return Finding("accounting", "wrong", f"sacct does not answer: {asked.error}; evidence stays at T0 until it does")


def _partition(cluster: Cluster) -> Iterator[Finding]:
    asked = scheduler.ask(["scontrol", "-o", "show", "partition"])
    parts = {words["PartitionName"]: words for line in asked.output.splitlines() if (words := _words(line))}
    name = cluster.partition or next((n for n, words in parts.items() if words.get("Default") == "YES"), "")
    if name not in parts:
        what = f"there is no partition {name!r}" if name else "no partition is the default"
        yield Finding("partition", "wrong", f"{what}; there are {', '.join(sorted(parts))}")
        return
    state = parts[name].get("State", "")
    yield Finding("partition", "ok" if state == "UP" else "wrong", f"{name} is {state}")
    limit = _minutes(parts[name].get("MaxTime", ""))
    text = f"{name} allows {limit or 'unlimited'} minutes, the profile says {cluster.max_time_min or 'nothing'}"
    if limit and not cluster.max_time_min:
        yield Finding("max_time_min", "not checked", f"{text}; set max_time_min = {limit} to refuse longer jobs early")
    elif limit and cluster.max_time_min > limit:
        yield Finding("max_time_min", "wrong", f"{text}; set max_time_min = {limit} or less")
    else:
        yield Finding("max_time_min", "ok", text)


def _association(cluster: Cluster) -> Iterator[Finding]:
    """Account and QOS: does the accounting let this user charge and use them?"""
    user = getpass.getuser()
    asked = scheduler.ask(["sacctmgr", "-n", "-P", "show", "assoc", f"user={user}", "format=account,qos"])
    rows = [line.split("|") for line in asked.output.splitlines() if "|" in line]
    for name, column, value in (("account", 0, cluster.account), ("qos", 1, cluster.qos)):
        if not value:
            continue
        known = sorted({word for row in rows for word in row[column].split(",") if word})
        if asked.exit_code or not rows:
            yield Finding(
                name, "not checked", f"the accounting says nothing of user {user}: {asked.error or 'no rows'}"
            )
        elif value in known:
            yield Finding(name, "ok", f"{user} may use {value}")
        else:
            yield Finding(name, "wrong", f"{user} may not use {value!r}; known: {', '.join(known) or 'none'}")


def _nodes(cluster: Cluster) -> Iterator[Finding]:
    """Constraint, excluded nodes, GPUs, CPUs and memory, against the nodes of the partition."""
    part = ["-p", cluster.partition] if cluster.partition else []
    asked = scheduler.ask(["sinfo", "-h", "-N", *part, "-o", "%N|%f|%G|%c|%m|%T"])
    nodes = [line.split("|") for line in asked.output.splitlines() if line.count("|") == 5]
    if not nodes:
        yield Finding("nodes", "wrong", f"the partition has no nodes: {asked.error or 'sinfo lists none'}")
        return
    up = sum(not node[5].startswith(("down", "drain", "fail")) for node in nodes)
    yield Finding("nodes", "ok" if up else "wrong", f"{up} of {len(nodes)} nodes are in service")
    features = {word for node in nodes for word in node[1].split(",")}
    unknown = [word for word in re.findall(r"[\w.:-]+", cluster.constraint) if word not in features]
    if cluster.constraint:
        text = (
            f"no node has {', '.join(unknown)}; they have {', '.join(sorted(features))}" if unknown else "nodes have it"
        )
        yield Finding("constraint", "wrong" if unknown else "ok", text)
    names = {node[0] for node in nodes}
    if strangers := set(scheduler.expand_nodes(cluster.exclude)) - names:
        yield Finding("exclude", "wrong", f"not nodes of the partition: {', '.join(sorted(strangers))}")
    gpus = max(_gpus(node[2]) for node in nodes)
    wrong = cluster.gpus_per_node > gpus
    text = f"the profile says {cluster.gpus_per_node}, the best node has {gpus}"
    yield Finding("gpus_per_node", "wrong" if wrong else "ok", text + (f"; set it to {gpus}" if wrong else ""))
    cpus, memory = max(int(node[3].rstrip("+")) for node in nodes), max(float(node[4].rstrip("+")) for node in nodes)
    if cluster.cpus_per_rank > cpus:
        yield Finding("cpus_per_rank", "wrong", f"{cluster.cpus_per_rank} is more than any node's {cpus}")
    if cluster.memory_gb_per_node * 1024 > memory:
        text = f"{cluster.memory_gb_per_node} is more than any node's {memory / 1024:.1f}"
        yield Finding("memory_gb_per_node", "wrong", text)


def _reservation(cluster: Cluster) -> Iterator[Finding]:
    if cluster.reservation:
        asked = scheduler.ask(["scontrol", "-o", "show", "reservation", cluster.reservation])
        known = asked.exit_code == 0 and "ReservationName=" in asked.output
        yield Finding("reservation", "ok" if known else "wrong", asked.output.strip() or asked.error)


def _as_a_whole(cluster: Cluster, wait_s: float) -> Iterator[Finding]:
    """The exact script with a probe in it: first whether sbatch would take it, then what it finds on a node."""
    folder = runs_dir(cluster.spool) / f"doctor-{secrets.token_hex(4)}"
    (folder / "snapshot").mkdir(parents=True)
    try:
        question = {"nonce": folder.name, "cache_folders": cluster.cache_folders}
        (folder / "question.json").write_text(json.dumps(question))
        shutil.copy(Path(__file__).with_name("probe.py"), folder / "probe.py")
        made = slurm.SlurmExecutor(folder=folder / "slurm", max_num_timeout=0, python=slurm.python_of(cluster))
        JobPaths.get_first_id_independent_folder(folder / "slurm").mkdir(parents=True)
        shape = Shape(1, 1, min(cluster.gpus_per_node, 1), cluster.margin_min)
        made.update_parameters(**slurm.parameters(folder, cluster, "k3-doctor", shape))
        line = f"{made.python} -u {folder / 'probe.py'} {folder}"
        yield from _would_take(folder, made._make_submission_file_text(line, uid=""))
        if wait_s:
            yield from _on_a_node(cluster, folder, made, line, wait_s)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _would_take(folder: Path, text: str) -> Iterator[Finding]:
    (folder / "test.sh").write_text(text)
    with slurm.own_environment():
        asked = scheduler.ask(["sbatch", "--test-only", str(folder / "test.sh")])
    said = (asked.error or asked.output).strip().replace("\n", "; ")
    yield Finding("sbatch", "wrong" if asked.exit_code else "ok", said)


def _on_a_node(cluster: Cluster, folder: Path, made, line: str, wait_s: float) -> Iterator[Finding]:
    try:
        with slurm.own_environment():
            job_id = made._submit_command(line).job_id
    except (FailedJobError, FailedSubmissionError) as error:
        yield Finding("node", "wrong", f"the probe was refused: {error}")
        return
    deadline, state = time.monotonic() + wait_s, ""
    while time.monotonic() < deadline and not (folder / "answer.json").exists():
        row = scheduler.poll([job_id]).live.get(job_id)
        state = f"{row.state} {row.reason}".strip() if row else "unknown to the controller"
        if row and row.state in ("FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "COMPLETED"):
            time.sleep(2)  # the spool may lag behind
            break
        time.sleep(0.5)
    words = " ".join(path.read_text(errors="replace") for path in sorted((folder / "slurm").glob("*.err"))).strip()
    if not (folder / "answer.json").exists():
        scheduler.ask(["scancel", job_id])
        text = f"the probe gave no answer in the spool; it is {state}; {words or 'no log'}"
        inside = cluster.container and cluster.container.split()[0] in words
        yield Finding("container" if inside else "node", "wrong", text)
        return
    if cluster.setup and words:
        yield Finding("setup", "beware", f"the batch script wrote to its error log: {words}")
    yield from _judge(cluster, json.loads((folder / "answer.json").read_text()), folder.name)


def _judge(cluster: Cluster, answer: dict, nonce: str) -> Iterator[Finding]:
    if answer["nonce"] != nonce:
        yield Finding("spool", "wrong", "the node answered another question: the spool is not the same folder there")
    yield Finding("node", "ok", f"{answer['node']} ran the probe and the spool is shared; {answer['cpus']} CPUs seen")
    missing = [name for name in NEEDED if not answer["packages"][name]]
    remedy = "; install the project there, or set python or container"
    text = f"python {answer['python']} at {answer['executable']}"
    yield Finding(
        "python", "wrong" if missing else "ok", text + (f" lacks {', '.join(missing)}{remedy}" if missing else "")
    )
    if cluster.container:
        yield Finding("container", "ok", f"python ran behind {cluster.container}")
    if cluster.gpus_per_node:
        given = f"a job that asks for one GPU sees {answer['gpus'] or 'none'} in CUDA_VISIBLE_DEVICES"
        yield Finding("gpus_per_node", "ok" if len(answer["gpus"]) == 1 else "wrong", given)
    for name, fault in answer["cache_folders"].items():
        yield Finding(f"cache_folders.{name}", "wrong" if fault else "ok", fault or "can be written on the node")
    if not answer["scheduler_answers_here"]:
        yield Finding("scontrol", "not checked", "not on the node's PATH: several nodes need names that resolve")


def _words(line: str) -> dict[str, str]:
    return dict(word.partition("=")[::2] for word in line.split() if "=" in word)


def _minutes(text: str) -> int:
    """'1-02:00:00' -> 1560; 0 for UNLIMITED."""
    days, _, rest = text.rpartition("-")
    parts = [int(part) for part in rest.split(":") if part.isdigit()]
    if not parts:
        return 0
    hours, minutes = (parts[0], parts[1]) if len(parts) == 3 else (0, parts[0])
    return (int(days) if days.isdigit() else 0) * 1440 + hours * 60 + minutes


def _gpus(gres: str) -> int:
    """'gpu:h200:8(S:0-1),nic:2' -> 8."""
    found = re.findall(r"(?:^|,)gpu(?::[\w.-]+)?:(\d+)", gres)
    return sum(int(count) for count in found)
