"""One look at a Slurm run: asks the scheduler once for all jobs, joins its answers with our launchers' reports.

Owns jobs/<job>/watch.json (what is known so far) and jobs/<job>/job.json (the final record), both written whole.
A look may be interrupted at any point and taken again, from another shell or machine that sees the spool.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from harness import journal, scheduler, slurm
from harness.classify import FINAL, NEVER, NOT_RETRIED, Word, attempt_of, classify, merge
from harness.cluster import Cluster
from harness.enter import claim_number, next_number
from harness.journal import Group, Order
from harness.scheduler import Poll, Row
from harness.spec import JobSpec, LaunchRecord, load, store
from harness.spool import job_dirs
from ledger.record import Answer, Attempt, JobRecord, SchemaError

SPOOL_LAG_S = 5.0  # a report may reach a shared file system after the scheduler's word
OPEN_PATIENCE_S = 15.0  # before an unanswered submission is tried again
NEVER_PATIENCE_S = 30.0  # before a job that can never start is cancelled
SPEAKING = ("completed", "failed", "launch_failed")  # states whose meaning depends on our own report
NO_ACCOUNTING = "this cluster keeps no accounting (sacct is disabled), so nothing confirms what ran: T0 at most"


@dataclass
class View:
    """What is known of one job now. `settled`: nothing more is expected; `retry`: a new attempt is due."""

    spec: JobSpec
    attempts: list[Attempt] = field(default_factory=list)
    settled: bool = False
    retry: bool = False
    note: str = ""
    answers: tuple[Answer, ...] = ()

    @property
    def state(self) -> str:
        return self.attempts[-1].state if self.attempts else "unknown"


@dataclass
class Progress:
    """The outcome of one look."""

    views: list[View]
    newly_settled: list[str] = field(default_factory=list)
    changed: bool = False

    @property
    def complete(self) -> bool:
        return all(view.settled for view in self.views)


def look(run_dir: Path) -> Progress:
    """Take one look: settle open submissions, ask, classify, store, and submit the attempts that are due."""
    with journal.lock(run_dir):
        return Look(run_dir).take()


class Look:
    """The state of one look; nothing in it outlives the look but what is on disk."""

    def __init__(self, run_dir: Path):
        self.run_dir, self.now = run_dir, time.time()
        self.cluster: Cluster = slurm.load_cluster(run_dir)
        self.clock = Clock(run_dir / "watch.json", self.now)
        self.poll = Poll()
        self.shown: dict[str, Answer] = {}

    def take(self) -> Progress:
        for group in self._groups().values():
            if group.open:
                slurm.settle_open(self.run_dir, self.cluster, group, OPEN_PATIENCE_S)
        groups = self._groups()
        self.cancelled = journal.cancelled(journal.read(self.run_dir))
        self.poll = scheduler.poll(group.scheduler_id for group in groups.values() if group.scheduler_id)
        progress = Progress([self._view(folder, groups) for folder in job_dirs(self.run_dir)])
        self._store(progress, groups)
        self._end_those_that_cannot_start(progress.views)
        self._retry(progress.views)
        self.clock.save()
        return progress

    def _groups(self) -> dict[str, Group]:
        return journal.groups(journal.read(self.run_dir))

    # -- one job -------------------------------------------------------------------------------------------------

    def _view(self, job_dir: Path, groups: dict[str, Group]) -> View:
        view = View(load(job_dir / "spec.json", JobSpec))
        every = [(order, group) for group in groups.values() for order in group.intent.orders]
        mine = [(order, group) for order, group in every if order.job == job_dir.name]
        for order, group in mine:
            view.settled = self._add(view, job_dir, order, group)
        if not mine:
            view.attempts, view.note = [], "not submitted yet"
        last = view.attempts[-1] if view.attempts else None
        again = last is not None and last.machine_fault and last.state not in NOT_RETRIED
        view.retry = view.settled and again and len(mine) <= self.cluster.retries and job_dir.name not in self.cancelled
        view.settled = view.settled and not view.retry
        return view

    def _add(self, view: View, job_dir: Path, order: Order, group: Group) -> bool:
        """Add what is known of one order; True when nothing more is expected of it."""
        if group.refused:
            reason = f"the scheduler refused it: {group.refused}"
            view.attempts.append(Attempt(number=order.attempt, state="rejected", machine_fault=True, reason=reason,
                                         submitted_at=group.intent.time))  # fmt: skip
            return True
        if group.open:
            reason = "the scheduler has not answered the submission yet"
            view.attempts.append(Attempt(number=order.attempt, state="unknown", reason=reason))
            return False
        task = group.task_id(order)
        rows = [row for row in self.poll.rows.get(task, []) if row.name == group.intent.name]
        live = self.poll.live.get(task)
        live = live if live is not None and live.name == group.intent.name else None
        view.answers = self._answers(task)
        merged = merge(rows, live)
        if not merged:
            return self._nobody_knows(view, job_dir, order, task)
        return self._add_rows(view, job_dir, order, merged, live)

    def _add_rows(self, view: View, job_dir: Path, order: Order, rows: list[Row], live: Row | None) -> bool:
        first = rows[0].restarts if rows[0].source == "squeue" else 0
        for missing in range(first):
            number = order.attempt if missing == 0 else claim_number(job_dir, rows[0].raw_id, missing)
            reason = "started again by the scheduler, which keeps no record why"
            view.attempts.append(Attempt(number=number, state="requeued", machine_fault=True, reason=reason,
                                         scheduler_id=rows[0].id))  # fmt: skip
        for index, row in enumerate(rows, first):
            number = order.attempt if index == 0 else claim_number(job_dir, row.raw_id, index)
            reports = read_reports(job_dir / "attempts" / str(number))
            word = classify(row, reports, self._log(row) if row.state == "FAILED" else "")
            if job_dir.name in self.cancelled and word.state in ("cancelled", "failed"):
                word = Word(state=self._ended_as(job_dir.name), machine_fault=True, reason=self.cancelled[job_dir.name])
            view.attempts.append(attempt_of(number, row, word, reports))
        return self._is_settled(view, job_dir.name, rows[-1], live, reports)

    def _ended_as(self, job: str) -> str:
        return "rejected" if self.cancelled[job].startswith("can never start") else "cancelled"

    def _is_settled(self, view: View, job: str, row: Row, live: Row | None, reports: tuple[LaunchRecord, ...]) -> bool:
        """Is the last attempt over, by the best witness there is? Waits for a better one only up to a deadline."""
        last, deadline = view.attempts[-1], self.cluster.answer_deadline_s
        self.clock.forget(f"{job} unknown")
        if last.state not in FINAL:
            for wait in ("requeued", "report", "accounting"):
                self.clock.forget(f"{job} {wait}")
            return self._ghost(view, job, row, live)
        if last.state == "requeued" and not self.clock.overdue(f"{job} requeued", deadline):
            return False
        reported = reports and all(report.ended_at is not None for report in reports)
        if last.state in SPEAKING and not reported and not self.clock.overdue(f"{job} report", SPOOL_LAG_S):
            return False
        if row.source == "squeue" and self.poll.accounting_is_off:
            view.note = NO_ACCOUNTING
        elif row.source == "squeue":
            if not self.clock.overdue(f"{job} accounting", deadline):
                return False
            view.note = f"sacct did not confirm within {deadline:g} s: {self._silence()}; T0 at most"
        return True

    def _ghost(self, view: View, job: str, row: Row, live: Row | None) -> bool:
        """A job that the accounting calls alive and the controller does not know: unknown, after a deadline."""
        ended = live is not None and live.state not in ("RUNNING", "PENDING") and live.source == "squeue"
        if not self.poll.queue_answers or (live is not None and row.source == "squeue") or (live and not ended):
            self.clock.forget(f"{job} ghost")
            return False
        if live is None and self.clock.overdue(f"{job} ghost", self.cluster.answer_deadline_s):
            reason = f"the accounting says {row.state}, but the controller has no such job (was the cluster reset?)"
            view.attempts[-1] = self._unknown(view.attempts[-1].number, row.id, reason)
            return True
        return False

    def _nobody_knows(self, view: View, job_dir: Path, order: Order, task: str) -> bool:
        """No row anywhere: unknown, and asked again until the deadline."""
        stored = stored_record(job_dir)
        if stored is not None:
            view.attempts, view.answers, view.note = list(stored.attempts), stored.answers, stored.note
            return True
        silence = self._silence() or "neither the accounting nor the controller has a job of this id and name"
        hopeless = self.poll.accounting_is_off and self.poll.queue_answers
        limit = SPOOL_LAG_S if hopeless else self.cluster.answer_deadline_s
        over = self.clock.overdue(f"{job_dir.name} unknown", limit)
        if self.cancelled.get(job_dir.name) and over:
            reason = self.cancelled[job_dir.name]
            view.attempts.append(Attempt(number=order.attempt, state="cancelled", machine_fault=True, reason=reason,
                                         scheduler_id=task))  # fmt: skip
            return True
        reports = read_reports(job_dir / "attempts" / str(order.attempt))
        view.attempts.append(self._unknown(order.attempt, task, silence, reports))
        view.note = f"{silence}; {NO_ACCOUNTING if self.poll.accounting_is_off else 'T0 at most'}"
        return over

    def _unknown(self, number: int, task: str, reason: str, reports: tuple[LaunchRecord, ...] = ()) -> Attempt:
        codes = {rank: code for report in reports for rank, code in report.exit_codes.items()}
        return Attempt(number=number, state="unknown", reason=reason, scheduler_id=task, rank_exit_codes=codes)

    def _silence(self) -> str:
        """Who did not answer, in their own words; '' when all did."""
        answers = [answer for answer in (self.poll.accounting, self.poll.queue) if answer and answer.exit_code]
        if self.poll.queue_answers:
            answers = [answer for answer in answers if answer is not self.poll.queue]
        return "; ".join(f"{answer.command[0]}: {answer.error or f'exit {answer.exit_code}'}" for answer in answers)

    def _answers(self, task: str) -> tuple[Answer, ...]:
        found = (self.poll.lines(self.poll.accounting, [task]), self.poll.lines(self.poll.queue, [task]))
        return tuple(answer for answer in found if answer is not None)

    def _log(self, row: Row) -> str:
        """The end of the batch script's own log: where Slurm and a failed start leave their last words."""
        names = sorted((self.run_dir / "slurm").glob(f"*/{row.id}_*log.err"))
        return "\n".join(_tail(path) for path in names)

    # -- storing and acting --------------------------------------------------------------------------------------

    def _store(self, progress: Progress, groups: dict[str, Group]) -> None:
        for view in progress.views:
            folder = self.run_dir / "jobs" / view.spec.job
            old = stored_record(folder, "watch.json")
            changed = old is None or list(old.attempts) != view.attempts
            progress.changed |= changed
            if view.settled and not _same(stored_record(folder), view):
                record = self._record(view, old, groups)
                store(folder / "job.json", record)
                store(folder / "watch.json", record)
                progress.newly_settled.append(view.spec.job)
            elif changed and view.attempts:
                store(folder / "watch.json", self._record(view, old, {}))

    def _record(self, view: View, old: JobRecord | None, groups: dict[str, Group]) -> JobRecord:
        """The job's record; of the final one, the answers given while it lived are a part."""
        spec = view.spec
        answers = list(view.answers)
        if groups and view.attempts and view.attempts[-1].scheduler_id:
            answers += self._described(view.attempts[-1].scheduler_id)
        answers += [answer for answer in (old.answers if old else ()) if _tells_of_life(answer)][-1:]
        return JobRecord(
            run=spec.run, nonce=spec.nonce, job=spec.job, scheduler="slurm", cluster=self.cluster.name,
            topology=spec.topology, tests=spec.tests, attempts=tuple(view.attempts), answers=tuple(answers),
            collected_at=self.now, note=view.note,
        )  # fmt: skip

    def _described(self, task: str) -> list[Answer]:
        """The controller's full description, asked once per submission and look, cut to the one task."""
        whole = task.split("_")[0]
        if whole not in self.shown:
            self.shown[whole] = scheduler.show(whole)
        answer, index = self.shown[whole], task.partition("_")[2]
        mine = [line for line in answer.output.splitlines() if not index or f" ArrayTaskId={index} " in line]
        return [msgspec.structs.replace(answer, output="\n".join(mine))] if mine else []

    def _end_those_that_cannot_start(self, views: Iterable[View]) -> None:
        """Cancel what waits for something that cannot come, and repeat cancellations that were not heard."""
        doomed: dict[str, str] = {}
        for view in views:
            job, last = view.spec.job, view.attempts[-1] if view.attempts else None
            if last is None or last.state not in ("pending", "running", "suspended"):
                continue
            if job in self.cancelled:
                doomed[last.scheduler_id] = ""
            elif last.state == "pending" and (reason := self._hopeless(job, last)):
                doomed[last.scheduler_id] = reason
                journal.cancel(self.run_dir, (job,), reason)
        if doomed:
            scheduler.ask(["scancel", *doomed])

    def _hopeless(self, job: str, last: Attempt) -> str:
        reason = next((word for word in NEVER if word in last.reason), "")
        if reason and self.clock.overdue(f"{job} never", min(NEVER_PATIENCE_S, self.cluster.answer_deadline_s)):
            return f"can never start: {reason}"
        if not reason:
            self.clock.forget(f"{job} never")
        limit = self.cluster.queue_limit_min * 60
        if limit and last.submitted_at and self.now - last.submitted_at > limit:
            return f"had not started after {self.cluster.queue_limit_min} minutes ({last.reason or 'no reason given'})"
        return ""

    def _retry(self, views: Iterable[View]) -> None:
        due = [view.spec.job for view in views if view.retry]
        orders = [Order(job, next_number(self.run_dir / "jobs" / job)) for job in due]
        for job in due:
            self.clock.forget_job(job)
        slurm.submit_locked(self.run_dir, self.cluster, orders)


