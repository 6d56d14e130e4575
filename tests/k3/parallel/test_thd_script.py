"""The packed context-parallel example as its users start it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


@pytest.mark.slow
def test_script_under_torchrun():
    """`K3_CP_SIZE=2 torchrun ... -m suites.thd_cp` runs both ways of splitting on two ranks and prints their losses."""
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=2",
        "-m",
        "suites.thd_cp",
    ]
    env = os.environ | {"K3_CP_SIZE": "2", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    lines = [line for line in done.stdout.splitlines() if line.startswith("cp_size=2 ranks=2")]
    assert ["headwise" in lines[0], "state" in lines[1]] == [True, True]
    losses = [float(line.split("loss=")[1].split()[0]) for line in lines]
    assert losses[0] == pytest.approx(losses[1], rel=1e-9)
