"""A planned run in one file: what comes out is what went in, or nothing does. No scheduler needed."""

from __future__ import annotations

import gzip
import json
import tarfile

import pytest

from tests.harness import toy as toys


@pytest.fixture
def home(tmp_path, monkeypatch):
    """A user with a small project, and a packed run of it."""
    made = toys.make(tmp_path)
    monkeypatch.chdir(made.root)
    done = made.run("pack", "quick", "-o", str(tmp_path / "run.k3pack.tar.gz"))
    assert done.returncode == 0, done.stderr
    return made


def packed(home):
    return home.root.parent / "run.k3pack.tar.gz"


def test_packing_leaves_nothing_behind(home):
    """Planning for another host leaves no run here."""
    assert packed(home).stat().st_size > 0
    assert home.runs == []


def test_runs_there_and_is_ingested_here(home, tmp_path):
    """Without a scheduler the packed run uses the local executor; at home its folder is ingested as it is."""
    back = tmp_path / "back.tar.gz"
    done = home.run("exec", str(packed(home)), "-o", str(back))
    assert done.returncode == 0, done.stdout + done.stderr
    home.state.rename(tmp_path / "the-other-host")
    assert home.run("collect", str(back), "--stored").returncode == 0
    cells = json.loads(home.run("claims", "--json", module="ledger.cli").stdout)
    assert [(cell["state"], cell["witness"]) for cell in cells] == [("proven", "T0")]


def test_twice_is_refused(home):
    """A run is unpacked once; afterwards it is to be collected, not started again."""
    assert home.run("exec", str(packed(home))).returncode == 0
    again = home.run("exec", str(packed(home)))
    assert again.returncode == 2 and "exists already" in again.stderr


@pytest.mark.parametrize(
    "old, new, text",
    [
        (b"assert double(2) == 4", b"assert double(2) != 5", "suites/toy.py changed"),
        (b"return 2 * x", b"return 3 * x", "k3/math.py changed"),
    ],
)
def test_edited_on_the_way(home, old, new, text):
    """A pack in which one file was edited is refused by that file's name before anything of it runs."""
    raw = gzip.decompress(packed(home).read_bytes())
    assert raw.count(old) == 1
    packed(home).write_bytes(gzip.compress(raw.replace(old, new)))
    done = home.run("exec", str(packed(home)))
    assert done.returncode == 2 and text in done.stderr
    assert home.runs == []


@pytest.mark.parametrize("kind", ["outside", "link"])
def test_escape(home, tmp_path, kind):
    """A pack with a file beside the run, or with a link in it, is refused by name, and nothing is written."""
    evil = tmp_path / "evil.tar.gz"
    with tarfile.open(packed(home)) as old, tarfile.open(evil, "w:gz") as new:
        for member in old:
            new.addfile(member, old.extractfile(member) if member.isfile() else None)
        name = "../beside" if kind == "outside" else f"{old.getnames()[0]}/beside"
        extra = tarfile.TarInfo(name)
        if kind == "link":
            extra.type, extra.linkname = tarfile.SYMTYPE, "/etc/passwd"
        new.addfile(extra)
    done = home.run("exec", str(evil))
    assert done.returncode == 2 and "beside, which is no plain file of the run" in done.stderr, done.stderr
    assert home.runs == []


def test_cut_short(home):
    """A file that was not carried over whole is refused, and nothing of it stays."""
    data = packed(home).read_bytes()
    packed(home).write_bytes(data[: len(data) // 2])
    done = home.run("exec", str(packed(home)))
    assert done.returncode == 2 and "carry it over again" in done.stderr
    assert home.runs == []
