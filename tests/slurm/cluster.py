"""A real Slurm with several virtual nodes on one machine: started, broken on purpose, and stopped by the tests.

Owns the configuration files, the daemons and their process ids; everything lives below one folder. Needs root and
the packages `slurmctld slurmd slurm-client munge` (with accounting also `slurmdbd mariadb-server`).
By hand: `python -m tests.slurm.cluster up [NODES]`, then `export SLURM_CONF=...` as printed; `... down` ends it.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

CORE = ("slurmctld", "slurmd", "sbatch", "munged")
ACCOUNTING = ("slurmdbd", "mariadbd", "mariadb-install-db")

CONF = """\
ClusterName=lab
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
# cred_expire is also how long a requeued job must wait before it may start again; the default is two minutes
AuthInfo=socket={root}/munge.socket,cred_expire=5
CredType=cred/munge
EnforcePartLimits=NO
MpiDefault=none
SwitchType=switch/none
ProctrackType=proctrack/{track}
TaskPlugin=task/{task}
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU_Memory
SlurmdParameters=config_overrides
GresTypes=gpu
ReturnToService=2
StateSaveLocation={root}/state
SlurmdSpoolDir={root}/spool/%n
SlurmctldPidFile={root}/pid/slurmctld
SlurmdPidFile={root}/pid/slurmd.%n
SlurmctldLogFile={root}/log/slurmctld
SlurmdLogFile={root}/log/slurmd.%n
PlugStackConfig=/dev/null
SchedulerType=sched/backfill
SchedulerParameters=batch_sched_delay=0,sched_interval=2,sched_min_interval=0,bf_interval=2,requeue_delay=1
SlurmctldTimeout=30
SlurmdTimeout=10
InactiveLimit=0
MinJobAge={min_job_age}
KillWait=2
UnkillableStepTimeout=20
MaxArraySize=1001
JobRequeue=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
{accounting}
PartitionName=main Nodes=ALL Default=YES MaxTime=60 DefaultTime=5 State=UP PriorityTier=10
PartitionName=low Nodes=ALL MaxTime=60 DefaultTime=5 State=UP PriorityTier=1 PreemptMode=REQUEUE
PartitionName=scrap Nodes=ALL MaxTime=60 DefaultTime=5 State=UP PriorityTier=1 PreemptMode=CANCEL
PartitionName=short Nodes=ALL MaxTime=1 DefaultTime=1 State=UP PriorityTier=10
"""

WITH_DATABASE = """\
AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost=localhost
AccountingStoragePort={ports[1]}
# the munge socket; without it clients look for one in /run/munge
AccountingStoragePass={root}/munge.socket
AccountingStorageEnforce=associations,limits,qos
AccountingStorageTRES=gres/gpu
JobAcctGatherType=jobacct_gather/linux
JobAcctGatherFrequency=2"""

WITHOUT_DATABASE = "AccountingStorageType=accounting_storage/none\nJobAcctGatherType=jobacct_gather/none"

NODE = (
    "NodeName=n{i} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs={cpus} Boards=1 SocketsPerBoard=1 "
    "CoresPerSocket={cpus} ThreadsPerCore=1 RealMemory={memory} Gres=gpu:{gpus} State=UNKNOWN\n"
)

DATABASE_DAEMON = """\
AuthType=auth/munge
AuthInfo=socket={root}/munge.socket
DbdHost=localhost
DbdAddr=127.0.0.1
DbdPort={ports[1]}
SlurmUser=root
LogFile={root}/log/slurmdbd
PidFile={root}/pid/slurmdbd
StorageType=accounting_storage/mysql
StorageHost=127.0.0.1
StoragePort={ports[2]}
StorageUser=slurm
StoragePass=slurm
StorageLoc=slurm_acct
"""

# The cluster, an account and its user must exist before a job is accepted. One call: each one costs a second.
ACCOUNTS = """\
add cluster lab
add account acc Cluster=lab Description=acc Organization=lab
add qos tiny MaxWall=1 GrpTRES=cpu=4 Flags=DenyOnLimit
add user root Account=acc DefaultAccount=acc Cluster=lab AdminLevel=Admin
modify user root set qos=normal,tiny
quit
"""


def missing(accounting: bool = True) -> str:
    """Say what this machine lacks to start a cluster; '' when nothing."""
    if os.geteuid() != 0:
        return "a virtual cluster needs root"
    lacking = [name for name in CORE + (ACCOUNTING if accounting else ()) if shutil.which(name) is None]
    return f"not installed: {', '.join(lacking)}" if lacking else ""


def cgroup_memory_writable() -> bool:
    """Can job memory be limited by cgroup v1? Where it cannot, Slurm's own sampling kills instead."""
    probe = Path("/sys/fs/cgroup/memory/k3_probe")
    try:
        probe.mkdir()
        probe.rmdir()
    except OSError:
        return False
    return Path("/sys/fs/cgroup/freezer").is_dir()


