"""k3-ledger: answers as text, JSON and CSV; fast; errors in one line."""

import csv
import io
import json
import subprocess
import sys
import time

import pytest

from ledger.cli import main
from ledger.ingest import ingest
from tests.ledger import make


@pytest.fixture
def ask(root, ledger, clean, capsys):
    """Run a command on the clean run; returns (exit code, what it printed)."""

    def run(*arguments):
        capsys.readouterr()
        code = main([*arguments, "--root", str(root), "--ledger", str(ledger)])
        printed = capsys.readouterr()
        return code, printed.out + printed.err

    return run


def test_claims_as_json(ask):
    """The list that other tools read: every promised key, one object a cell."""
    code, text = ask("claims", "--json")
    rows = json.loads(text)
    keys = {"id", "text", "state", "device", "ranks", "transport", "scope", "witness", "sealed", "kill_rate"}
    keys |= {"toolchain", "run", "expired_by", "topology", "reason"}
    assert code == 0
    assert all(keys <= set(row) for row in rows)
    assert [row["state"] for row in rows].count("proven") == 1


def test_claims_as_csv(ask):
    """The same as CSV: a heading and one line a cell."""
    rows = list(csv.DictReader(io.StringIO(ask("claims", "--csv")[1])))
    assert (rows[0]["id"], rows[0]["state"], len(rows)) == ("kda.golden", "proven", 6)


def test_claims_of_a_suite(ask):
    """A suite's name selects its claims; an unknown name is answered with those there are."""
    assert "moe.route" not in ask("claims", "quick")[1]
    code, text = ask("claims", "quik")
    assert code == 2
    assert "no claim or suite 'quik'; there are quick, kda.golden" in text


@pytest.mark.parametrize(("torch", "words"), [("2.13.0+cpu", "proven here"), ("1.0", "proven on torch 1.0")])
def test_another_toolchain_is_named(root, spool, ledger, capsys, monkeypatch, torch, words):
    """Evidence from this toolchain reads `proven here`, from another `proven on X`."""
    monkeypatch.setattr("ledger.claims.here", lambda: {"torch": "2.13.0+cpu", "python": "3.11"})
    ingest(make.run(root, spool, torch=torch).write(), ledger)
    main(["claims", "--root", str(root), "--ledger", str(ledger)])
    assert words in capsys.readouterr().out


def test_show_lists_and_details(ask, clean):
    """Without an id the latest runs, with the beginning of one its attempts, outcomes and facts."""
    assert clean.head["run"] in ask("show")[1]
    found = json.loads(ask("show", clean.head["run"][:12], "--json")[1])
    assert [row["outcome"] for row in found["outcomes"]] == ["passed", "passed"]
    assert found["attempts"][0]["state"] == "completed"
    code, text = ask("show", "nothing")
    assert (code, "names 0 runs" in text) == (2, True)


def test_why_prints_the_whole_chain(ask):
    """Claim, tests, ranks, job, scheduler's word, closure, path, kill rate, reach, and what would revoke it."""
    text = ask("why", "kda.golden")[1]
    parts = [
        "claim      kda.golden",
        "suites/kda_suite.py::test_grad",
        "cpu1: proven",
        "cpu, 1 rank, ",
        "cpu1.kda.golden",
    ]
    parts += ["local executor", "k3/kda.py: <module>, kda", "paths      torch.kda", "kill rate", "revoked by a change"]
    assert [part for part in [*parts, "validated on  torch 2.13.0+cpu"] if part not in text] == []
    assert ask("why", "kda")[1].strip().endswith("did you mean kda.golden")


def test_query_reads_and_cannot_write(ask):
    """Any SELECT as text, JSON or CSV; a write is refused by the connection itself."""
    assert json.loads(ask("query", "SELECT count(*) AS n FROM record", "--json")[1]) == [{"n": 2}]
    assert ask("query", "SELECT outcome FROM record", "--csv")[1] == "outcome\npassed\npassed\n"
    code, text = ask("query", "DELETE FROM record")
    assert (code, "read-only" in text or "readonly" in text) == (2, True)
    assert "CREATE TABLE run" in ask("query")[1]


def test_verify_says_what_it_looked_at(ask):
    """A clean ledger: no lie found, and in how much."""
    code, text = ask("verify")
    assert (code, text) == (0, "no lie found in 0 published files, 1 runs with 2 records in the ledger\n")


def test_export_import_round(root, ledger, clean, capsys, tmp_path):
    """Export, then import elsewhere: the commands say what they did, and the second time that nothing is new."""
    options = ["--root", str(root)]
    assert main(["export", *options, "--ledger", str(ledger)]) == 0
    assert "is not in ledger/keys/" in capsys.readouterr().err
    for count in ("1 files taken in, 0 known", "0 files taken in, 1 known"):
        main(["import", str(root / "ledger" / "evidence"), *options, "--ledger", str(tmp_path / "b.db")])
        assert count in capsys.readouterr().out


def test_missing_ledger_says_what_to_do(root, capsys, tmp_path):
    """A ledger that does not exist is an error of one line with a remedy."""
    assert main(["show", "--root", str(root), "--ledger", str(tmp_path / "no.db")]) == 2
    assert "run a suite or `k3-ledger import` first" in capsys.readouterr().err


