"""Forgeries that need no key but some care: each hid or invented something once, and is found by name now."""

import hashlib
import json
import sqlite3
import time

import pytest

from ledger import chain, export, matrix, signing, verify
from ledger.claims import statuses
from ledger.ingest import ingest
from ledger.record import encode
from tests.ledger import make
from tests.ledger.test_redteam import CELL, JOB, outcome, tamper

pytestmark = pytest.mark.usefixtures("cold_and_warm")


def allow(root):
    key = signing.public_file(signing.own_signer(), "me", "lab")
    (root / "ledger" / "keys" / "me.json").write_bytes(encode(key))


@pytest.fixture
def two_files(root, spool, ledger):
    """A failure and a later pass, both published and sealed; returns the failure's file."""
    bad = make.run(root, spool, cells=[CELL], number=1)
    bad.lines("test_end", JOB, 1)[0]["outcome"] = "failed"
    ingest(bad.write(), ledger)
    ingest(make.run(root, spool, cells=[CELL], number=2).write(), ledger)
    export.export(root, ledger)
    allow(root)
    assert list(verify.published(root)) == []
    return root / "ledger" / "evidence" / f"{bad.head['run']}.jsonl"


def listing(path, names, signatures=()):
    """An index of some files, written without the key."""
    files = {name: hashlib.sha256((path.parent / name).read_bytes()).hexdigest() for name in names}
    envelope = signing.seal(signing.statement(files, {"files": len(files)}, export.INDEX_TYPE))
    path.write_bytes(encode({"envelope": envelope | {"signatures": list(signatures)}}))


def test_an_index_without_its_signature_is_named(root, two_files):
    """A failure is deleted and the index rewritten to forget it, its signature stripped."""
    index = next(two_files.parent.glob("index-*.json"))
    two_files.unlink()
    listing(index, [path.name for path in two_files.parent.glob("*.jsonl")])
    assert any(f"{index.name}: not signed by the key it is named after" in lie for lie in verify.published(root))


def test_sealed_files_under_another_index_are_named(root, two_files):
    """A failure is deleted and the rest listed in an unsigned index of its own, in place of the sealed one."""
    next(two_files.parent.glob("index-*.json")).unlink()
    two_files.unlink()
    rest = [path.name for path in two_files.parent.glob("*.jsonl")]
    listing(two_files.parent / "index-unsigned.json", rest)
    assert any(f"{rest[0]}: sealed by me, and no index of that key lists it" in lie for lie in verify.published(root))


def test_an_older_failure_is_not_hidden_by_one_of_the_future(root, spool, ledger, two_files):
    """A failure dated tomorrow says nothing today, and does not take the place of the real one."""
    assert [s.state for s in statuses(root, ledger) if s.topology == "gloo2"] == ["flaky"]
    forged = make.run(root, spool, cells=[CELL], number=3)
    forged.lines("test_end", JOB, 1)[0]["outcome"] = "failed"
    forged.head["created_at"] = time.time() + 86_400
    ingest(forged.write(), ledger)
    assert [s.state for s in statuses(root, ledger) if s.topology == "gloo2"] == ["flaky"]


def test_an_older_failure_is_not_hidden_by_another_recorder(root, spool, ledger, two_files):
    """Nor does a failure of another recorder version, which has expired by definition."""
    forged = make.run(root, spool, cells=[CELL], number=3)
    forged.lines("test_end", JOB, 1)[0]["outcome"] = "failed"
    forged.head["recorder"] = 2
    ingest(forged.write(), ledger)
    assert [s.state for s in statuses(root, ledger) if s.topology == "gloo2"] == ["flaky"]


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [("ranks = 2\nbackend = \"gloo\"\n[topologies.nodes2]", "ranks = 8\nbackend = \"gloo\"\n[topologies.nodes2]",
      "gloo2 is 8 ranks, the run had 2"),
     ("[topologies.gloo2]\n", "[topologies.gloo2]\nnodes = 2\n", "gloo2 is 2 nodes, the run had 1"),
     ("[topologies.gloo2]\n", "[topologies.gloo2]\ndevice = \"cuda\"\n", "gloo2 is cuda, the run had cpu")],
)  # fmt: skip
def test_a_topology_renamed_after_the_run_expires(root, spool, ledger, old, new, words):
    """A topology that means more ranks, nodes or another transport than it did is not proven by what ran before."""
    ingest(make.run(root, spool, cells=[CELL]).write(), ledger)
    make.edit(root, "suites/claims.toml", old, new)
    found = next(s for s in statuses(root, ledger) if s.topology == "gloo2")
    assert (found.state, words in found.expired_by) == ("expired", True)


def test_forged_facts_of_a_real_file_are_named(root, spool, ledger, two_files, tmp_path):
    """Facts of an imported, sealed file rewritten in the ledger, its whole chain computed anew."""
    other = tmp_path / "other.db"
    export.import_files(root, [two_files], other)
    assert list(verify.lies(root, other)) == []
    rewrite = "UPDATE fact SET outcome = 'passed', body = replace(body, '\"failed\"', '\"passed\"')"
    tamper(other, rewrite)
    rechain(other)
    assert any("is not what its imported file says" in lie for lie in verify.lies(root, other))