@dataclass
class SlurmCluster:
    """One cluster: `up()` from nothing, `down()` to nothing, and the ways to break it in between."""

    root: Path
    nodes: int = 4
    accounting: bool = True
    cpus: int = 16
    memory: int = 8000
    gpus: int = 8
    min_job_age: int = 300

    def __post_init__(self) -> None:
        self.ports = free_ports(3 + self.nodes)
        self.conf = self.root / "slurm.conf"
        self.env = {**os.environ, "SLURM_CONF": str(self.conf)}
        self.cgroup = cgroup_memory_writable()
        self.database: subprocess.Popen | None = None

    # -- life --------------------------------------------------------------------------------------------------

    def up(self) -> SlurmCluster:
        """Start munge, the database, the controller and every node; return once all nodes are idle."""
        self._write()
        self._start_munge()
        if self.accounting:
            self._start_database()
            self.start_slurmdbd()
            self.run("sacctmgr", "-i", input=ACCOUNTS)
        self.start_slurmctld(fresh=True)
        for i in range(1, self.nodes + 1):
            self.start_node(i)
        self.wait(lambda: len(self.run("sinfo", "-hNt", "idle", "-pmain", "-o%N").split()) == self.nodes, 90)
        return self

    def down(self) -> None:
        """Cancel what runs, stop every daemon by its process id, and remove the folder."""
        with contextlib.suppress(Exception):
            for job in self.run("squeue", "-h", "-o%A", check=False).split():
                self.run("scancel", "-fs", "KILL", job, check=False)
        for name in ("slurmctld", *(f"slurmd.n{i}" for i in range(1, self.nodes + 1)), "slurmdbd"):
            self._stop(name)
        for pid in self._left_over():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for name in ("mariadbd", "munged"):
            self._stop(name, signal.SIGKILL)  # their data is thrown away
        if self.database is not None:
            self.database.wait()
        subprocess.run(["umount", "-l", self.root / "mysql"], stderr=subprocess.DEVNULL)
        shutil.rmtree(self.root, ignore_errors=True)

    def __enter__(self) -> SlurmCluster:
        try:
            return self.up()
        except BaseException:
            self.down()
            raise

    def __exit__(self, *exc) -> None:
        self.down()

    # -- commands ----------------------------------------------------------------------------------------------

    def run(self, *command: str, check: bool = True, input: str | None = None) -> str:
        """Run a Slurm command against this cluster; return its standard output."""
        done = subprocess.run(command, env=self.env, input=input, capture_output=True, text=True, timeout=60)
        if check and done.returncode:
            raise RuntimeError(f"{' '.join(command)}: exit {done.returncode}: {done.stderr.strip()}")
        return done.stdout

    def state(self, job: str) -> str:
        """The live state of a job by scontrol, '' when the controller has none."""
        words = self.run("scontrol", "-o", "show", "job", job, check=False).split()
        return next((word.split("=")[1] for word in words if word.startswith("JobState=")), "")

    def wait(self, done: Callable[[], bool], seconds: float) -> None:
        """Poll `done` until it holds; its failing commands count as not yet, and the last is told."""
        deadline, last = time.monotonic() + seconds, None
        while time.monotonic() < deadline:
            try:
                if done():
                    return
            except (RuntimeError, subprocess.TimeoutExpired) as error:
                last = error
            time.sleep(0.1)
        raise TimeoutError(f"not reached within {seconds} s; logs in {self.root / 'log'}; last fault: {last}")

    # -- breaking and mending ----------------------------------------------------------------------------------

    def start_node(self, i: int) -> None:
        stepd = shutil.which("slurmstepd") or shutil.which("slurmstepd-wlm") or "/usr/sbin/slurmstepd"
        self.run("slurmd", "-N", f"n{i}", "-f", str(self.conf), "-d", stepd)

    def kill_node(self, i: int) -> None:
        """A node dies: its daemon, then its step daemons before they can report, then what they started."""
        self._stop(f"slurmd.n{i}", signal.SIGKILL)
        jobs = self._left_over(f"n{i}")
        daemons = {daemon for job in jobs for daemon in _step_daemons_above(job)}
        for pid in [*daemons, *jobs]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def stop_slurmdbd(self) -> None:
        self._stop("slurmdbd")

    def start_slurmdbd(self) -> None:
        self.run("slurmdbd")
        self.wait(lambda: bool(self.run("sacctmgr", "-n", "list", "qos")), 30)

    def stop_slurmctld(self) -> None:
        self._stop("slurmctld")

    def start_slurmctld(self, fresh: bool = False) -> None:
        """Start the controller; `fresh` forgets every job, so that job ids begin at 1 again."""
        if fresh:
            shutil.rmtree(self.root / "state", ignore_errors=True)
            (self.root / "state").mkdir()
        self.run("slurmctld", "-f", str(self.conf), *(["-i"] if fresh else []))
        self.wait(lambda: "UP" in self.run("scontrol", "ping"), 30)

    # -- plumbing ----------------------------------------------------------------------------------------------

    def _write(self) -> None:
        for name in ("state", "pid", "log", "dev", "mysql", *(f"spool/n{i}" for i in range(1, self.nodes + 1))):
            (self.root / name).mkdir(parents=True)
        self.root.chmod(0o755)
        host = socket.gethostname().split(".")[0]
        values = {"root": self.root, "ports": self.ports, "host": host, "min_job_age": self.min_job_age}
        values |= {"track": "cgroup", "task": "cgroup"} if self.cgroup else {"track": "linuxproc", "task": "none"}
        accounting = (WITH_DATABASE if self.accounting else WITHOUT_DATABASE).format(**values)
        if not self.cgroup:
            accounting += "\nJobAcctGatherParams=OverMemoryKill"
        sizes = {"cpus": self.cpus, "memory": self.memory, "gpus": self.gpus, "host": host}
        nodes = [NODE.format(i=i, port=self.ports[2 + i], **sizes) for i in range(1, self.nodes + 1)]
        head, partitions = CONF.format(accounting=accounting, **values).split("PartitionName", 1)
        self.conf.write_text(head + "".join(nodes) + "PartitionName" + partitions)
        # A GPU needs a device file; copies of the null device will do, for only their indexes matter.
        devices = [self._device(i) for i in range(self.gpus)]
        lines = [f"NodeName=n{i} Name=gpu File={d}\n" for i in range(1, self.nodes + 1) for d in devices]
        (self.root / "gres.conf").write_text("".join(lines))
        limits = "ConstrainRAMSpace=yes\nConstrainSwapSpace=no\n" if self.cgroup else ""
        # Naming version 1 skips a detection that fails where no cgroup file system is mounted.
        (self.root / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n" + limits)
        daemon = self.root / "slurmdbd.conf"
        daemon.write_text(DATABASE_DAEMON.format(**values))
        daemon.chmod(0o600)

    def _device(self, i: int) -> Path:
        path = self.root / "dev" / f"nvidia{i}"
        os.mknod(path, 0o20666, os.makedev(1, 3))
        return path

    def _start_munge(self) -> None:
        key = self.root / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)
        files = {"key-file": key, "socket": self.root / "munge.socket", "pid-file": self.root / "pid/munged"}
        files |= {"log-file": self.root / "log/munged", "seed-file": self.root / "munge.seed"}
        self.run("munged", "--force", "--num-threads=10", *(f"--{name}={path}" for name, path in files.items()))

    def _start_database(self) -> None:
        data, sock = self.root / "mysql/data", self.root / "mysql/s"
        # In memory where that is allowed: on a slow disk the set-up takes ten seconds longer.
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=512m", "k3slurm", data.parent], stderr=subprocess.DEVNULL)
        self.run("mariadb-install-db", "--no-defaults", "--user=root", f"--datadir={data}", "--skip-test-db",
                 "--auth-root-authentication-method=normal", "--innodb-log-file-size=8M")  # fmt: skip
        server = ["mariadbd", "--no-defaults", "--user=root", f"--datadir={data}", f"--socket={sock}",
                  f"--pid-file={self.root}/pid/mariadbd", "--bind-address=127.0.0.1", f"--port={self.ports[2]}",
                  "--innodb-buffer-pool-size=32M", "--innodb-log-file-size=8M", "--innodb-flush-method=nosync",
                  "--innodb-lock-wait-timeout=900", "--performance-schema=OFF", "--skip-name-resolve"]  # fmt: skip
        with open(self.root / "log/mariadbd", "wb") as log:
            self.database = subprocess.Popen(
                server, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
        user = "slurm@'127.0.0.1'"
        words = f"create database slurm_acct; create user {user} identified by 'slurm'; "
        words += f"grant all on slurm_acct.* to {user};"
        client = ["mariadb", "--no-defaults", "-uroot", "-S", str(sock), "-e"]
        self.wait(lambda: bool(self.run(*client, "select 1")), 30)
        self.run(*client, words)

    def _stop(self, name: str, how: signal.Signals = signal.SIGTERM, seconds: float = 15) -> None:
        """Stop the daemon whose id is in pid/NAME; one that does not listen is killed."""
        try:
            pid = int((self.root / "pid" / name).read_text())
            os.kill(pid, how)
        except (OSError, ValueError):
            return
        deadline = time.monotonic() + seconds
        while _alive(pid):
            if time.monotonic() > deadline:
                os.kill(pid, signal.SIGKILL)
            time.sleep(0.05)

    def _left_over(self, node: str = "") -> list[int]:
        """Step daemons and job processes of this cluster (of one node): known by SLURM_CONF in their environment."""
        mark = f"SLURM_CONF={self.conf}"
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                words = (folder / "environ").read_bytes().decode(errors="replace").split("\0")
                command = (folder / "cmdline").read_bytes().decode(errors="replace")
                job = mark in words and any(word.startswith("SLURM_JOB_ID=") for word in words)
                step = command.startswith("slurmstepd") and mark in words
                if (job and (not node or f"SLURMD_NODENAME={node}" in words)) or (step and not node):
                    found.append(int(folder.name))
        return [pid for pid in found if pid != os.getpid()]


def _step_daemons_above(pid: int) -> list[int]:
    """The slurmstepd processes among a process's ancestors."""
    found = []
    with contextlib.suppress(OSError):
        while pid > 1:
            name, _, rest = Path(f"/proc/{pid}/stat").read_text().partition("(")[2].rpartition(")")
            if name.startswith("slurmstepd"):
                found.append(pid)
            pid = int(rest.split()[1])
    return found


def _alive(pid: int) -> bool:
    """A zombie counts as gone: a container's first process may reap it late."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def free_ports(count: int) -> list[int]:
    """Ports nobody listens on now, all different."""
    socks = [socket.socket() for _ in range(count)]
    for sock in socks:
        sock.bind(("127.0.0.1", 0))
    ports = [sock.getsockname()[1] for sock in socks]
    for sock in socks:
        sock.close()
    return ports


def main(argv: list[str]) -> int:
    """up [NODES] | down: one cluster below the temporary folder, for use by hand."""
    root = Path(tempfile.gettempdir()) / "k3-slurm"
    if argv[:1] == ["up"]:
        lack = missing()
        if lack:
            print(lack, file=sys.stderr)
            return 2
        cluster = SlurmCluster(root, nodes=int(argv[1]) if argv[1:] else 4).up()
        print(f"export SLURM_CONF={cluster.conf}")
    elif argv[:1] == ["down"]:
        SlurmCluster(root, nodes=len(list((root / "spool").glob("n*")))).down()
    else:
        print(main.__doc__, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
