"""A save that is killed, runs out of disk or meets a read-only file system leaves the old or the new checkpoint.

A refusal by name counts too, but only where the next `recover` makes the new checkpoint complete. Processes are real:
forked, saving for real, and killed with SIGKILL.
"""

import errno
import os
import random
import signal
import subprocess
import time
from collections import Counter
from contextlib import contextmanager

import pytest
import torch

from k3.checkpoint import CheckpointError, load_hf_weights, recover, save_hf_weights
from suites import ckpt_folders as folders

LIMIT = 25_000  # several shards a layer, so that replacing them takes a while


def _save(folder, seed):
    model = folders.model(torch.bfloat16, seed=seed)
    save_hf_weights(model, folder, model.config, target="mxfp4", max_shard_size_bytes=LIMIT)


def _expected(folder, seed):
    """What loading a complete save of this seed gives."""
    _save(folder, seed)
    return _load(folder)


def _load(folder):
    model = folders.model(torch.bfloat16, seed=0)
    load_hf_weights(model, folder, model.config)
    return dict(model.state_dict())


def _child(body) -> int:
    """Fork a process that runs `body` and exits; return its pid."""
    pid = os.fork()
    if pid == 0:
        torch.set_num_threads(1)
        code = 1
        try:
            body()
            code = 0
        finally:
            os._exit(code)
    return pid


def _judge(folder, old, new) -> str:
    """Say what the folder holds: the old, the new, or a refusal that `recover` turns into the new; else fail."""
    try:
        found = _load(folder)
    except CheckpointError as refusal:
        assert "k3-save-in-progress.json" in str(refusal), refusal
        assert recover(folder)
        folders.assert_same_bytes(_load(folder), new)
        return "refused"
    kind = "new" if torch.equal(*(d["language_model.lm_head.weight"] for d in (found, new))) else "old"
    folders.assert_same_bytes(found, new if kind == "new" else old)
    return kind


def test_killed_at_50_random_moments(tmp_path):
    """Fifty saves over an older checkpoint are killed at random moments; each leaves one of the two, whole."""
    old, new = _expected(tmp_path / "old", 1), _expected(tmp_path / "new", 2)
    started = time.monotonic()
    _save(tmp_path / "timing", 2)
    duration_s = time.monotonic() - started
    moments, seen = random.Random(17), Counter()
    for _ in range(50):
        _save(tmp_path / "folder", 1)
        pid = _child(lambda: _save(tmp_path / "folder", 2))
        time.sleep(moments.uniform(0, 1.2 * duration_s))
        os.kill(pid, signal.SIGKILL)
        seen[os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), _judge(tmp_path / "folder", old, new)] += 1
    assert seen[-signal.SIGKILL, "old"] >= 5, seen


def _save_dying(folder, number, after):
    """Save, and be killed before or after the rename of this number."""
    rename, left = os.replace, iter(range(1, number + 1))

    def dying(source, target):
        last = next(left, None) == number
        if last and not after:
            os.kill(os.getpid(), signal.SIGKILL)
        rename(source, target)
        if last:
            os.kill(os.getpid(), signal.SIGKILL)

    os.replace = dying
    _save(folder, 2)


@pytest.mark.parametrize("after", [False, True])
def test_killed_at_every_rename(after, tmp_path):
    """Killed just before or just after any of its renames, a save leaves one of the two checkpoints, whole."""
    old, new = _expected(tmp_path / "old", 1), _expected(tmp_path / "new", 2)
    seen, number = Counter(), 0
    while not seen[0]:
        number += 1
        _save(tmp_path / "folder", 1)
        pid = _child(lambda number=number: _save_dying(tmp_path / "folder", number, after))
        seen[os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])] += 1
        seen[_judge(tmp_path / "folder", old, new)] += 1
    assert seen["old"] >= 10 and seen["refused"] >= 10, seen


def test_first_save_into_a_new_folder(tmp_path):
    """A first save killed before its end leaves a folder that is refused as incomplete, and the next save succeeds."""
    pid = _child(lambda: _save_dying(tmp_path / "folder", 5, True))
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
    with pytest.raises(CheckpointError, match="not a complete checkpoint"):
        _load(tmp_path / "folder")
    folders.assert_same_bytes(_expected(tmp_path / "folder", 2), _expected(tmp_path / "other", 2))
    assert not [path for path in (tmp_path / "folder").iterdir() if path.name.startswith(".k3")]


@contextmanager
def _tmpfs(path, size_kib):
    """A small file system of its own at `path`."""
    path.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size_kib}k", "tmpfs", str(path)], capture_output=True, text=True
    )
    if mounted.returncode:
        pytest.skip(f"mounting a tmpfs needs privileges: {mounted.stderr.strip()}")
    try:
        yield path
    finally:
        subprocess.run(["umount", str(path)], check=True)


def test_full_disk_keeps_the_old_checkpoint(tmp_path):
    """Out of space in the middle of a save: a clear error, the old checkpoint whole, and no staged files left."""
    old = _expected(tmp_path / "old", 1)
    size_kib = sum(path.stat().st_size for path in (tmp_path / "old").iterdir()) // 1024
    with _tmpfs(tmp_path / "disk", size_kib * 8 // 5) as disk:
        _save(disk / "folder", 1)
        with pytest.raises(CheckpointError, match=os.strerror(errno.ENOSPC)):
            _save(disk / "folder", 2)
        folders.assert_same_bytes(_load(disk / "folder"), old)
        assert not (disk / "folder/.k3-save").exists()


def test_read_only_file_system(tmp_path):
    """On a read-only file system a save fails by name and the checkpoint can still be loaded."""
    old = _expected(tmp_path / "old", 1)
    with _tmpfs(tmp_path / "disk", 10_000) as disk:
        _save(disk / "folder", 1)
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        with pytest.raises(CheckpointError, match=os.strerror(errno.EROFS)):
            _save(disk / "folder", 2)
        folders.assert_same_bytes(_load(disk / "folder"), old)


def test_two_saves_at_once(tmp_path):
    """A second save into a folder that is being written is refused and disturbs nothing."""
    from k3.checkpoint import commit

    lock = commit.begin(tmp_path)
    with pytest.raises(CheckpointError, match="another save is writing"):
        _save(tmp_path, 1)
    assert (tmp_path / commit.STAGING).is_dir()
    commit.release(tmp_path, lock)
