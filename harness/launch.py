"""The launcher: one per node. Starts the local ranks, watches them, and ends them all within seconds of a fault.

It writes launch.json, with each rank's exit code and the fault to blame. It never judges a test: that is the
ledger's work, from the ranks' own records.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

from harness import beat, process
from harness.blame import Watched, find_fault, first, hung
from harness.enter import free_port
from harness.revision import search_path
from harness.spec import Fault, JobSpec, LaunchRecord, load, store

POLL_S = 0.02
START_UP_S = 120.0  # while ranks import, the first to be ready wait for the last: that is no hang
SETTLE_S = 0.1  # a rank that dies takes its peers along: collect who went first before blaming
EXIT_FAULT = 3
STOPPING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR2)
# What would change which tests run, which asserts hold, or which code is imported.
DROPPED = ("PYTEST_", "PYTHON", "COV_", "COVERAGE_", "TORCHELASTIC_", "TRITON_CACHE", "TORCHINDUCTOR_CACHE")


@dataclass
class Launch:
    """One attempt at one job on this node."""

    job_dir: Path
    attempt: int
    spec: JobSpec
    node_rank: int = 0
    nodes: int = 1
    ranks: list[Watched] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)
    stop_signal: int = 0
    started_at: float = field(default_factory=time.time)

    @property
    def folder(self) -> Path:
        """Where this attempt's records go."""
        return self.job_dir / "attempts" / str(self.attempt)

    @property
    def report_path(self) -> Path:
        """The launcher's own record; the other nodes' carry their number."""
        return self.folder / ("launch.json" if self.node_rank == 0 else f"launch{self.node_rank}.json")

    def run(self) -> int:
        """Launch, watch, stop, report. Returns 0, 1 (tests did not all pass) or 3 (a fault)."""
        self.folder.mkdir(parents=True, exist_ok=True)
        if self.report_path.exists():
            raise FileExistsError(f"{self.report_path} exists: attempt {self.attempt} already ran; use the next number")
        for number in STOPPING:
            signal.signal(number, self._on_signal)
        self._report()
        beats = Path(tempfile.mkdtemp(prefix="k3-beat-"))
        pipe = process.guard()
        try:
            self._start(beats, pipe)
            self._watch()
        finally:
            self._stop()
            os.write(pipe, b"done")
            shutil.rmtree(beats, ignore_errors=True)
        return self._finish()

    def _on_signal(self, number, _frame):
        self.stop_signal = number

    def _start(self, beats: Path, pipe: int) -> None:
        local = self.spec.topology.ranks // self.nodes
        for index in range(local):
            rank = self.node_rank * local + index
            env = rank_environment(self.spec, self.job_dir, rank=rank, local_rank=index, local=local)
            env |= {"K3_ATTEMPT": str(self.attempt), "K3_BEAT": str(beats / f"rank{rank}")}
            command = [sys.executable, "-m", "harness.job", str(self.job_dir), f"--attempt={self.attempt}"]
            with open(self.folder / f"rank{rank}.log", "ab") as log:
                child = subprocess.Popen(
                    [*command, f"--rank={rank}"], env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                    start_new_session=True, cwd=self.job_dir.parent.parent / "snapshot",
                )  # fmt: skip
            os.write(pipe, f"{child.pid} ".encode())
            self.ranks.append(Watched(rank, child, self.folder / f"rank{rank}.jsonl", beats / f"rank{rank}"))

    def _watch(self) -> None:
        """Until every rank ended by itself, or a fault is found."""
        last = time.time()
        while not self.faults and any(rank.code is None for rank in self.ranks):
            time.sleep(POLL_S)
            if (now := time.time()) - last > 5:  # we were suspended ourselves: silence then proves nothing
                for rank in self.ranks:
                    rank.forgive(now - last)
            last = now
            self._look(now)

    def _look(self, now: float) -> None:
        for rank in self.ranks:
            rank.look(now)
            rank.event_at = now if self._starting(now) else rank.event_at
        found = [fault for rank in self.ranks if (fault := find_fault(rank, self.spec, now))]
        kinds = {fault.kind for fault in found}
        if kinds == {"stalled"}:
            found = hung(self.ranks, "stalled", f"no progress for {self.spec.stall_s:g} s", now)
        elif kinds - {"stopped", "silent", "stalled"}:
            time.sleep(SETTLE_S)
            found = [fault for fault in found if fault.kind != "stalled"]
        self.faults += found or self._own_faults(now)

    def _starting(self, now: float) -> bool:
        """Whether some rank has yet to come to its first test."""
        begun = all(rank.begun or rank.code is not None for rank in self.ranks)
        return not begun and now - self.started_at < START_UP_S

    def _own_faults(self, now: float) -> list[Fault]:
        """Faults of the job as a whole: told to stop, out of time, another node in trouble."""
        if self.stop_signal:
            name = process.signal_name(self.stop_signal)
            return [Fault(kind="terminated", rank=-1, text=f"the job was told to stop by {name}", time=now)]
        if now - self.started_at > self.spec.timeout_s:
            return hung(self.ranks, "timeout", f"the job's limit of {self.spec.timeout_s:g} s is over", now)
        others = [path for path in self.folder.glob("stop.*") if path.name != f"stop.{self.node_rank}"]
        text = "node {} reported a fault; see its launch record"
        return [Fault(kind="peer_node", rank=-1, text=text.format(path.suffix[1:]), time=now) for path in others]

    def _stop(self) -> None:
        """End whatever still runs: stacks into the log, then SIGTERM, then SIGKILL; nothing of any rank survives."""
        if self.faults and self.nodes > 1:
            (self.folder / f"stop.{self.node_rank}").touch()
        running = [rank for rank in self.ranks if rank.code is None]
        if any(fault.kind in ("stalled", "silent", "timeout") for fault in self.faults):
            _dump_stacks(running)
        for rank in running:
            process.kill_group(rank.child.pid, signal.SIGTERM)
        deadline = time.time() + self.spec.grace_s
        while time.time() < deadline and any(process.peek(rank.child.pid) is None for rank in running):
            time.sleep(POLL_S)
        for rank in self.ranks:
            process.kill_group(rank.child.pid, signal.SIGKILL)
            rank.ended_by_us = rank in running
            rank.code = rank.child.wait()

    def _finish(self) -> int:
        clean = not self.faults and all(rank.code == 0 for rank in self.ranks)
        code = EXIT_FAULT if self.faults else 0 if clean else 1
        self._report(code)
        if self.faults:
            print(f"{self.spec.job}: {first(self.faults).text}", file=sys.stderr)
        return code

    def _report(self, exit_code: int | None = None) -> None:
        pid = os.getpid()
        codes = {str(rank.number): rank.code for rank in self.ranks if rank.code is not None}
        store(
            self.report_path,
            LaunchRecord(
                run=self.spec.run, nonce=self.spec.nonce, job=self.spec.job, attempt=self.attempt,
                node=node_name(), node_rank=self.node_rank, pid=pid, pid_started=process.started(pid),
                started_at=self.started_at, ended_at=None if exit_code is None else time.time(), exit_code=exit_code,
                exit_codes=codes, fault=first(self.faults), faults=tuple(self.faults),
            ),
        )  # fmt: skip


