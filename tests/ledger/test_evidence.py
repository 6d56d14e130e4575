"""Published evidence: deterministic, private, sealed, merged in any order."""

import itertools
import json
import shutil
import sqlite3

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ledger import evidence, export, signing, verify
from ledger.claims import statuses
from ledger.db import connect_read
from ledger.ingest import ingest
from ledger.load import load_run
from ledger.record import encode
from tests.ledger import make

CELLS = [("kda.golden", "cpu1"), ("kda.golden", "nodes2"), ("moe.route", "cpu1")]


def allow(root, label="me", cluster="lab"):
    """List this user's key as one that may seal."""
    key = signing.public_file(signing.own_signer(), label, cluster)
    (root / "ledger" / "keys" / f"{label}.json").write_bytes(encode(key))


@pytest.fixture
def made(root, spool, ledger):
    found = make.run(root, spool, cells=CELLS, scheduler="slurm")
    ingest(found.write(), ledger)
    return found


def test_export_is_deterministic(made, root, ledger):
    """The same ledger and key give the same bytes; a second export changes nothing."""
    first = export.export(root, ledger)
    file = root / "ledger" / "evidence" / first.files[0]
    data = file.read_bytes()
    assert export.export(root, ledger).changed == ()
    file.unlink()
    assert export.export(root, ledger).changed == first.files
    assert file.read_bytes() == data


def test_evidence_says_what_the_ledger_says(made, root, ledger):
    """States and grades computed from the file alone equal those of the ledger it came from."""
    export.export(root, ledger)
    local = statuses(root, ledger=ledger)
    published = statuses(root, evidence=root / "ledger" / "evidence")
    assert [(s.id, s.topology, s.state, s.witness) for s in local] == [
        (s.id, s.topology, s.state, s.witness) for s in published
    ]
    assert sum(s.witness == "T1" for s in published) == 3


def test_seal_needs_an_allowed_key(made, root, ledger):
    """A signed file is sealed only once its key is a file under ledger/keys/."""
    export.export(root, ledger)
    folder = root / "ledger" / "evidence"
    assert not any(s.sealed for s in statuses(root, evidence=folder))
    allow(root)
    assert [s.sealed for s in statuses(root, evidence=folder) if s.state == "proven"] == [True] * 3


def test_unsigned_export_is_unsealed(made, root, ledger):
    """Without a signature the file still counts, unsealed."""
    allow(root)
    export.export(root, ledger, signed=False)
    found = statuses(root, evidence=root / "ledger" / "evidence")
    assert [s.sealed for s in found if s.state == "proven"] == [False] * 3


SECRETS = ["secret-host", "alice", "/home/alice", "10.1.2.3", "fe80:0:0:1", "GPU-n1", "n1|", "alice@example.org",
           "projectx", "login7", "lab-a100"]  # fmt: skip


def poison(made):
    """Put people, machines and paths wherever a real run has them."""
    for start in made.lines("start"):
        start["scheduler_env"] |= {"SLURM_JOB_USER": "alice", "SLURM_SUBMIT_DIR": "/home/alice/k3",
                                   "SLURM_SUBMIT_HOST": "login7", "SLURM_JOB_ACCOUNT": "projectx"}  # fmt: skip
    for env in made.lines("environment"):
        env["fingerprint"]["env"] |= {"HOME": "/home/alice", "TRITON_CACHE_DIR": "/home/alice/.triton"}
    for end in made.lines("test_end"):
        end["message"] = "File /home/alice/k3/kda.py:3 on secret-host-n1 at 10.1.2.3 and fe80:0:0:1, alice@example.org"
    for job in made.jobs.values():
        job["note"] = "seen by alice on login7 in /home/alice"
        job["cluster"] = "lab-a100"
        job["answers"][0]["output"] = job["answers"][0]["output"].replace("|root|", "|projectx|")
        job["answers"].append({"command": ["scontrol", "show"], "asked_at": 1.0, "exit_code": 0,
                               "output": "UserId=alice(1) WorkDir=/home/alice", "error": "login7"})  # fmt: skip
    made.head["cluster"] = "lab-a100"


def test_nothing_private_is_published(root, spool, ledger):
    """No path, user, address, account, host or device id of a run is in its file; its verdicts are the same."""
    made = make.run(root, spool, cells=[*CELLS, ("kda.golden", "cuda2")], scheduler="slurm")
    poison(made)
    ingest(made.write(), ledger)
    export.export(root, ledger)
    folder = root / "ledger" / "evidence"
    text = "".join(path.read_text() for path in folder.iterdir())
    assert [secret for secret in SECRETS if secret in text] == []
    assert {s.state for s in statuses(root, evidence=folder) if s.run} == {"proven"}


def test_two_machines_can_be_told_apart(made, root, ledger):
    """Pseudonyms keep machines distinct, and differ under another secret so that none can be guessed."""
    with sqlite3.connect(ledger) as connection:
        run = load_run(connection, made.head["run"])
    texts = [export.publishable(run, secret=secret)[1] for secret in (b"a" * 32, b"b" * 32)]
    nodes = [{n for e in map(json.loads, t.splitlines()[:-1]) if e["entry"]["kind"] == "job"
              for a in e["entry"]["record"]["attempts"] for n in a["nodes"]} for t in texts]  # fmt: skip
    assert [len(found) for found in nodes] == [2, 2]
    assert not nodes[0] & nodes[1]


