"""Ingest: idempotent, whole or not at all, damage named, and one writer at a time."""

import json
import multiprocessing
import sqlite3

import pytest

from ledger.db import LedgerError
from ledger.ingest import ingest
from ledger.record import Measure
from ledger.runs import IngestError
from ledger.verify import lies
from tests.ledger import make


def rows(ledger, table="record"):
    return sqlite3.connect(ledger).execute(f"SELECT count(*) FROM {table}").fetchone()[0]


def test_again_changes_nothing(clean, ledger):
    """The same directory twice is the same ledger, byte for byte in what it says."""
    before = list(sqlite3.connect(ledger).iterdump())
    done = ingest(clean.folder, ledger)
    assert (done.jobs, done.streams, done.records) == (0, 0, 0)
    assert list(sqlite3.connect(ledger).iterdump()) == before


def test_grows_with_the_run(root, spool, ledger):
    """Jobs that are collected later are added; a job that is out is named as waiting."""
    made = make.run(root, spool, cells=[("kda.golden", "cpu1"), ("moe.route", "cpu1")])
    made.write()
    late = made.folder / "jobs" / "cpu1.moe.route" / "job.json"
    text = late.read_text()
    late.unlink()
    assert ingest(made.folder, ledger).waiting == ("cpu1.moe.route",)
    late.write_text(text)
    done = ingest(made.folder, ledger)
    assert (done.waiting, done.jobs, done.records) == ((), 1, 1)
    assert [f.outcome for f in done.facts] == ["passed", "passed"]


def test_judged_anew(root, spool, ledger, monkeypatch):
    """A run that an earlier judge thought less of is judged anew when it is collected again, and no lie remains."""
    folder = make.run(root, spool).write()
    with monkeypatch.context() as earlier:
        earlier.setattr("ledger.judge.path_faults", lambda *_: ["no such kernel"])
        assert [fact.outcome for fact in ingest(folder, ledger).facts] == ["unproven"]
    assert any("not as stored" in lie for lie in lies(root, ledger=ledger))
    assert [fact.outcome for fact in ingest(folder, ledger).facts] == ["passed"]
    assert not list(lies(root, ledger=ledger))
    assert not ingest(folder, ledger).facts


def test_rebuilds_from_directories(root, spool, tmp_path):
    """Two ledgers made from the same directories say the same of every run."""
    folders = [make.run(root, spool, number=n).write() for n in (1, 2, 3)]
    said = []
    for name in ("a.db", "b.db"):
        for folder in folders:
            ingest(folder, tmp_path / name)
        query = "SELECT body FROM fact ORDER BY run, claim, topology"
        said.append(sqlite3.connect(tmp_path / name).execute(query).fetchall())
    assert said[0] == said[1]


@pytest.mark.parametrize(
    ("damage", "named"),
    [(lambda text: text[:-40], "is truncated"), (lambda text: text.replace('"kind": "end"', '"kind": "fin"'), "line 7"),
     (lambda text: text.replace('"duration_s": 0.5', '"duration_s": NaN', 1), "line 4 is not a record"),
     (lambda text: text.replace('"duration_s": 0.5', '"duration_s": -3', 1), "duration -3.0 s"),
     (lambda text: text.replace('"duration_s": 0.5', '"duration_s": 1e400', 1), "line 4")],
)  # fmt: skip
def test_damaged_lines_are_named_and_nothing_is_proven(root, spool, ledger, damage, named):
    """A truncated or corrupt line is a fault with its number; good lines are kept; no cell is green."""
    made = make.run(root, spool)
    made.write()
    file = made.file("cpu1.kda.golden")
    file.write_text(damage(file.read_text()))
    done = ingest(made.folder, ledger)
    assert any(named in fault for fault in done.faults)
    assert all(fact.outcome != "passed" for fact in done.facts)
    assert rows(ledger) >= 1


