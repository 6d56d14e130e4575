"""Attacks on the evidence, each by name: every one is detected, and the detection says what was done.

Three places to lie: the run directory before it is ingested, the ledger file, and the published files.
"""

import hashlib
import json
import shutil
import sqlite3
import time

import pytest

from ledger import evidence, export, matrix, signing, verify
from ledger.claims import statuses
from ledger.cli import main
from ledger.ingest import ingest
from ledger.record import encode
from ledger.runs import IngestError
from tests.ledger import make

pytestmark = pytest.mark.usefixtures("cold_and_warm")
JOB = "gloo2.kda.golden"
CELL = ("kda.golden", "gloo2")


def outcome(made, ledger):
    """Ingest a forged run; what it says of the cell."""
    facts = ingest(made.write(), ledger).facts
    assert all(fact.outcome != "passed" for fact in facts)
    return facts[0].reason


# --- run directories --------------------------------------------------------------------------------------------


def set_start(**changes):
    return lambda made: made.lines("start", JOB, 1)[0].update(changes)


def set_end(**changes):
    return lambda made: made.lines("test_end", JOB, 1)[0].update(changes)


def set_environment(**changes):
    return lambda made: made.lines("environment", JOB, 1)[0].update(changes)


def set_attempt(**changes):
    return lambda made: made.jobs[JOB]["attempts"][0].update(changes)


def drop_line(kind):
    def attack(made):
        lines = made.ranks[JOB, 0, 1]
        lines.remove(made.lines(kind, JOB, 1)[0])

    return attack


def copy_rank(made):
    """Rank 0's records, handed in as rank 1's."""
    made.ranks[JOB, 0, 1] = [{**line, "rank": 1} if line["kind"] == "start" else line for line in made.ranks[JOB, 0, 0]]


def add_rank(made):
    made.ranks[JOB, 0, 2] = made.ranks[JOB, 0, 1]


def print_success_by_hand(made):
    """A success line typed into the stream of a rank that never started the test."""
    lines = made.ranks[JOB, 0, 1]
    lines.remove(made.lines("test_start", JOB, 1)[0])


def replay(made):
    """Records of an older run, renamed."""
    for rank in range(2):
        for line in made.ranks[JOB, 0, rank]:
            if "time" in line:
                line["time"] -= 100_000


def reorder(made):
    lines = made.ranks[JOB, 0, 1]
    lines[2:6] = lines[4:6] + lines[2:4]


def report_twice(made):
    lines = made.ranks[JOB, 0, 1]
    lines[4:4] = [line | {"time": line["time"] + 0.7} for line in lines[2:4]]


def swap_hosts(made):
    """Two ranks that say they ran on another machine each, where one was asked for."""
    made.lines("environment", JOB, 1)[0]["fingerprint"]["node"] = "n2"


def swap_toolchain(made):
    made.lines("environment", JOB, 1)[0]["fingerprint"]["torch"] = "2.99.0"


def drop_from_plan(made):
    """The test that would fail is taken out of plan, job and records; the node still found it."""
    test = "suites/kda_suite.py::test_grad"
    for tests in (made.head["expected"][0]["tests"], made.jobs[JOB]["tests"]):
        tests.remove(test)
    for lines in made.ranks.values():
        lines[:] = [line for line in lines if line.get("test") != test]


def drop_from_plan_and_collection(made):
    drop_from_plan(made)
    for line in made.lines("end"):
        line["collected"].remove("suites/kda_suite.py::test_grad")


def drop_from_collection(made):
    made.lines("end", JOB, 1)[0]["collected"].pop()


def other_closure(made):
    """The recorder's closure names code that is not the snapshot's."""
    made.lines("test_end", JOB, 1)[0]["closure"]["k3/kda.py::kda"] = "0" * 32


def no_closure(made):
    for line in made.lines("test_end", JOB, 1):
        line["closure"] = {}


def edit_job(made):
    made.jobs[JOB]["tests"] = made.jobs[JOB]["tests"][:1]


def other_nonce_job(made):
    made.jobs[JOB]["nonce"] = "feedfacefeedface"


def stray_attempt(made):
    made.ranks[JOB, 1, 0] = made.ranks[JOB, 0, 0]


def smaller_manifest(made):
    """The manifest is edited to hide a file; the snapshot's hash stays."""
    made.head["manifest"].pop("k3/ops.py")