def test_leaks_stop_the_export(root, spool, ledger, monkeypatch):
    """What would still give a name away is not written at all."""
    monkeypatch.setattr("socket.gethostname", lambda: "kda_suite")
    ingest(make.run(root, spool).write(), ledger)
    with pytest.raises(export.ExportError, match="would publish 'kda_suite'"):
        export.export(root, ledger)
    assert list((root / "ledger" / "evidence").glob("*.jsonl")) == []


def test_private_key_is_private(state):
    """The key and the secret are made on first use, once, readable by their owner alone."""
    first = signing.own_signer().public_key.keyid
    assert signing.own_signer().public_key.keyid == first
    assert signing.own_secret() == signing.own_secret()
    assert [oct(path.stat().st_mode)[-3:] for path in sorted((state / "keys").iterdir())] == ["600", "600"]


@pytest.fixture
def files(root, spool, ledger, tmp_path):
    """Four evidence files: two passes, a failure and a sabotage."""
    for number in (1, 2, 3, 4):
        made = make.run(root, spool, number=number, sabotage="s" if number == 4 else "")
        if number == 3:
            made.lines("test_end")[0]["outcome"] = "failed"
        ingest(made.write(), ledger)
    folder = tmp_path / "files"
    with sqlite3.connect(ledger) as connection:
        runs = [run for (run,) in connection.execute("SELECT run FROM run ORDER BY run")]
    export.export(root, ledger, runs, folder)
    return sorted(folder.glob("*.jsonl"))


def content(ledger):
    """What a ledger says, less the order in which it was told."""
    connection = sqlite3.connect(ledger)
    queries = ("SELECT * FROM evidence", "SELECT source, body FROM fact")
    return [sorted(connection.execute(query).fetchall()) for query in queries]


COUNT = itertools.count()


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(order=st.lists(st.integers(0, 3), min_size=1, max_size=8))
def test_merge_is_idempotent_and_commutative(files, root, tmp_path, order):
    """Any order and any repetition of the same files gives the same ledger and the same statuses."""
    ledgers = [tmp_path / f"m{next(COUNT)}.db" for _ in range(2)]
    for index in order:
        export.import_files(root, [files[index]], ledgers[0])
    export.import_files(root, [files[index] for index in sorted(set(order))], ledgers[1])
    assert content(ledgers[0]) == content(ledgers[1])
    assert statuses(root, ledger=ledgers[0]) == statuses(root, ledger=ledgers[1])


def test_import_is_all_or_nothing(files, root, tmp_path):
    """One forged file among good ones: none is taken in."""
    bad = files[1].read_text().replace('"outcome":"passed"', '"outcome":"failed"', 1)
    files[1].write_text(bad)
    with pytest.raises(evidence.EvidenceError, match="chain is broken"):
        export.import_files(root, files, tmp_path / "other.db")
    assert not (tmp_path / "other.db").exists()


def test_second_cluster_under_second_key_is_t2(root, spool, ledger, state):
    """The same claim confirmed by two schedulers under keys declared for two clusters reads T2, under one key T1."""
    folder = root / "ledger" / "evidence"
    for number, who in enumerate(("alpha", "beta"), start=1):
        shutil.rmtree(state / "keys", ignore_errors=True)
        made = make.run(root, spool, number=number, scheduler="slurm")
        ingest(made.write(), ledger)
        export.export(root, ledger, [made.head["run"]])
        allow(root, who, f"cluster-{who}")
        found = next(s for s in statuses(root, evidence=folder) if s.state == "proven")
        assert found.witness == ("T1" if number == 1 else "T2")


def test_imported_evidence_keeps_its_seal(made, root, ledger, tmp_path):
    """In another ledger the imported file is judged and sealed as in the folder."""
    allow(root)
    export.export(root, ledger)
    export.import_files(root, [root / "ledger" / "evidence"], tmp_path / "other.db")
    found = [s for s in statuses(root, ledger=tmp_path / "other.db") if s.state == "proven"]
    assert [(s.sealed, s.witness) for s in found] == [(True, "T1")] * 3
    assert connect_read(tmp_path / "other.db").execute("SELECT count(*) FROM run").fetchone() == (0,)


def test_sealed_after_unsealed(made, root, ledger):
    """A file first published unsigned and then signed is listed once; an unsigned export does not undo a seal."""
    export.export(root, ledger, signed=False)
    export.export(root, ledger)
    allow(root)
    assert list(verify.published(root)) == []
    done = export.export(root, ledger, signed=False)
    assert (done.files, done.foreign) == ((), (f"{made.head['run']}.jsonl",))
    assert list(verify.published(root)) == []


def test_prune_removes_what_decides_nothing(made, root, spool, ledger):
    """A newer run of the same cells makes the older file superfluous; pruning removes it from folder and index."""
    export.export(root, ledger)
    newer = make.run(root, spool, cells=CELLS, scheduler="slurm", number=2)
    ingest(newer.write(), ledger)
    done = export.export(root, ledger, prune=True)
    assert (done.files, done.removed) == ((f"{newer.head['run']}.jsonl",), (f"{made.head['run']}.jsonl",))
    assert [lie for lie in verify.published(root) if "does not list" not in lie] == []