@pytest.mark.parametrize("place", ["run.json", "job.json", "rank"])
def test_unknown_schema_refuses_the_whole_run(root, spool, ledger, place):
    """A record of another major version cannot be judged: the run is refused and nothing is half-written."""
    made = make.run(root, spool)
    record = {"run.json": made.head, "job.json": made.jobs["cpu1.kda.golden"], "rank": made.lines("start")[0]}[place]
    record["schema"] = "2.0"
    made.write()
    with pytest.raises(IngestError, match=r"schema 2.0 found, 1.x required"):
        ingest(made.folder, ledger)
    assert not ledger.exists() or rows(ledger, "run") == 0


def test_missing_head_is_refused(tmp_path, ledger):
    """A folder that is no run directory is refused by name."""
    with pytest.raises(IngestError, match=r"run.json"):
        ingest(tmp_path, ledger)


def test_unknown_keys_are_ignored(root, spool, ledger):
    """A later minor version may add keys; they do not disturb."""
    made = make.run(root, spool)
    made.head["novelty"] = made.jobs["cpu1.kda.golden"]["novelty"] = 1
    made.lines("start")[0]["novelty"] = {"a": []}
    assert ingest(made.write(), ledger).facts[0].outcome == "passed"


def test_numbers_are_kept_exactly(root, spool, ledger):
    """Samples come back as the floats they were; numpy scalars were made plain when the measure was built."""
    numpy = pytest.importorskip("numpy")
    measure = Measure.of("t", "s", "lower", [numpy.float32(0.1), numpy.int64(3), 9.5, 10.25])
    made = make.run(root, spool)
    made.lines("test_end")[0]["measures"] = [{"name": "t", "unit": "s", "direction": "lower",
                                              "samples": list(measure.samples)}]  # fmt: skip
    ingest(made.write(), ledger)
    text = sqlite3.connect(ledger).execute("SELECT samples FROM measure").fetchone()[0]
    assert json.loads(text) == [float(numpy.float32(0.1)), 3.0, 9.5, 10.25]


@pytest.mark.parametrize("sample", [float("nan"), float("inf"), "fast", None])
def test_numbers_that_are_none_are_refused_by_name(sample):
    """NaN, infinity and words are no samples; the message names the measure."""
    with pytest.raises(ValueError, match="tokens"):
        Measure.of("tokens", "1/s", "higher", [sample])


def test_two_measures_of_one_name_are_kept(root, spool, ledger):
    """A test may measure the same thing twice; neither number is lost."""
    made = make.run(root, spool)
    one = {"name": "t", "unit": "s", "direction": "lower", "samples": [1.0]}
    made.lines("test_end")[0]["measures"] = [one, one]
    ingest(made.write(), ledger)
    assert rows(ledger, "measure") == 2


def _ingest(folder, ledger, gate):
    gate.wait(30)
    ingest(folder, ledger)


def test_two_ingesters_at_once(root, spool, ledger):
    """Ingesters in several processes wait for each other: every run is there once."""
    context = multiprocessing.get_context("fork")
    gate = context.Barrier(4)
    folders = [make.run(root, spool, number=n).write() for n in (1, 2, 3)]
    processes = [context.Process(target=_ingest, args=(f, ledger, gate)) for f in (*folders, folders[0])]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0, 0, 0, 0]
    assert (rows(ledger, "run"), rows(ledger), rows(ledger, "entry")) == (3, 6, 3)


def test_failure_inside_leaves_nothing(root, spool, ledger, monkeypatch):
    """An error while writing rolls everything back: the ledger holds the run whole or not at all."""
    made = make.run(root, spool)
    made.jobs["cpu1.kda.golden"]["attempts"][0]["ended_at"] = 1.0  # the schema refuses an end before its start
    with pytest.raises(LedgerError, match="nothing was written"):
        ingest(made.write(), ledger)
    assert rows(ledger, "run") == rows(ledger, "blob") == 0
