"""`k3-harness tune` without a GPU: the choices it reads from a cache, writes for fla, and what it keeps."""

import json

import pytest

from harness import tune
from harness.cluster import Cluster
from harness.spec import HarnessError

SLOW = {"kwargs": {"BT": 64}, "num_warps": 8, "num_stages": 2, "num_ctas": 1}
QUICK = {"kwargs": {"BT": 16}, "num_warps": 4, "num_stages": 3, "num_ctas": 1}


def entry(folder, name, key, timings):
    (folder / name).mkdir(parents=True)
    record = {"key": key, "configs_timings": timings}
    (folder / name / "some_kernel.autotune.json").write_text(json.dumps(record))


@pytest.fixture
def cache(tmp_path):
    """A cache with one kernel tuned at a short and at a long shape, and an entry that no run uses."""
    entry(tmp_path, "short", [1, "torch.bfloat16"], [[SLOW, [0.01, 0.01, 0.01]], [QUICK, [0.02, 0.02, 0.02]]])
    entry(tmp_path, "long", [9, "torch.bfloat16"], [[SLOW, [8.0, 8.0, 8.0]], [QUICK, [4.0, 4.0, 4.0]]])
    (tmp_path / "unused").mkdir()
    (tmp_path / "long/some_kernel.ptx").write_text("text")
    return tmp_path


def test_choices(cache):
    """For every kernel and key the fastest configuration by its median."""
    found = [(key[0], best["kwargs"]["BT"]) for _, key, best, _ in tune.tuned(cache)]
    assert sorted(found) == [(1, 64), (9, 16)]


def test_fla_configs(cache):
    """Each key keeps its own choice; keys never seen take that of the longest run."""
    tune.write_fla_configs(cache)
    found = json.loads((cache / "fla/some_kernel.json").read_text())
    assert found["default_config"] == QUICK
    assert {tuple(e["autotune_key"]): e["config"]["kwargs"]["BT"] for e in found["autotune_entries"].values()} == {
        (1, "torch.bfloat16"): 64, (9, "torch.bfloat16"): 16,
    }  # fmt: skip


def test_digest_is_of_the_choices(cache):
    """The identity of a number changes with a choice and not with a time."""
    before = tune.digest(cache)
    path = cache / "long/some_kernel.autotune.json"
    path.write_text(path.read_text().replace("8.0", "9.0"))
    assert tune.digest(cache) == before
    path.write_text(path.read_text().replace("9.0", "1.0"))
    assert tune.digest(cache) != before


def test_prune(cache):
    """Unused entries go, intermediate code goes, choices in fla's form stay."""
    tune.write_fla_configs(cache)
    tune.prune(cache, {"short", "long"})
    assert sorted(path.name for path in cache.iterdir()) == ["fla", "long", "short"]
    assert [path.name for path in (cache / "long").iterdir()] == ["some_kernel.autotune.json"]


def test_profile_names_the_folder():
    """The folder comes from the cluster profile; one that names none is told how to."""
    assert tune.folder_of(Cluster(cache_folders={"TRITON_CACHE_DIR": "/scratch/k3"})) == "/scratch/k3"
    with pytest.raises(HarnessError, match="--folder"):
        tune.folder_of(Cluster(name="plain"))