class Clock:
    """Since when something has been so, kept on disk: a collector that is killed loses no deadline."""

    def __init__(self, path: Path, now: float):
        self.path, self.now = path, now
        self.since: dict[str, float] = {}
        with contextlib.suppress(FileNotFoundError, msgspec.DecodeError):
            self.since = msgspec.json.decode(path.read_bytes(), type=dict[str, float])

    def overdue(self, key: str, limit_s: float) -> bool:
        return self.now - self.since.setdefault(key, self.now) >= limit_s

    def forget(self, key: str) -> None:
        self.since.pop(key, None)

    def forget_job(self, job: str) -> None:
        for key in [key for key in self.since if key.split(" ")[0] == job]:
            del self.since[key]

    def save(self) -> None:
        partial = self.path.with_name(f".{self.path.name}.{os.getpid()}")
        partial.write_bytes(msgspec.json.encode(self.since))
        os.replace(partial, self.path)


def read_reports(folder: Path) -> tuple[LaunchRecord, ...]:
    """Every launcher's report of one attempt; one that is cut short counts as not there."""
    found = []
    for path in sorted(folder.glob("launch*.json")):
        with contextlib.suppress(SchemaError, OSError):
            found.append(load(path, LaunchRecord))
    return tuple(found)


def stored_record(job_dir: Path, name: str = "job.json") -> JobRecord | None:
    """What an earlier look stored of a job, if it can be read."""
    with contextlib.suppress(SchemaError, OSError):
        return load(job_dir / name, JobRecord)
    return None


def _same(old: JobRecord | None, view: View) -> bool:
    return old is not None and list(old.attempts) == view.attempts and old.note == view.note


def _tells_of_life(answer: Answer) -> bool:
    return answer.command[:1] == ("squeue",) and "|RUNNING|" in answer.output


def _tail(path: Path, size: int = 4000) -> str:
    with contextlib.suppress(OSError), open(path, "rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - size))
        return file.read().decode(errors="replace")
    return ""