def other_topology(made):
    """The job ran on one rank and the record calls it two."""
    made.ranks.pop((JOB, 0, 1))
    made.lines("start", JOB, 0)[0]["world_size"] = 1


def take_another_path(made):
    for line in made.lines("test_end", JOB, 1):
        line["paths"] = ["torch.slow"]


RUNS = {
    "forge a rank by copying another": (copy_rank, "process 1000 wrote the records of 2 ranks"),
    "forge a rank too many": (add_rank, "rank 2: records of a rank beyond the planned 2"),
    "drop the failing rank's file": (lambda made: made.ranks.pop((JOB, 0, 1)), "rank 1: no records of this rank"),
    "claim a topology that did not run": (other_topology, "lost on rank 1"),
    "say another world size": (set_start(world_size=8), "world size is 8, planned was 2"),
    "replay an old run under a new id": (replay, "an old record was replayed"),
    "use another run's records": (set_start(run="20200101t000000-00000000"), "run is 20200101t000000-00000000"),
    "use another submission's nonce": (set_start(nonce="0123456789abcdef"), "nonce is 0123456789abcdef"),
    "use another job's records": (set_start(job="cpu1.moe.route"), "job is cpu1.moe.route"),
    "use another attempt's records": (set_start(attempt=3), "attempt is 3, planned was 0"),
    "swap two ranks' files": (set_start(rank=0), "rank is 0, planned was 1"),
    "change code between plan and run": (set_start(snapshot="f" * 64), "snapshot is ffffffffffffffff"),
    "record with another recorder": (set_start(recorder=9), "recorder version is 9"),
    "drop the start line": (drop_line("start"), "0 start, 1 environment"),
    "drop the end line": (drop_line("end"), "no end line; the records are cut short"),
    "drop a test's line": (drop_line("test_end"), "lost on rank 1"),
    "hide the environment": (drop_line("environment"), "never reported its environment"),
    "print a success by hand": (print_success_by_hand, "has an outcome and never started"),
    "report a test twice": (report_twice, "reported 2 times"),
    "report a test that was not planned": (set_end(test="suites/x.py::test_y"), "lost on rank 1"),
    "reorder the lines": (reorder, "goes back in time"),
    "take longer than the clock": (set_end(duration_s=50.0), "took 50.0 s"),
    "turn a test into a skip": (set_end(outcome="skipped"), "skipped on rank 1"),
    "call a failure expected": (set_end(outcome="xfailed"), "xfailed on rank 1"),
    "end in the future": (lambda made: made.lines("end", JOB, 1)[0].update(time=9e9), "record of the future"),
    "run on another device": (set_environment(device="cuda:0"), "device is cuda, the topology asks for cpu"),
    "run over another transport": (set_environment(backend="nccl"), "backend is nccl, the topology asks for gloo"),
    "import the live tree": (set_environment(modules={"k3": "/elsewhere/k3"}), "imported k3 from outside the snapshot"),
    "swap the host": (swap_hosts, "ranks ran on 2 nodes, the topology asks for 1"),
    "swap the toolchain of a rank": (swap_toolchain, "different toolchains"),
    "drop a test from the plan": (drop_from_plan, "nothing was planned for suites/kda_suite.py::test_grad"),
    "drop a test everywhere": (drop_from_plan_and_collection, "nothing was planned for suites/kda_suite.py::test_grad"),
    "drop a test from collection": (drop_from_collection, "was planned and not collected on the node"),
    "run other code than the snapshot's": (other_closure, "k3/kda.py::kda ran with other code than the snapshot's"),
    "record no closure": (no_closure, "recorded no closure"),
    "edit the job's tests": (edit_job, "its tests differs from the plan's"),
    "forge a job of another submission": (other_nonce_job, "its nonce differs from the plan's"),
    "slip in an attempt": (stray_attempt, "attempt 1 left records and the collector knows no such attempt"),
    "edit the manifest": (smaller_manifest, "the manifest in run.json does not hash to its snapshot"),
    "hide an exit code": (set_attempt(rank_exit_codes={"0": 0, "1": 137}), "rank 1: exited 137"),
    "leave out an exit code": (set_attempt(rank_exit_codes={"0": 0}), "the launcher reported no exit code"),
    "call a failed attempt good": (set_attempt(state="failed"), "attempt 0 is failed"),
    "take another path": (take_another_path, "fell back to torch.slow on rank 1"),
}  # fmt: skip