def rank_environment(spec: JobSpec, job_dir: Path, *, rank: int, local_rank: int, local: int) -> dict[str, str]:
    """The environment of one rank: the caller's, less what could change the meaning of a test, plus the rendezvous."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(DROPPED)}
    env.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // local)))
    env.setdefault("MASTER_ADDR", "127.0.0.1")
    if spec.topology.nodes == 1:
        env.setdefault("GLOO_SOCKET_IFNAME", "lo")
    snapshot = job_dir.parent.parent / "snapshot"
    env |= {
        "RANK": str(rank), "WORLD_SIZE": str(spec.topology.ranks), "LOCAL_RANK": str(local_rank),
        "LOCAL_WORLD_SIZE": str(local), "K3_JOB": spec.job, "K3_RUN": spec.run, "K3_LAUNCHER": str(os.getpid()),
        "K3_DEVICE": spec.topology.device, "K3_SABOTAGE": spec.sabotage, "PYTHONPATH": search_path(snapshot),
        "PYTHONDONTWRITEBYTECODE": "1", "PYTHONUNBUFFERED": "1", "PYTHONHASHSEED": "0",
    }  # fmt: skip
    return env | json.loads(env.pop("K3_SITE_ENV", "{}")) | spec.env


def node_name() -> str:
    """The scheduler's name for this node, else the host's."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


def _dump_stacks(ranks: list[Watched]) -> None:
    """Ask each rank for its stacks (harness.job answers SIGUSR1 by writing them to its log)."""
    for rank in ranks:
        if beat.read(rank.beat_path) is not None:
            os.kill(rank.child.pid, signal.SIGUSR1)
    time.sleep(SETTLE_S)


def main(arguments: list[str] | None = None) -> int:
    """`python -m harness.launch JOB_DIR --attempt N`, run on each node of the job."""
    parser = argparse.ArgumentParser(prog="harness.launch")
    parser.add_argument("job_dir", type=Path)
    parser.add_argument("--attempt", type=int, required=True)
    options = parser.parse_args(arguments)
    process.die_with_parent(os.getppid(), signal.SIGTERM)
    job_dir = options.job_dir.resolve()
    nodes = int(os.environ.get("K3_NODES", "1"))
    if nodes == 1:
        os.environ["MASTER_PORT"] = str(free_port("127.0.0.1"))
    spec = load(job_dir / "spec.json", JobSpec)
    launch = Launch(job_dir, options.attempt, spec, node_rank=int(os.environ.get("K3_NODE_RANK", "0")), nodes=nodes)
    return launch.run()


if __name__ == "__main__":
    sys.exit(main())
