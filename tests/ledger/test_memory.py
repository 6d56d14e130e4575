"""What is remembered saves time and hides nothing: any edit is found by name, and a forged cache is not believed."""

import json
import os
import shutil
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ledger import export, signing, verify
from ledger.claims import statuses
from ledger.cli import main
from ledger.ingest import ingest
from ledger.memory import CODE, Memory
from ledger.record import encode
from tests.ledger import make


@pytest.fixture
def later(monkeypatch):
    """As if two seconds had passed since every edit, so that what is read is remembered at once."""
    monkeypatch.setattr("ledger.memory.RACY_NS", 0)


@pytest.fixture
def published(root, spool, ledger):
    """A sealed evidence file, verified once; returns its path."""
    ingest(make.run(root, spool).write(), ledger)
    done = export.export(root, ledger)
    key = signing.public_file(signing.own_signer(), "me", "lab")
    (root / "ledger" / "keys" / "me.json").write_bytes(encode(key))
    time.sleep(0.02)  # the kernel's clock ticks every few milliseconds
    return root / "ledger" / "evidence" / done.files[0]


def lies(root, ledger=None, read=True):
    memory = Memory(root, read=read)
    found = list(verify.lies(root, ledger, memory=memory))
    memory.save()
    return found, memory.note()


def flip(path, keep_times=False):
    """Change one letter of a file in place, and put its times back if asked."""
    before = path.stat()
    text = path.read_text()
    assert text.count('"passed"') >= 1
    path.write_text(text.replace('"passed"', '"pbssed"', 1))
    if keep_times:
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def test_the_second_look_reads_nothing(root, ledger, published, later, monkeypatch):
    """After a clean verification no evidence file is opened again, and the answer says so and since when."""
    assert lies(root, ledger) == ([], "")
    opened = []
    monkeypatch.setattr("ledger.evidence.read", lambda path, keys: opened.append(path))
    monkeypatch.setattr("ledger.memory.Memory._digest", lambda self, name: opened.append(name))
    found, note = lies(root, ledger)
    assert found == []
    assert {str(published), str(ledger)} & set(map(str, opened)) == set()
    assert note.endswith("UTC; --full reads them again")
    assert "files unchanged since they were verified at 20" in note


@pytest.mark.parametrize("keep_times", [False, True], ids=["plain", "times put back"])
def test_one_changed_byte_is_found(root, published, later, keep_times):
    """A byte edited after a clean look is found by name, each time, even with the file's times put back."""
    assert lies(root)[0] == []
    flip(published, keep_times)
    for _ in range(2):
        assert f"{published.name} line" in lies(root)[0][0]


def test_restored_bytes_are_clean_again(root, published, later):
    """A lie is never remembered: with the old bytes back, nothing is found."""
    text = published.read_text()
    flip(published)
    assert lies(root)[0] != []
    published.write_text(text)
    assert lies(root)[0] == []


def test_a_young_file_is_not_trusted(root, published):
    """What was touched within two seconds of being read is read again: its stamp could survive an edit."""
    lies(root)
    memory = Memory(root)
    assert memory.digest(published) != ""
    assert memory.unchanged == set()


def test_full_reads_everything(root, published, later, monkeypatch, capsys):
    """`verify --full` and `matrix --check --full` read every byte, whatever was verified before."""
    main(["matrix", "--write", "--root", str(root)])
    for command in (["verify"], ["matrix", "--check"]):
        for flags, wanted in ([], None), ([], True), (["--full"], False):
            assert main([*command, *flags, "--root", str(root)]) == 0
            said = "files unchanged since" in capsys.readouterr().out
            assert wanted is None or said == wanted


def test_a_cache_without_the_secret_is_not_believed(root, published, state, later):
    """Facts edited in the cache are dropped: statuses come from the evidence again."""
    folder = root / "ledger" / "evidence"
    good = statuses(root, evidence=folder)
    file = state / "cache" / "evidence.json"
    text = file.read_text()
    assert '"witness":"T0"' in text
    file.write_text(text.replace('"witness":"T0"', '"witness":"T1"'))
    assert statuses(root, evidence=folder) == good