@pytest.mark.parametrize("name", RUNS)
def test_forged_run_is_named(root, spool, ledger, name):
    """A forged run directory proves nothing, and the reason names the forgery."""
    attack, words = RUNS[name]
    made = make.run(root, spool, cells=[CELL])
    attack(made)
    assert words in outcome(made, ledger)


@pytest.mark.parametrize("gpu", ["swap", "share"])
def test_forged_gpus_are_named(root, spool, ledger, gpu):
    """Two ranks that saw one GPU, or none, did not run on two."""
    made = make.run(root, spool, cells=[("kda.golden", "cuda2")])
    for line in made.lines("environment"):
        line["fingerprint"]["gpus"] = [{"name": "NVIDIA H200", "uuid": "GPU-1"}] if gpu == "share" else []
    said = outcome(made, ledger)
    assert ("2 ranks saw 1 different GPUs" if gpu == "share" else "no GPU is visible") in said


def test_edited_snapshot_is_named(root, spool, ledger):
    """A model file edited in the snapshot after planning is found when the run is ingested."""
    made = make.run(root, spool, cells=[CELL])
    made.write()
    (made.folder / "snapshot" / "k3" / "ops.py").write_text("def scan(x):\n    return 0\n")
    facts = ingest(made.folder, ledger).facts
    assert facts[0].reason == "snapshot file k3/ops.py was edited after planning"


def test_forged_job_is_named(root, spool, ledger):
    """A job that is in the directory and not in the plan is named, and the run proves nothing."""
    made = make.run(root, spool, cells=[CELL])
    made.write()
    shutil.copytree(made.folder / "jobs" / JOB, made.folder / "jobs" / "gloo2.extra")
    assert ingest(made.folder, ledger).facts[0].reason == "job gloo2.extra is in the run directory and not in the plan"


def test_replay_under_another_id_is_refused(root, spool, ledger, clean):
    """A copied run directory under a new run id has the old nonce."""
    head = clean.head | {"run": "20990101t000000-00000000"}
    clean.head, clean.folder = head, spool / head["run"]
    with pytest.raises(IngestError, match="a replay under another name is refused"):
        ingest(clean.write(), ledger)


@pytest.mark.parametrize(
    ("change", "words"),
    [(lambda text: text.replace("passed", "failed", 1), "changed after they were ingested"),
     (lambda text: text[:-100], "changed after they were ingested"), (None, "are gone")],
)  # fmt: skip
def test_records_changed_after_ingest_are_refused(clean, ledger, change, words):
    """Edited, truncated or deleted records of an ingested run are refused when it is ingested again."""
    file = clean.file("cpu1.kda.golden")
    file.unlink() if change is None else file.write_text(change(file.read_text()))
    with pytest.raises(IngestError, match=words):
        ingest(clean.folder, ledger)


def test_new_head_for_an_old_run_is_refused(clean, ledger):
    """A run.json that says clean where it said dirty is another head, and refused."""
    clean.head["commit"] = "d" * 40
    with pytest.raises(IngestError, match="a run's head never changes"):
        ingest(clean.write(), ledger)


# --- the ledger file --------------------------------------------------------------------------------------------


def tamper(ledger, *statements):
    """Edit rows as one with the file in hand can: drop the guards, edit, put them back."""
    connection = sqlite3.connect(ledger)
    guards = connection.execute("SELECT name, sql FROM sqlite_master WHERE type = 'trigger'").fetchall()
    for name, _ in guards:
        connection.execute(f"DROP TRIGGER {name}")
    for statement in statements:
        connection.execute(statement)
    for _, sql in guards:
        connection.execute(sql)
    connection.commit()
    connection.close()


