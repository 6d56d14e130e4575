"""The recorder inside pytest: every test's start and end on this rank, on disk at once, with what the test used.

It records what happened and drops nothing: a test that never reports stays without an end and is `lost`.
"""

from __future__ import annotations

import os
import sys
import time
from contextlib import nullcontext
from pathlib import Path

import pytest
from _pytest.runner import runtestprotocol

from harness import fingerprint, revision
from harness.numbers import NOTES, Notes, NumberFixtures, is_timed, take_benchmark
from harness.spec import JobSpec
from harness.stream import Stream
from harness.trace import IMPORTING, Tracer, kernels
from ledger.closure import test_closure
from ledger.record import Environment, TestEnd, TestStart, worst

MESSAGE_LENGTH = 2000
FAILED = 1  # pytest's own exit code for failed tests
PLUGINS = ("pytest_timeout", "pytest_benchmark.plugin")


def run_tests(spec: JobSpec, tree: Path, stream: Stream, rank: int) -> tuple[int, tuple[str, ...]]:
    """Run the job's tests in this process. Returns pytest's exit code and the ids it collected."""
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    tracer = Tracer(tree, Path(os.environ["K3_BEAT"]).with_suffix(".coverage"))
    recorder = Recorder(spec, tree, stream, tracer)
    code = pytest.main(arguments(tree, spec.tests), plugins=[recorder, NumberFixtures(tree)])
    tracer.save()
    return int(code), tuple(recorder.collected)


def arguments(tree: Path, tests: tuple[str, ...]) -> list[str]:
    """pytest's command line: the files of `tests`, and nothing from the environment or the project's own addopts.

    Nothing is captured, so that the rank's log can be followed live and holds the stacks of a hang.
    """
    files = dict.fromkeys(test.split("::")[0] for test in tests)
    switches = [f"--rootdir={tree}", f"-c{tree / 'pyproject.toml'}", "-oaddopts=", "--strict-markers", "-rA", "-s"]
    return [*files, *switches, "-pno:cacheprovider", *(f"-p{name}" for name in PLUGINS)]


class Hooks:
    """Hooks by which suites reach the recorder; suites/conftest.py declares the first for runs outside a job."""

    @pytest.hookspec
    def pytest_k3_path(self, item, path):
        """`path` was announced by `k3.announce` while `item` ran."""

    @pytest.hookspec
    def pytest_k3_transport(self, item, backend):
        """`backend` is what the process group of `item` answered when asked."""