@pytest.mark.parametrize("victim", ["digests", "published", "evidence"])
def test_a_cache_of_another_user_is_not_believed(root, published, state, later, victim):
    """A cache file made under another secret, or renamed from another cache, answers nothing."""
    assert lies(root)[0] == []
    statuses(root, evidence=root / "ledger" / "evidence")
    (state / "keys" / "secret").write_bytes(b"x" * 32)
    assert (
        Memory(root).recall(victim, json.loads((state / f"cache/{victim}.json").read_text().split("\n")[1])["key"])
        is None
    )


def test_a_secret_that_others_can_read_is_no_secret(root, state):
    """A secret left open to others, or planted by them, vouches for nothing."""
    Memory(root).keep("ledger", "k", True)
    assert Memory(root).recall("ledger", "k") is not None
    (state / "keys" / "secret").chmod(0o644)
    assert Memory(root).recall("ledger", "k") is None


def test_a_renamed_cache_is_not_believed(root, published, state, later):
    """The MAC binds the name: a clean ledger's mark does not stand for clean evidence."""
    memory = Memory(root)
    memory.keep("ledger", "k", True)
    shutil.copy(state / "cache" / "ledger.json", state / "cache" / "published.json")
    assert memory.recall("ledger", "k") is not None
    assert memory.recall("published", "k") is None


def test_no_cache_inside_the_project(root, monkeypatch):
    """A state folder below the project could be committed with a cache in it: none is written or read there."""
    monkeypatch.setenv("K3_STATE_DIR", str(root / ".state"))
    memory = Memory(root)
    memory.keep("ledger", "k", True)
    assert memory.recall("ledger", "k") is None
    assert not (root / ".state").exists()


def test_a_state_folder_that_cannot_be_written_costs_only_time(root, published, state, monkeypatch):
    """Without a place for the cache the answers are the same."""
    good = statuses(root, evidence=root / "ledger" / "evidence")
    monkeypatch.setenv("K3_STATE_DIR", str(published / "no folder"))
    assert statuses(root, evidence=root / "ledger" / "evidence") == good
    assert lies(root) == ([], "")


def test_another_judge_judges_again(root, published, state, later, monkeypatch, tmp_path):
    """What an older version of this package concluded is not taken over by a newer one."""
    statuses(root, evidence=root / "ledger" / "evidence")
    memory = Memory(root)
    before = memory.of_folder(root / "ledger" / "evidence")
    shutil.copytree(CODE, tmp_path / "code", ignore=shutil.ignore_patterns("evidence", "__pycache__"))
    make.edit(tmp_path / "code", "judge.py", "is_machine_fault or one.is_open", "is_open")
    monkeypatch.setattr("ledger.memory.CODE", tmp_path / "code")
    assert Memory(root).of_folder(root / "ledger" / "evidence") != before


def test_an_edited_ledger_is_found_after_a_clean_look(root, ledger, published, later):
    """A row edited in the ledger file, or left in its log, is found although the ledger was clean a moment ago."""
    assert lies(root, ledger)[0] == []
    connection = sqlite3.connect(ledger)
    connection.execute("DROP TRIGGER record_no_update")
    connection.execute("UPDATE record SET outcome = 'failed'")
    connection.commit()  # stays in the write-ahead log: the main file is as it was
    assert any("its records were edited" in lie for lie in lies(root, ledger)[0])
    connection.close()
    assert any("its records were edited" in lie for lie in lies(root, ledger)[0])


@pytest.mark.parametrize("command", [["claims"], ["matrix", "--check"], ["verify"]], ids=" ".join)
def test_the_published_evidence_is_read_fast_again(command):
    """Over this very project's evidence, the second time, a command costs less than 0.3 s of processor."""
    code = (
        "import sys, time; from ledger.cli import main; main(sys.argv[1:]); print(time.process_time(), file=sys.stderr)"
    )
    project = Path(__file__).resolve().parents[2]
    spent = []
    for _ in range(4):
        done = subprocess.run([sys.executable, "-c", code, *command], cwd=project, capture_output=True, text=True)
        spent.append(float(done.stderr.split()[-1]))
    assert min(spent[1:]) < 0.3