LEDGER = {
    "edit an outcome": ("UPDATE record SET outcome = 'passed' WHERE line = 4", "its records were edited"),
    "edit a duration": ("UPDATE record SET duration_s = 0.1", "its records were edited"),
    "delete a record": ("DELETE FROM record WHERE line = 4", "its records were edited, added or deleted"),
    "insert a record": ("INSERT INTO record SELECT stream, 99, test, 'passed', 1, time, begun, '', closure, detail "
                        "FROM record LIMIT 1", "its records were edited, added or deleted"),
    "delete a stream": ("DELETE FROM stream WHERE rank = 1", "refers to a row of stream that is gone"),
    "edit a closure": ("UPDATE blob SET body = replace(body, 'k3/kda.py', 'k3/xxx.py')", "a closure was edited"),
    "edit the run": ("UPDATE run SET dirty = 0, commit_id = 'abc'", "its columns do not say what its record says"),
    "edit the run's record": ("""UPDATE run SET record = replace(record, '"dirty":false', '"dirty":true')""",
                              "its rows are not those that were ingested"),
    "edit an attempt": ("UPDATE attempt SET exit_code = 5", "its attempts are not those of its record"),
    "edit a job": ("UPDATE job SET record = replace(record, 'n1', 'n2')", "its rows are not those that were ingested"),
    "edit a fact": ("""UPDATE fact SET outcome = 'passed', body = replace(body, '"failed"', '"passed"')""",
                    "its rows are not those that were ingested"),
    "insert a fact": ("INSERT INTO fact SELECT source, run, 7, claim, topology, 'passed', created_at, claim_digest,"
                      " closure, toolchain, 'T1', sabotage, body FROM fact", "that no entry binds"),
    "delete the last entry": ("DELETE FROM entry WHERE seq = 2", "that no entry binds"),
    "delete the first entry": ("DELETE FROM entry WHERE seq = 1", "entry 1 is gone"),
    "reorder entries": ("UPDATE entry SET seq = CASE seq WHEN 1 THEN 12 ELSE 11 END", "entry 1 is gone"),
    "edit an entry": ("UPDATE entry SET ingested_at = 1.0 WHERE seq = 1", "the chain is broken"),
    "insert a run": ("INSERT INTO run SELECT 'x', 'y', created_at, snapshot, commit_id, dirty, sabotage, recorder,"
                     " cluster, tree, record, substr(digest, 2) || 'f' FROM run LIMIT 1", "run x that no entry binds"),
    "loosen a table": ("ALTER TABLE attempt ADD COLUMN extra TEXT", "table attempt is not as the schema has it"),
}  # fmt: skip


@pytest.fixture
def two_runs(root, spool, ledger):
    """A failed run and a clean one in the ledger."""
    bad = make.run(root, spool, cells=[CELL], number=1)
    bad.lines("test_end", JOB, 1)[0]["outcome"] = "failed"
    ingest(bad.write(), ledger)
    ingest(make.run(root, spool, cells=[CELL], number=2).write(), ledger)
    return ledger


@pytest.mark.parametrize("name", LEDGER)
def test_edited_ledger_is_named(two_runs, root, name):
    """Rows edited behind the guards' back are found by verify, by name."""
    statement, words = LEDGER[name]
    assert list(verify.lies(root, two_runs)) == []
    tamper(two_runs, statement)
    assert any(words in lie for lie in verify.lies(root, two_runs))


def test_dropped_guard_is_named(two_runs, root):
    """A ledger whose trigger was dropped, or replaced by one that does nothing, is named."""
    connection = sqlite3.connect(two_runs)
    connection.execute("DROP TRIGGER fact_no_update")
    connection.execute("CREATE TRIGGER fact_no_update BEFORE UPDATE ON fact BEGIN SELECT 1; END")
    connection.commit()
    assert "trigger fact_no_update is altered" in next(verify.lies(root, two_runs))


@pytest.mark.parametrize("name", ["rank0.jsonl", "rank0.log"])
def test_edited_artifacts_are_named(root, spool, ledger, name):
    """Records and logs in the run directory that were edited after ingest are found."""
    made = make.run(root, spool)
    made.write()
    folder = made.file("cpu1.kda.golden").parent
    (folder / "rank0.log").write_text("1 failed\n")
    ingest(made.folder, ledger)
    assert list(verify.lies(root, ledger, spool)) == []
    (folder / name).write_text("1 passed\n")
    assert any(f"{name} was edited after it was ingested" in lie for lie in verify.lies(root, ledger, spool))


# --- published files --------------------------------------------------------------------------------------------


@pytest.fixture
def published(root, spool, ledger):
    """A sealed evidence file of a clean run; returns its path."""
    made = make.run(root, spool, cells=[CELL])
    ingest(made.write(), ledger)
    done = export.export(root, ledger)
    key = signing.public_file(signing.own_signer(), "me", "lab")
    (root / "ledger" / "keys" / "me.json").write_bytes(encode(key))
    assert list(verify.published(root)) == []
    return root / "ledger" / "evidence" / done.files[0]


def lines_of(path):
    return path.read_text().splitlines(keepends=True)


