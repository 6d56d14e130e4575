"""Run one test body on several ranks: forked here under plain pytest, in place inside a harness job.

A body marked `@pytest.mark.ranks(n)` sees an initialised process group of n ranks with a short time-out. Under plain
pytest every test forks n fresh gloo ranks from this process (torch is already imported, so a test costs about 0.1 s).
Inside a job (K3_JOB set, WORLD_SIZE=n) the launcher's own ranks run the body, with a fresh group per test so that a
failed test cannot poison the next one. `run_forked` is also used directly by the fault suites.
"""

from __future__ import annotations

import functools
import itertools
import os
import pickle
import select
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta

import pytest

GROUP_TIMEOUT_S = 30.0
GRACE_S = 3.0
_GROUPS = itertools.count()  # a timed test runs twice: its second group must not find keys of the first
PEER_ERRORS = ("Connection closed by peer", "Connection reset by peer", "timed out", "Timed out", "Broken pipe")


@dataclass(frozen=True)
class RankOutcome:
    """How one forked rank ended. `status`: passed, raised, skipped, died or hung; `after_s` since the start."""

    rank: int
    status: str
    detail: str
    after_s: float

    @property
    def is_consequence(self) -> bool:
        """Whether the rank only noticed that a peer was gone or silent."""
        return self.status == "raised" and any(text in self.detail for text in PEER_ERRORS)


def blame(outcomes: list[RankOutcome]) -> RankOutcome | None:
    """Return the outcome that caused a failure: a dead or raising rank first, else a hung one, else the earliest."""
    bad = [outcome for outcome in outcomes if outcome.status in ("raised", "died", "hung")]
    causes = [outcome for outcome in bad if not outcome.is_consequence and outcome.status != "hung"]
    hung = [outcome for outcome in bad if outcome.status == "hung"]
    return min(causes or hung or bad, key=lambda outcome: outcome.after_s, default=None)


def run_forked(body: Callable[[], None], ranks: int, timeout_s: float = GROUP_TIMEOUT_S) -> list[RankOutcome]:
    """Fork `ranks` gloo ranks, run `body` on each, and return how each ended.

    A collective waits at most `timeout_s`. Once a rank has failed its peers get that time plus a grace to notice; a
    rank still running then is `hung` and is killed.
    """
    folder = tempfile.mkdtemp(prefix="k3-ranks-")
    started = time.monotonic()
    children = {rank: _fork(body, rank, ranks, folder, timeout_s) for rank in range(ranks)}
    try:
        return _watch(children, started, timeout_s)
    finally:
        for pid, _ in children.values():
            _kill(pid)
        shutil.rmtree(folder, ignore_errors=True)


def require_passed(outcomes: list[RankOutcome]) -> None:
    """Raise AssertionError with the blamed rank first when any rank failed; skip when every rank skipped."""
    if all(outcome.status == "skipped" for outcome in outcomes):
        pytest.skip(outcomes[0].detail)
    culprit = blame(outcomes)
    if culprit is not None:
        summary = ", ".join(f"rank {outcome.rank} {outcome.status}" for outcome in outcomes)
        raise AssertionError(f"rank {culprit.rank} {culprit.status} ({summary})\n{culprit.detail}")
    assert {outcome.status for outcome in outcomes} == {"passed"}, outcomes


def _fork(body, rank: int, ranks: int, folder: str, timeout_s: float) -> tuple[int, int]:
    """Start one rank; return its pid and the pipe its outcome comes through."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reader)
        _child(body, rank, ranks, folder, timeout_s, writer)
    os.close(writer)
    return pid, reader


def _child(body, rank: int, ranks: int, folder: str, timeout_s: float, writer: int) -> None:
    """Run the body on this rank, report through the pipe, and leave without the parent's exit handlers."""
    import torch

    torch.set_num_threads(1)  # more than one thread after a fork can hang
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_RANK=str(rank))
    try:
        _with_group(body, _file_store(folder, ranks), rank, ranks, "gloo", timeout_s)
        report = ("passed", "")
    except pytest.skip.Exception as skipped:
        report = ("skipped", str(skipped))
    except BaseException:
        report = ("raised", traceback.format_exc())
    os.write(writer, pickle.dumps(report)[:60000])
    os._exit(0)


def _file_store(folder: str, ranks: int):
    import torch.distributed as dist

    return dist.FileStore(os.path.join(folder, "store"), ranks)


def _with_group(body, store, rank: int, ranks: int, backend: str, timeout_s: float) -> None:
    """Run the body inside a fresh process group, with a barrier after its start and before its end.

    The group is not bound to the rank's GPU: meshes would split a bound one, and the second such split of a process
    crashes in torch 2.11. NCCL takes the current device instead, which `device` sets.
    """
    import torch.distributed as dist

    if backend == "nccl":
        device()
    timeout = timedelta(seconds=timeout_s)
    dist.init_process_group(backend, store=store, rank=rank, world_size=ranks, timeout=timeout)
    try:
        dist.barrier()
        body()
        dist.barrier()
    finally:
        _forget_meshes()
        dist.destroy_process_group()


