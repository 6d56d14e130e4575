"""`k3-harness exec`: runs a packed plan where it was carried to, with that host's own scheduler if it has one.

Needs neither git nor network. The folder it leaves is complete: carried back, it is ingested as if it had run here.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from rich.console import Console

from harness import cluster as clusters
from harness import pack, spool
from harness.journal import Order
from harness.progress import Board
from harness.slurm import save_cluster
from harness.submit import executor
from harness.watch import follow


def configure(parser: argparse.ArgumentParser) -> None:
    """Arguments of `k3-harness exec`."""
    parser.add_argument("file", type=Path, help="what k3-harness pack wrote")
    parser.add_argument("--cluster", default="local", help="a cluster profile of this host: its name or its path")
    parser.add_argument("-o", "--output", type=Path, help="also write the finished run as one file, to carry back")


def command(options: argparse.Namespace) -> int:
    """Check every file, submit, watch, collect."""
    cluster = clusters.find(options.cluster)
    run_dir = pack.unpack(options.file, spool.runs_dir(cluster.spool))
    pack.use_inputs(run_dir, run_dir / "snapshot")
    save_cluster(run_dir, cluster)
    orders = [Order(expected.job, 0) for expected in spool.read_run(run_dir).expected]
    executor(cluster).submit(run_dir, cluster, orders)
    with Board(Console(highlight=False), run_dir) as board:
        follow(run_dir, board.show, ingest=False)
    if options.output:
        pack.write(run_dir, options.output)
    print(f"finished: {options.output or run_dir}; at home: k3-harness collect --stored PATH")
    return 0