def chained(path):
    """Forge well: recompute every link and the envelope, without the key."""
    link, out = "0" * 64, []
    entries = [json.loads(line)["entry"] for line in lines_of(path)[:-1]]
    for entry in entries:
        raw = encode(entry)
        link = hashlib.sha256(link.encode() + raw).hexdigest()
        out.append(b'{"entry":' + raw + b',"link":"' + link.encode() + b'"}')
    return link, out, len(entries)


def forge(path, change, signer=None, keep_signature=False):
    """Change one entry and rebuild chain and envelope; sign with another key, or paste the old signature."""
    old = json.loads(lines_of(path)[-1])["envelope"]
    texts = [json.loads(line) for line in lines_of(path)[:-1]]
    change([text["entry"] for text in texts])
    path.write_text("".join(json.dumps(text) + "\n" for text in texts) + lines_of(path)[-1])
    link, out, count = chained(path)
    head = json.loads(out[0])["entry"]["record"]
    subjects = {f"run/{head['run']}": link, "snapshot": head["snapshot"]}
    said = {"schema": "1.0", "recorder": 1, "entries": count}
    statement = signing.statement(subjects, said, evidence.PREDICATE_TYPE)
    envelope = signing.seal(statement, signer)
    if keep_signature:
        envelope["signatures"] = old["signatures"]
    path.write_bytes(b"\n".join([*out, encode({"envelope": envelope})]) + b"\n")


def fail_to_pass(entries):
    """What a forger wants: a kinder history."""
    for entry in entries:
        if entry["kind"] == "record":
            entry["row"]["duration_s"] = 0.25


def test_edited_line_is_named(published, root):
    """An edited line breaks the chain at its own number."""
    lines = lines_of(published)
    place = next(number for number, line in enumerate(lines) if '"machine_fault":false' in line)
    lines[place] = lines[place].replace('"machine_fault":false', '"machine_fault":true')
    published.write_text("".join(lines))
    assert f"{published.name} line {place + 1}: the chain is broken" in next(verify.published(root))


@pytest.mark.parametrize("attack", ["delete", "reorder", "truncate", "append"])
def test_moved_lines_are_named(published, root, attack):
    """Deleting, moving, cutting or adding lines breaks the chain or the envelope's count."""
    lines = lines_of(published)
    if attack == "delete":
        del lines[2]
    elif attack == "reorder":
        lines[2], lines[3] = lines[3], lines[2]
    elif attack == "truncate":
        lines = lines[:-3]
    else:
        lines.insert(-1, lines[-2])
    published.write_text("".join(lines))
    lie = next(verify.published(root))
    assert any(words in lie for words in ("chain is broken", "no envelope", "not an entry", "cut short"))


def test_dropping_the_last_entries_is_named(published, root):
    """A chain that ends early does not fit the statement that was signed."""
    lines = lines_of(published)
    published.write_text("".join([*lines[:-2], lines[-1]]))
    assert "lines were dropped, added or exchanged" in next(verify.published(root))


def test_pasted_signature_is_named(published, root):
    """A rebuilt file with the old signature pasted in: the signature does not fit."""
    forge(published, fail_to_pass, keep_signature=True)
    assert "the signature of me does not fit the file" in next(verify.published(root))


def test_unknown_key_is_named(published, root):
    """A rebuilt file signed by another key is no seal, and verify names the key."""
    from securesystemslib.signer import CryptoSigner

    forge(published, fail_to_pass, signer=CryptoSigner.generate_ed25519())
    assert "a key that ledger/keys/ does not list" in next(verify.published(root))
    assert not any(s.sealed for s in statuses(root, evidence=published.parent))


def test_stripped_signature_unseals(published, root):
    """A rebuilt file without a signature is unsealed in the matrix, and the index that listed it disagrees."""
    forge(published, fail_to_pass)
    assert not any(s.sealed for s in statuses(root, evidence=published.parent))
    assert any("not the file that index-" in lie for lie in verify.published(root))


def test_forged_closure_is_named(published, root):
    """A file whose closure is renamed to another digest does not hash to its name."""

    def rename(entries):
        next(e for e in entries if e["kind"] == "closure")["digest"] = "a" * 64

    forge(published, rename)
    assert "does not hash to its name" in next(verify.published(root))