def _forget_meshes() -> None:
    """Clear what DTensor remembers: it keeps meshes, equal to those of the next test, whose groups are about to go."""
    if "torch.distributed.tensor" not in sys.modules:
        return
    from torch.distributed.tensor import _redistribute, debug

    debug._clear_sharding_prop_cache()
    getattr(_redistribute, "clear_redistribute_planner_cache", lambda: None)()
    getattr(_redistribute._gen_transform_infos, "cache_clear", lambda: None)()


def _watch(children: dict[int, tuple[int, int]], started: float, timeout_s: float) -> list[RankOutcome]:
    """Collect outcomes until all ranks ended, or until the peers of a failed rank had their time."""
    outcomes: dict[int, RankOutcome] = {}
    deadline = started + 10 * timeout_s
    while len(outcomes) < len(children) and time.monotonic() < deadline:
        waiting = {reader: rank for rank, (_, reader) in children.items() if rank not in outcomes}
        for reader in select.select(list(waiting), [], [], 0.05)[0]:
            rank = waiting[reader]
            outcomes[rank] = _outcome(rank, *children[rank], time.monotonic() - started)
            if outcomes[rank].status in ("raised", "died"):
                grace = GRACE_S if outcomes[rank].is_consequence else timeout_s + GRACE_S
                deadline = min(deadline, time.monotonic() + grace)
    for rank in set(children) - set(outcomes):
        outcomes[rank] = RankOutcome(rank, "hung", "still running when its peers had ended", time.monotonic() - started)
    return [outcomes[rank] for rank in sorted(outcomes)]


def _outcome(rank: int, pid: int, reader: int, after_s: float) -> RankOutcome:
    """Read a rank's report; an empty pipe means that it died, and the exit status says how."""
    data = b""
    while piece := os.read(reader, 65536):
        data += piece
    os.close(reader)
    _, status = os.waitpid(pid, 0)
    if data:
        return RankOutcome(rank, *pickle.loads(data), after_s)
    code = os.waitstatus_to_exitcode(status)
    cause = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
    return RankOutcome(rank, "died", f"ended by {cause} without a report", after_s)


def _kill(pid: int) -> None:
    """Kill and reap one of our own children, if it still runs."""
    try:
        if os.waitpid(pid, os.WNOHANG) == (0, 0):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    except ChildProcessError:
        return


# --- inside a harness job -----------------------------------------------------------------------------------------


def in_job() -> bool:
    """Whether this process is a rank of a harness job."""
    return "K3_JOB" in os.environ


@functools.cache
def _job_store():
    """Return the job's own store, hosted by rank 0 at the launcher's address."""
    import torch.distributed as dist

    return dist.TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        int(os.environ["WORLD_SIZE"]),
        is_master=os.environ["RANK"] == "0",
        timeout=timedelta(seconds=GROUP_TIMEOUT_S),
    )


def run_in_place(body: Callable[[], None], ranks: int, name: str, timeout_s: float = GROUP_TIMEOUT_S) -> None:
    """Run the body on this rank of a job, in a fresh process group named after the test."""
    import torch.distributed as dist

    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if world != ranks:
        raise RuntimeError(
            f"a body for {ranks} ranks was planned on {world}; give its claim a topology of {ranks} ranks"
        )
    backend = "gloo" if world == 1 else os.environ["K3_BACKEND"]
    store = dist.HashStore() if world == 1 else dist.PrefixStore(f"{name}/{next(_GROUPS)}", _job_store())
    _with_group(body, store, rank, world, backend, timeout_s)


def _observed(item, body) -> None:
    """Tell the recorder which transport the group itself names, then run the body."""
    import torch.distributed as dist

    item.config.hook.pytest_k3_transport(item=item, backend=dist.get_backend())
    body()


def device():
    """Return the device of this rank: its GPU over nccl or with K3_DEVICE=cuda, else the CPU."""
    import torch

    if os.environ.get("K3_DEVICE") == "cuda" or os.environ.get("K3_BACKEND") == "nccl":
        index = int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count()
        torch.cuda.set_device(index)
        return torch.device("cuda", index)
    return torch.device("cpu")


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem):
    """Run bodies marked `ranks(n)` on n ranks; leave every other test to pytest."""
    marker = pyfuncitem.get_closest_marker("ranks")
    if marker is None:
        return None
    ranks, timeout_s = marker.args[0], marker.kwargs.get("timeout_s", GROUP_TIMEOUT_S)
    arguments = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}
    body = functools.partial(pyfuncitem.obj, **arguments)
    if in_job():
        run_in_place(functools.partial(_observed, pyfuncitem, body), ranks, pyfuncitem.nodeid, timeout_s)
    else:
        require_passed(run_forked(body, ranks, timeout_s))
    return True
