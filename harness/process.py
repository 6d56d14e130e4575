"""Linux process facts that launching needs: who started when, who is stopped, and dying with one's parent."""

from __future__ import annotations

import ctypes
import os
import signal

PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int, number: int = signal.SIGKILL) -> None:
    """Have the kernel send `number` when the parent ends; leave at once if it already has."""
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, number, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed; ranks could outlive their launcher")
    if os.getppid() != parent:
        os._exit(128 + number)


def state(pid: int) -> str:
    """The kernel's state letter (R, S, D, T, Z ...), '' when there is no such process."""
    fields = _stat(pid)
    return fields[0] if fields else ""


def started(pid: int) -> int:
    """Start time in clock ticks since boot: with the pid it names one process for ever. 0 when there is none."""
    fields = _stat(pid)
    return int(fields[19]) if fields else 0


def alive(pid: int, start: int) -> bool:
    """Whether that very process still runs (a zombie does not)."""
    return started(pid) == start and state(pid) not in ("", "Z", "X")


def signal_name(number: int) -> str:
    """SIGKILL for 9, and so on."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def peek(pid: int) -> int | None:
    """Exit code of an own child (negative: its signal) without reaping it, so that its pid is not reused."""
    found = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    if found is None:
        return None
    return found.si_status if found.si_code == os.CLD_EXITED else -found.si_status


def kill_group(pid: int, number: int) -> None:
    """Signal a whole process group that may have gone."""
    try:
        os.killpg(pid, number)
    except ProcessLookupError:
        return


def guard() -> int:
    """Fork a guard and return the write end of its pipe: groups written there die when the pipe closes unsaid.

    The guard covers what PR_SET_PDEATHSIG cannot: the children of ranks, when the launcher itself is killed.
    """
    read_end, write_end = os.pipe()
    if os.fork():
        os.close(read_end)
        return write_end
    os.setsid()
    os.close(write_end)
    _keep(read_end)
    os._exit(0)


def _keep(read_end: int) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    with os.fdopen(read_end) as pipe:
        words = pipe.read().split()
    if "done" not in words:
        for word in words:
            kill_group(int(word), signal.SIGKILL)


def _stat(pid: int) -> list[str]:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return []