class Recorder:
    """Writes this rank's stream from pytest's hooks."""

    def __init__(self, spec: JobSpec, tree: Path, stream: Stream, tracer: Tracer):
        self.spec, self.tree, self.stream, self.tracer = spec, tree, stream, tracer
        self.collected: list[str] = []
        self.backend = "none"
        self.closures: dict[tuple, dict[str, str]] = {}
        self.failed_parts: list[pytest.TestReport] = []
        self.refuted: set[str] = set()

    def pytest_addhooks(self, pluginmanager):
        pluginmanager.add_hookspecs(Hooks)

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config, items):
        """Keep the planned tests, in the planned order on every rank; what is missing stays without a record."""
        self.collected = [item.nodeid for item in items]
        found = {item.nodeid: item for item in items}
        kept = [found[test] for test in self.spec.tests if test in found]
        config.hook.pytest_deselected(items=[item for item in items if item not in kept])
        items[:] = kept

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item, nextitem):
        """Run one test: traced, and once more untraced where it declares a number."""
        if self._is_decided(item.nodeid):
            return True
        notes = item.stash[NOTES] = Notes()
        started = time.time()
        self.stream.write(TestStart(test=item.nodeid, time=started))
        item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        with self.tracer.test(item.nodeid), kernels(self.spec.topology.device) as seen, _benchmarks_off(item):
            outcome, message = self._pass(item, nextitem)
        if is_timed(item) and outcome == "passed" and not self.spec.sabotage:
            outcome, message = self._timed_pass(item, nextitem, notes)
        item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
        self.stream.write(self._end(item, started, outcome, message, tuple(seen)))
        if outcome in ("failed", "error"):
            self.refuted |= {claim for claim, tests in self.spec.until_failure.items() if item.nodeid in tests}
            self._leave_peers()
        return True

    def _leave_peers(self) -> None:
        """With nothing left to find out, end this rank at once: its peers would wait for it in the next test."""
        if self.spec.topology.ranks > 1 and self.spec.until_failure and set(self.spec.until_failure) <= self.refuted:
            sys.stdout.flush()
            os._exit(FAILED)

    def _is_decided(self, test: str) -> bool:
        """Whether every claim this test speaks for has failed already, in a job that asks no more than that."""
        claims = {claim for claim, tests in self.spec.until_failure.items() if test in tests}
        return bool(claims) and claims <= self.refuted

    def _pass(self, item, nextitem) -> tuple[str, str]:
        self.failed_parts = []
        return outcome_of([*runtestprotocol(item, nextitem=nextitem), *self.failed_parts])

    def _timed_pass(self, item, nextitem, notes: Notes) -> tuple[str, str]:
        notes.timing = True
        with self.tracer.paused():
            outcome, message = self._pass(item, nextitem)
        if outcome == "passed" and not notes.measures:
            return "error", "the test declares a number (benchmark or measure) and recorded none"
        return outcome, message

    def _end(self, item, started: float, outcome: str, message: str, seen: tuple[str, ...]) -> TestEnd:
        notes, now = item.stash[NOTES], time.time()
        pieces = self._closure(item.nodeid)
        return TestEnd(
            test=item.nodeid, outcome=outcome, duration_s=now - started, time=now, message=message[-MESSAGE_LENGTH:],
            paths=tuple(notes.paths), kernels=seen, measures=tuple(notes.measures), closure=pieces, data=notes.data,
        )  # fmt: skip

    def _closure(self, test: str) -> dict[str, str]:
        """What the test used; parameters of one test mostly run the same lines, so each set is worked out once."""
        lines, at_import = self.tracer.lines(test), self.tracer.lines(IMPORTING)
        file = test.split("::")[0]
        key = (file, _frozen(lines), _frozen(at_import))
        if key not in self.closures:
            self.closures[key] = test_closure(self.tree, file, lines, at_import)
        return self.closures[key]

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item, call):
        report = yield
        if call.when == "call":
            self._observe()
            take_benchmark(item)
        return report

    def pytest_runtest_logreport(self, report):
        """Parts of a test (subtests) report here only; a failed one fails the test."""
        if report.failed:
            self.failed_parts.append(report)

    @pytest.hookimpl
    def pytest_k3_path(self, item, path):
        item.stash[NOTES].paths[path] = None

    @pytest.hookimpl
    def pytest_k3_transport(self, item, backend):
        self.backend = backend

    def pytest_sessionfinish(self):
        """Say where this rank ran, once the tests have shown which device and transport they used."""
        torch = sys.modules.get("torch")
        device = "cuda" if torch is not None and torch.cuda.is_initialized() else "cpu"
        taken, places = fingerprint.take(), revision.origins(self.tree)
        self.stream.write(Environment(fingerprint=taken, device=device, backend=self.backend, modules=places))

    def _observe(self) -> None:
        """Ask the process group, where one is open, for its transport."""
        distributed = sys.modules.get("torch.distributed")
        if distributed is not None and distributed.is_available() and distributed.is_initialized():
            self.backend = distributed.get_backend()


def outcome_of(reports: list[pytest.TestReport]) -> tuple[str, str]:
    """Worst outcome of a test's phases, and that phase's message. Without a call phase nothing has passed."""
    judged = [(_outcome(report), _message(report)) for report in reports]
    if not any(report.when == "call" for report in reports) and all(outcome == "passed" for outcome, _ in judged):
        judged.append(("error", "the call phase never reported"))
    outcome = worst(outcome for outcome, _ in judged)
    return outcome, next(message for found, message in judged if found == outcome)


def _frozen(lines: dict[str, set[int]]) -> frozenset:
    return frozenset((file, frozenset(numbers)) for file, numbers in lines.items())


def _outcome(report: pytest.TestReport) -> str:
    expected_failure = hasattr(report, "wasxfail")
    if report.failed:
        return "failed" if report.when == "call" else "error"
    if report.skipped:
        return "xfailed" if expected_failure else "skipped"
    return "xpassed" if expected_failure else "passed"


def _message(report: pytest.TestReport) -> str:
    if report.passed:
        return getattr(report, "wasxfail", "")
    if report.skipped and isinstance(report.longrepr, tuple):
        return report.longrepr[2]
    crash = getattr(report.longrepr, "reprcrash", None)
    return crash.message if crash else report.longreprtext


def _benchmarks_off(item):
    """During the traced pass pytest-benchmark runs a function once and measures nothing."""
    session = getattr(item.config, "_benchmarksession", None)
    return nullcontext() if session is None else _Disabled(session)


class _Disabled:
    def __init__(self, session):
        self.session = session

    def __enter__(self):
        self.before, self.session.disabled = self.session.disabled, True

    def __exit__(self, *_):
        self.session.disabled = self.before
