"""k3.checkpoint.commit: staging, the journal, and replaying it from any point."""

import json

import pytest

from k3.checkpoint import commit
from k3.checkpoint.errors import CheckpointError
from k3.checkpoint.index import INDEX_FILE
from k3.checkpoint.source import JOURNAL, SINGLE_FILE

OLD, NEW = "model-00001-of-000002.safetensors", "model-00001-of-000001.safetensors"


def _old(folder):
    for name in (OLD, SINGLE_FILE, INDEX_FILE, "config.json", "tokenizer.json"):
        (folder / name).write_text("old")


def _stage(folder):
    lock = commit.begin(folder)
    for name in (NEW, INDEX_FILE, "config.json"):
        (folder / commit.STAGING / name).write_text("new")
    commit.release(folder, lock)


def _names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_commit_replaces_weights_and_leaves_the_rest(tmp_path):
    """After a commit the new files are there, old weights are gone, and files that are no weights stay."""
    _old(tmp_path)
    _stage(tmp_path)
    commit.commit(tmp_path, [NEW, "config.json", INDEX_FILE])
    assert _names(tmp_path) == sorted([NEW, INDEX_FILE, "config.json", "tokenizer.json"])
    assert all((tmp_path / name).read_text() == "new" for name in (NEW, INDEX_FILE, "config.json"))


def test_abandoned_save_changes_nothing(tmp_path):
    """Abandoning before the commit removes what was staged and nothing else."""
    _old(tmp_path)
    before = _names(tmp_path)
    _stage(tmp_path)
    commit.abandon(tmp_path)
    assert _names(tmp_path) == before and (tmp_path / INDEX_FILE).read_text() == "old"


def _stopped_after_one_rename(folder):
    _old(folder)
    _stage(folder)
    journal = {"files": [NEW, "config.json", INDEX_FILE], "remove": [OLD, SINGLE_FILE]}
    (folder / JOURNAL).write_text(json.dumps(journal))
    (folder / commit.STAGING / NEW).rename(folder / NEW)


@pytest.mark.parametrize("finish", ["recover", "next save"])
def test_interrupted_commit_is_finished(finish, tmp_path):
    """`recover` or the next save finishes what the journal says; abandoning does not throw staged files away."""
    _stopped_after_one_rename(tmp_path)
    commit.abandon(tmp_path)
    if finish == "recover":
        assert commit.recover(tmp_path) and not commit.recover(tmp_path)
    else:
        commit.release(tmp_path, commit.begin(tmp_path))
        commit.abandon(tmp_path)
    assert _names(tmp_path) == sorted([NEW, INDEX_FILE, "config.json", "tokenizer.json"])
    assert (tmp_path / INDEX_FILE).read_text() == "new"


def test_lost_staged_file_is_named(tmp_path):
    """When a staged file is neither staged nor published any more, recovery refuses by its name."""
    _stopped_after_one_rename(tmp_path)
    (tmp_path / NEW).unlink()
    with pytest.raises(CheckpointError, match=NEW):
        commit.recover(tmp_path)


def test_leftovers_of_a_killed_save_are_cleared(tmp_path):
    """What an earlier, killed save had staged does not reach the next one."""
    _stage(tmp_path)
    (tmp_path / commit.STAGING / "stray").touch()
    lock = commit.begin(tmp_path)
    assert not list((tmp_path / commit.STAGING).iterdir())
    commit.release(tmp_path, lock)