def rechain(ledger):
    """Bind whatever facts there are, as the writer would have."""
    with sqlite3.connect(ledger) as connection:
        rows = connection.execute("SELECT seq, run, source, generation, ingested_at, faults FROM entry").fetchall()
        previous, statements = chain.GENESIS, []
        for seq, run, source, generation, at, faults in rows:
            bodies = connection.execute("SELECT body FROM fact WHERE source = ? ORDER BY rowid", (source,)).fetchall()
            content = chain.Content()
            content.add("evidence", source)
            content.add("facts", [json.loads(body) for (body,) in bodies])
            row = (seq, run, source, generation, at, faults, content.digest())
            previous = chain.link(previous, row)
            statements.append(f"UPDATE entry SET content = '{row[-1]}', link = '{previous}' WHERE seq = {seq}")
    tamper(ledger, *statements)


def test_a_forged_body_under_its_own_digest_is_named(root, ledger, two_files, tmp_path):
    """An imported file whose text was edited in the ledger and renamed to its new digest."""
    other = tmp_path / "other.db"
    export.import_files(root, [two_files], other)
    body = two_files.read_text().replace('"outcome":"failed"', '"outcome":"passed"', 1)
    name = hashlib.sha256(body.encode()).hexdigest()
    edit = 'body = replace(body, \'"outcome":"failed"\', \'"outcome":"passed"\')'
    tamper(other, f"UPDATE evidence SET {edit}, digest = '{name}'", f"UPDATE fact SET source = '{name}'",
           f"UPDATE entry SET source = '{name}'")  # fmt: skip
    rechain(other)
    assert any("the chain is broken" in lie and "imported evidence" in lie for lie in verify.lies(root, other))


def thin(made, keep):
    """Leave only some pieces in every closure, so that nothing else could expire it."""
    for line in made.lines("test_end", JOB):
        line["closure"] = {key: value for key, value in line["closure"].items() if keep(key)}


ATTACKS = {
    "record the suite alone": (lambda made: thin(made, lambda key: key.startswith("suites/")),
                               "recorded nothing of k3/__init__.py, which it imports"),
    "record no constants": (lambda made: thin(made, lambda key: key != "k3/ops.py::<module>"),
                            "recorded nothing of k3/ops.py, which it imports"),
    "record another test's body": (lambda made: thin(made, lambda key: "::test_" not in key),
                                   "test_grad recorded no code of its own"),
    "say that nothing was collected": (lambda made: [line.update(collected=[]) for line in made.lines("end", JOB)],
                                       "was planned and not collected on the node"),
}  # fmt: skip


@pytest.mark.parametrize("name", ATTACKS)
def test_evidence_that_could_not_expire_is_named(root, spool, ledger, name):
    """A run whose records leave out what would expire or contradict them proves nothing."""
    attack, words = ATTACKS[name]
    made = make.run(root, spool, cells=[CELL])
    attack(made)
    assert words in outcome(made, ledger)


def test_a_countersigned_file_is_not_a_second_cluster(root, spool, ledger):
    """One run, sealed by two allowed keys that speak for two clusters, is still one run on one cluster."""
    from securesystemslib.dsse import Envelope
    from securesystemslib.signer import CryptoSigner

    ingest(make.run(root, spool, cells=[CELL], scheduler="slurm").write(), ledger)
    export.export(root, ledger)
    second = CryptoSigner.generate_ed25519()
    for signer, name in ((signing.own_signer(), "alpha"), (second, "beta")):
        key = signing.public_file(signer, name, f"cluster-{name}")
        (root / "ledger" / "keys" / f"{name}.json").write_bytes(encode(key))
    file = next((root / "ledger" / "evidence").glob("*.jsonl"))
    *lines, last = file.read_bytes().rstrip(b"\n").split(b"\n")
    envelope = Envelope.from_dict(json.loads(last)["envelope"])
    envelope.sign(second)
    file.write_bytes(b"\n".join([*lines, encode({"envelope": envelope.to_dict()})]) + b"\n")
    found = next(s for s in statuses(root, evidence=file.parent) if s.topology == "gloo2")
    assert (found.state, found.sealed, found.witness) == ("proven", True, "T1")


def test_kills_that_nobody_signed_are_marked(root, spool, ledger):
    """A kill rate raised by an unsigned file of a sabotage run says so beside the number."""
    allow(root)
    rows = []
    for number, signed in ((1, True), (2, False)):
        noticed = make.run(root, spool, cells=[CELL], number=number, sabotage="scan.off_by_one")
        noticed.lines("test_end", JOB, 1)[0]["outcome"] = "failed" if number == 2 else "passed"
        ingest(noticed.write(), ledger)
        export.export(root, ledger, [noticed.head["run"]], signed=signed)
        found = statuses(root, evidence=root / "ledger" / "evidence")
        rows.append(next(line for line in matrix.block(found).splitlines() if "| cpu 2 ranks, gloo |" in line))
    assert [row.rsplit("|", 2)[1].strip() for row in rows] == ["0%", "100% unsealed"]