def test_claims_without_any_ledger(root, capsys):
    """A fresh clone has no ledger: claims come from published evidence."""
    assert main(["claims", "--root", str(root)]) == 0
    assert "6 cells: 5 unproven, 1 needs." in capsys.readouterr().out


READING = (["claims", "--json"], ["show"], ["why", "kda.golden"], ["query", "SELECT 1"], ["matrix"],
           ["matrix", "--check"], ["verify"])  # fmt: skip


@pytest.mark.parametrize("command", READING, ids=" ".join)
def test_reading_starts_fast(root, ledger, clean, command):
    """A reading command costs less than 0.3 s of processor above a bare Python, and imports nothing heavy."""
    code = (
        "import sys, time; sys.argv = ['k3-ledger', *sys.argv[1:]]; from ledger.cli import main; main();"
        "heavy = {'torch', 'sqlite_utils', 'rich', 'pytest', 'securesystemslib'} & set(sys.modules);"
        "print(time.process_time(), heavy, file=sys.stderr)"
    )
    arguments = [*command, "--root", str(root), "--ledger", str(ledger)]
    best = 9.0
    for _ in range(3):
        begun = time.perf_counter()
        done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=True)
        spent, heavy = done.stderr.split(" ", 1)
        best = min(best, float(spent), time.perf_counter() - begun)
        assert heavy.strip() == "set()"
    assert best < 0.3


def test_bench_lists_and_compares(root, spool, ledger, capsys):
    """Values with their peers and floors; of two runs, a verdict or the word why there is none."""
    for number in (1, 2):
        made = make.run(root, spool, number=number)
        made.lines("test_end")[0]["measures"] = [
            {"name": "duration", "unit": "s", "direction": "lower", "samples": [2.0, 1.0, 3.0], "shape": "T=8",
             "context": {"peers": {"fla": [4.0]}, "floor_s": 0.5, "path": "torch.kda"}}]  # fmt: skip
        ingest(made.write(), ledger)
    options = ["--json", "--root", str(root), "--ledger", str(ledger)]
    main(["bench", *options])
    row = json.loads(capsys.readouterr().out)[0]
    assert (row["median"], row["floors"], row["peer"], row["ratio"]) == (2.0, 4.0, "fla", 0.5)
    assert row["reason"] == "1 pairs of processes, 6 are needed"
    main(["bench", "20250615t000001", "20250615t000002", *options])
    assert json.loads(capsys.readouterr().out)[0]["verdict"] == "cannot-tell"


@pytest.fixture
def elsewhere(root, spool, ledger, tmp_path, capsys):
    """A run published by one ledger and imported into another, which never saw its directory."""
    made = make.run(root, spool, cells=[("kda.golden", "gloo2")])
    made.lines("test_end")[0]["measures"] = [{"name": "scan", "unit": "s", "direction": "lower", "samples": [2.0]}]
    ingest(made.write(), ledger)
    options = ["--root", str(root), "--ledger"]
    main(["export", *options, str(ledger)])
    main(["import", str(root / "ledger" / "evidence"), *options, str(tmp_path / "b.db")])

    def run(*arguments, at=tmp_path / "b.db"):
        capsys.readouterr()
        assert main([*arguments, "--json", *options, str(at)]) == 0
        return json.loads(capsys.readouterr().out)

    return run


def test_show_opens_imported_runs(elsewhere, ledger):
    """An imported run is listed and shown with the attempts, outcomes, measures and facts of its own ledger."""
    listed = elsewhere("show")[0]
    assert (listed["cells_passed"], listed["jobs"], len(listed["imported"])) == (1, 1, 12)
    theirs, ours = elsewhere("show", listed["run"]), elsewhere("show", listed["run"], at=ledger)
    assert len(theirs.pop("imported")) == 64
    hosts = [row.pop("nodes") for row in [*theirs["attempts"], *ours["attempts"]]]
    assert len(set(hosts)) == 2  # published under a pseudonym
    assert theirs == ours


def test_query_sees_imported_records(elsewhere, ledger):
    """SQL reads the records inside imported files as it reads the ledger's own, and still cannot write."""
    rows = elsewhere("query", "SELECT job, rank, test, outcome FROM imported_record ORDER BY rank, test")
    own = """SELECT job, rank, test.name AS test, outcome FROM record JOIN stream ON stream.id = stream
             JOIN test ON test.id = record.test ORDER BY rank, test"""
    assert rows == elsewhere("query", own, at=ledger)
    assert len(rows) == 4
    assert {"imported_line", "imported_record"} <= {row["name"] for row in elsewhere("query")}


def test_why_in_a_clone(root, spool, ledger, capsys):
    """With published evidence alone the chain still ends in the scheduler's word and the figures."""
    made = make.run(root, spool, scheduler="slurm")
    made.lines("test_end")[0]["measures"] = [{"name": "scan", "unit": "s", "direction": "lower", "samples": [1.0, 2.0]}]
    ingest(made.write(), ledger)
    main(["export", "--root", str(root), "--ledger", str(ledger)])
    capsys.readouterr()
    assert main(["why", "kda.golden", "--root", str(root)]) == 0
    text = capsys.readouterr().out
    assert "scheduler  cpu1.kda.golden: slurm; attempts 0: completed 100; asked sacct -D -P -j 100" in text
    assert "figure     scan 1.5 s" in text
