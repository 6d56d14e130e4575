"""The snapshot: what is in it, what is not, and that nothing changes in it unseen."""

import stat
import subprocess

import pytest

from harness import revision
from harness.spec import HarnessError


def git(toy, *arguments):
    """Run git in the toy tree."""
    subprocess.run(["git", "-C", str(toy.root), "-c", "user.name=t", "-c", "user.email=t@t", *arguments], check=True,
                   capture_output=True)  # fmt: skip


@pytest.fixture
def committed(toy):
    """The toy under git, with one ignored pattern."""
    toy.write(".gitignore", "*.secret\n__pycache__/\n")
    git(toy, "init", "-q")
    git(toy, "add", "-A")
    git(toy, "commit", "-qm", "start")
    return toy


def test_clean_tree(committed, tmp_path):
    """A clean tree names its commit and no dirty file; every copy is read-only."""
    taken = revision.take(committed.root, tmp_path / "copy")
    assert len(taken.commit) == 40
    assert taken.dirty_files == ()
    assert not (tmp_path / "copy" / "k3" / "math.py").stat().st_mode & stat.S_IWUSR


def test_dirty_and_untracked(committed, tmp_path):
    """Changed, untracked and deleted files are taken as they are now, and named; ignored files stay out."""
    committed.write("k3/math.py", "def double(x): return x + x\n")
    committed.write("k3/fresh.py", "VALUE = 1\n")
    committed.write("k3/key.secret", "hush")
    (committed.root / "k3" / "paths.py").unlink()
    taken = revision.take(committed.root, tmp_path / "copy")
    assert taken.dirty_files == ("k3/fresh.py", "k3/math.py", "k3/paths.py")
    assert (tmp_path / "copy" / "k3" / "math.py").read_text() == "def double(x): return x + x\n"
    assert "k3/fresh.py" in taken.manifest
    assert not {"k3/key.secret", "k3/paths.py"} & set(taken.manifest)


def test_only_what_runs(committed, tmp_path):
    """README, tests and published evidence are in no snapshot, so that editing them changes no hash."""
    before = revision.take(committed.root, tmp_path / "before").hash
    committed.write("README.md", "new words")
    committed.write("tests/test_x.py", "")
    committed.write("ledger/evidence/a.json", "{}")
    after = revision.take(committed.root, tmp_path / "after")
    assert after.hash == before
    assert after.dirty_files == ()


def test_without_git(toy, tmp_path):
    """Without git the tree is walked; caches and hidden files stay out, and no commit is claimed."""
    toy.write("k3/__pycache__/math.pyc", "x")
    toy.write("k3/.hidden", "x")
    taken = revision.take(toy.root, tmp_path / "copy")
    assert (taken.commit, taken.dirty_files) == ("", ())
    assert "k3/math.py" in taken.manifest
    assert not [path for path in taken.manifest if "pycache" in path or "hidden" in path]


def test_same_content_same_hash(toy, committed, tmp_path):
    """The hash is of names and contents alone: with git or without, here or there."""
    first = revision.take(committed.root, tmp_path / "first").hash
    subprocess.run(["rm", "-rf", str(committed.root / ".git")], check=True)
    assert revision.take(committed.root, tmp_path / "second").hash == first


def test_differences(toy, tmp_path):
    """A changed, a missing and an added file are each named; hidden byte code of the subject counts as added."""
    taken = revision.take(toy.root, tmp_path / "copy")
    (taken.path / "k3" / "math.py").chmod(0o644)
    (taken.path / "k3" / "math.py").write_text("")
    (taken.path / "suites" / "ranks.py").unlink()
    (taken.path / "k3" / "__pycache__").mkdir()
    (taken.path / "k3" / "__pycache__" / "math.cpython-311.pyc").write_bytes(b"")
    found = revision.differences(taken.manifest, taken.path)
    assert found == ["k3/__pycache__/math.cpython-311.pyc added", "k3/math.py changed", "suites/ranks.py missing"]


def test_find_root(toy, tmp_path):
    """The project is found from any folder below it."""
    assert revision.find_root(toy.root / "k3") == toy.root


def test_ignored_claims(committed, tmp_path):
    """A tree whose claims git ignores is refused with the reason."""
    committed.write(".gitignore", "suites/\n")
    git(committed, "rm", "-rq", "--cached", "suites")
    with pytest.raises(HarnessError, match="is it ignored by git"):
        revision.take(committed.root, tmp_path / "copy")
