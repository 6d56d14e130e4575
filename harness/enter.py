"""What Slurm starts on a node: finds its order, settles attempt number and rendezvous, becomes the launcher.

Runs from inside the snapshot with nothing but the standard library, once per node (or once per rank when the profile
says so). A start that the scheduler repeats by itself is an attempt of its own: the first task takes the next free
number, and tells the others through the spool.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import socket
import subprocess
import sys
import time
from pathlib import Path

WAIT_S = 120.0
EX_UNAVAILABLE = 69
EX_IOERR = 74
# Left by a surrounding job or an earlier one, and not meant for this one.
LEAKS = ("TRITON_CACHE", "TORCHINDUCTOR_CACHE", "TORCH_EXTENSIONS_DIR", "CUDA_CACHE_PATH", "TORCHELASTIC_")
RENDEZVOUS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
PORTS = (12000, 30000)
PRIVATE_CACHES = ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")


def main(arguments: list[str]) -> int:
    """`python -m harness.enter FOLDER`: FOLDER holds table.json. Becomes the launcher when all is well."""
    folder = Path(arguments[0])
    table = json.loads((folder / "table.json").read_text())
    order = table["orders"][int(os.environ.get("SLURM_ARRAY_TASK_ID", "0"))]
    run_dir = folder.parent.parent
    job_dir = run_dir / "jobs" / order["job"]
    try:
        claim = settle(job_dir, order["attempt"])
    except OSError as error:
        print(f"cannot use the spool {job_dir}: {error}", file=sys.stderr)
        return EX_IOERR
    if claim is None:
        print(f"the first task did not say where it is within {WAIT_S:g} s", file=sys.stderr)
        return EX_UNAVAILABLE
    become_launcher(run_dir, job_dir, claim, environment(table, claim, job_dir))
    return 0


def become_launcher(run_dir: Path, job_dir: Path, claim: dict, env: dict[str, str]) -> None:
    """Replace this process, so that signals and the exit code are the launcher's own."""
    command = [sys.executable, "-m", "harness.launch", str(job_dir), "--attempt", str(claim["attempt"])]
    os.chdir(run_dir / "snapshot")
    os.execve(sys.executable, command, env)


def settle(job_dir: Path, attempt: int) -> dict | None:
    """Agree on the attempt's number and on where rank 0 listens: the first task decides, the others read it."""
    restart = int(os.environ.get("SLURM_RESTART_COUNT") or "0")
    place = job_dir / "claims" / f"{os.environ['SLURM_JOB_ID']}.{restart}.place"
    if os.environ.get("SLURM_PROCID", "0") == "0":
        number = attempt if restart == 0 else claim_number(job_dir, os.environ["SLURM_JOB_ID"], restart)
        claim = {"attempt": number, "address": address(), "port": free_port(), "node": node_name()}
        publish(place, claim)
        return claim
    deadline = time.monotonic() + WAIT_S
    while time.monotonic() < deadline:
        if place.exists():
            return json.loads(place.read_text())
        time.sleep(0.05)
    return None


def claim_number(job_dir: Path, raw_id: str, restart: int) -> int:
    """The number of a start that the scheduler repeated: node and collector both ask here, the first one sets it."""
    path = job_dir / "claims" / f"{raw_id}.{restart}.number"
    if path.exists():
        return int(path.read_text())
    path.parent.mkdir(parents=True, exist_ok=True)
    number = next_number(job_dir)
    partial = path.with_name(f".{path.name}.{socket.gethostname()}.{os.getpid()}")
    partial.write_text(str(number))
    try:
        os.link(partial, path)  # fails where the other was first
    except FileExistsError:
        (job_dir / "attempts" / str(number)).rmdir()
    finally:
        partial.unlink()
    return int(path.read_text())


def next_number(job_dir: Path) -> int:
    """Take the next free attempt number; making its folder is the claim."""
    attempts = job_dir / "attempts"
    attempts.mkdir(parents=True, exist_ok=True)
    number = max((int(path.name) for path in attempts.iterdir() if path.name.isdigit()), default=-1) + 1
    while True:
        try:
            (attempts / str(number)).mkdir()
            return number
        except FileExistsError:
            number += 1


def publish(path: Path, value: dict) -> None:
    """Write a small JSON file whole: temporary name, fsync, rename."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    with open(partial, "w") as file:
        json.dump(value, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)


def node_name() -> str:
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


def address() -> str:
    """Where the other nodes reach this one: its name where that resolves, else the address the scheduler has for it."""
    name = node_name()
    try:
        socket.getaddrinfo(name, None)
        return name
    except OSError:
        return scheduler_address(name) or socket.gethostname()


def scheduler_address(node: str) -> str:
    """NodeAddr of a node, '' when the scheduler cannot be asked from here."""
    try:
        done = subprocess.run(["scontrol", "-o", "show", "node", node], capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    words = dict(word.partition("=")[::2] for word in done.stdout.split())
    return words.get("NodeAddr", "")


def free_port(host: str = "") -> int:
    """A TCP port that nothing listens on now, below those that systems give to outgoing connections meanwhile."""
    for _ in range(100):
        with socket.socket() as probe, contextlib.suppress(OSError):
            port = random.SystemRandom().randrange(*PORTS)
            probe.bind((host, port))
            return port
    raise OSError(f"no free port found from {PORTS[0]} to {PORTS[1]}")


def environment(table: dict, claim: dict, job_dir: Path) -> dict[str, str]:
    """The launcher's environment: the site's, less what leaked in, plus the profile's and the rendezvous."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(LEAKS) and name not in RENDEZVOUS}
    tasks = int(env.get("SLURM_STEP_NUM_TASKS") or env.get("SLURM_NTASKS") or "1")
    env |= {
        "K3_NODES": str(tasks), "K3_NODE_RANK": env.get("SLURM_PROCID", "0"),
        "MASTER_ADDR": claim["address"] if tasks > 1 else "127.0.0.1", "MASTER_PORT": str(claim["port"]),
    }  # fmt: skip
    site = {**private_caches(job_dir, claim["attempt"]), **expanded(table["cache_folders"], job_dir)}
    site |= table["environment"]
    path = [str(job_dir.parent.parent / "snapshot"), site.pop("PYTHONPATH", ""), env.get("PYTHONPATH", "")]
    return {**env, **site, "PYTHONPATH": os.pathsep.join(filter(None, path)), "K3_SITE_ENV": json.dumps(site)}


def private_caches(job_dir: Path, attempt: int) -> dict[str, str]:
    """Compiler caches of this attempt alone, for whatever the profile does not place on purpose."""
    cache = job_dir / "attempts" / str(attempt) / "cache"
    return {name: str(cache / name.lower()) for name in PRIVATE_CACHES}


def expanded(folders: dict[str, str], job_dir: Path) -> dict[str, str]:
    """The profile's cache folders with {run}, {job} and the node's variables filled in."""
    places = {"{run}": job_dir.parent.parent.name, "{job}": job_dir.name}
    found = {}
    for name, folder in folders.items():
        for mark, value in places.items():
            folder = folder.replace(mark, value)
        found[name] = os.path.expandvars(os.path.expanduser(folder))
    return found


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
