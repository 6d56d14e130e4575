"""What a test used: executed lines per test context, and on a GPU the kernels that ran. One tracer a rank.

Turning lines into hashed pieces is `ledger.closure`'s work.
"""

from __future__ import annotations

from contextlib import contextmanager
from pathlib import Path

from coverage import Coverage

IMPORTING = ""  # coverage's own name for what ran outside every context
KERNEL_NAME_LENGTH = 200


class Tracer:
    """Line coverage of k3 and suites inside the snapshot, kept apart by test."""

    def __init__(self, tree: Path, data_file: Path):
        self.tree = tree
        subjects = [f"{tree}/k3/*", f"{tree}/suites/*"]
        self.coverage = Coverage(data_file=str(data_file), config_file=False, include=subjects, messages=False)
        self.coverage.set_option("run:core", "ctrace")  # sys.monitoring cannot switch contexts
        self.coverage.set_option("run:disable_warnings", ["no-data-collected", "module-not-imported"])
        self.coverage.start()

    @contextmanager
    def test(self, name: str):
        """Attribute what runs inside to `name`."""
        self.coverage.switch_context(name)
        try:
            yield
        finally:
            self.coverage.switch_context(IMPORTING)

    @contextmanager
    def paused(self):
        """Trace nothing inside: for timing."""
        self.coverage.stop()
        try:
            yield
        finally:
            self.coverage.start()

    def lines(self, name: str) -> dict[str, set[int]]:
        """Executed lines of one context: path relative to the snapshot -> line numbers."""
        data = self.coverage.get_data()
        data.set_query_context(name)
        found = {path: set(data.lines(path) or ()) for path in data.measured_files()}
        return {str(Path(path).relative_to(self.tree)): lines for path, lines in found.items() if lines}

    def save(self) -> None:
        """Stop, and keep the data file."""
        self.coverage.stop()
        self.coverage.save()


@contextmanager
def kernels(device: str):
    """Yield a list that holds, afterwards, the names of the device kernels that ran; empty on a CPU.

    Of a test that profiles by itself nothing is seen: there is one profiler a process, and the test's ends ours.
    """
    names: list[str] = []
    if device != "cuda":
        yield names
        return
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    profiler = profile(activities=[ProfilerActivity.CUDA], acc_events=True)
    profiler.start()
    try:
        yield names
    finally:
        ended = _ended_already(profiler)
    seen = set() if ended else {event.name for event in profiler.events() if event.device_type == DeviceType.CUDA}
    names += sorted(name[:KERNEL_NAME_LENGTH] for name in seen)


def _ended_already(profiler) -> bool:
    """Stop a profiler; True when another one of this process had ended it."""
    try:
        profiler.stop()
    except RuntimeError as error:
        if "when it's not running" not in str(error):
            raise
        return True
    return False