def test_forged_tree_cannot_match(published, root):
    """Editing the published pieces to fit a changed tree contradicts the closures' digests."""
    make.edit(root, "k3/ops.py", "x + 1", "x + 2")

    def fit(entries):
        tree = next(e for e in entries if e["kind"] == "tree" and e["file"] == "k3/ops.py")
        tree["pieces"]["scan"] = "0" * 32

    forge(published, fit)
    assert "does not hash to its name" in next(verify.published(root))


def test_forged_manifest_is_named(published, root):
    """A manifest that does not hash to the snapshot is named."""
    forge(published, lambda entries: entries[0]["record"]["manifest"].popitem())
    assert "the manifest does not hash to the snapshot" in next(verify.published(root))


def test_deleted_file_is_named(published, root):
    """A published file that is gone is missed by the signed index."""
    published.unlink()
    assert "lists it and it is gone: evidence was deleted" in next(verify.published(root))


def test_added_file_is_named(published, root):
    """A file under another name, or one that no index lists, is named."""
    shutil.copy(published, published.with_name("20990101t000000-00000000.jsonl"))
    assert "a file is named after its run" in next(verify.published(root))


def test_forged_index_is_named(published, root):
    """An index edited to forget a file carries a signature that does not fit."""
    index = next(published.parent.glob("index-*.json"))
    envelope = json.loads(index.read_text())["envelope"]
    envelope["payload"] = signing.seal(signing.statement({}, {"files": 0}, export.INDEX_TYPE))["payload"]
    index.write_text(json.dumps({"envelope": envelope}))
    published.unlink()
    assert any("does not fit the file" in lie for lie in verify.published(root))


def test_key_file_with_a_foreign_id_is_named(published, root):
    """A key file that borrows an allowed key's id is refused."""
    from securesystemslib.signer import CryptoSigner

    key = signing.public_file(CryptoSigner.generate_ed25519(), "mallory")
    forged = {**json.loads(encode(key)), "keyid": signing.own_signer().public_key.keyid}
    (root / "ledger" / "keys" / "mallory.json").write_text(json.dumps(forged))
    assert "its keyid is not the digest of its key" in next(verify.published(root))


def test_forged_agreement_is_named(root, spool, ledger):
    """A published run whose scheduler contradicts its ranks is named by verify."""
    made = make.run(root, spool, cells=[CELL], scheduler="slurm")
    made.lines("start", JOB, 1)[0]["scheduler_env"]["SLURM_JOB_ID"] = "999"
    ingest(made.write(), ledger)
    export.export(root, ledger, [made.head["run"]])
    assert any("scheduler disagrees: rank 1 ran in job 999" in lie for lie in verify.published(root))


def test_edited_matrix_is_named(published, root, capsys):
    """A README edited by hand differs from what evidence and tree say: a diff, and exit 1."""
    options = ["--root", str(root)]
    assert main(["matrix", "--write", *options]) == 0
    assert main(["matrix", "--check", *options]) == 0
    readme = root / "README.md"
    readme.write_text(readme.read_text().replace("⚪ unproven: never run", "🟢 proven on torch 9", 1))
    capsys.readouterr()
    assert main(["matrix", "--check", *options]) == 1
    assert "-| `kda.golden`" in capsys.readouterr().out
    assert matrix.BEGIN in readme.read_text()


def test_dirty_tree_cannot_pass_for_clean(root, spool, ledger):
    """Saying clean in a dirty tree changes nothing: freshness is by content, and the dirty files give it away."""
    make.edit(root, "k3/ops.py", "x + 1", "x + 2")
    made = make.run(root, spool, cells=[CELL])
    made.head["dirty_files"] = ["k3/ops.py"]
    ingest(made.write(), ledger)
    make.edit(root, "k3/ops.py", "x + 2", "x + 1")
    found = next(s for s in statuses(root, ledger=ledger) if s.topology == "gloo2")
    assert found.expired_by == "k3/ops.py: scan changed"
    assert any("says clean and lists 1 dirty files" in lie for lie in verify.lies(root, ledger))


def test_run_of_the_future_is_refused(root, spool, ledger):
    """Evidence dated tomorrow proves nothing today, and verify names it."""
    made = make.run(root, spool, cells=[CELL])
    made.head["created_at"] = time.time() + 86_400
    ingest(made.write(), ledger)
    assert all(s.state != "proven" for s in statuses(root, ledger=ledger))
    assert any("a run of the future" in lie for lie in verify.lies(root, ledger))
