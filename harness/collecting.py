"""The tiny pytest plugin behind `discover`: writes every collected test, and every collection error, as JSON."""

from __future__ import annotations

import json
import os


class Collector:
    """Collects node ids, `ranks` markers and errors of one `pytest --collect-only`."""

    def __init__(self):
        self.items, self.errors = [], []

    def pytest_collectreport(self, report):
        if report.failed:
            self.errors.append({"file": report.nodeid, "text": str(report.longrepr)})
        elif report.skipped:
            self.errors.append({"file": report.nodeid, "text": f"skipped as a whole: {report.longrepr[2]}"})

    def pytest_collection_finish(self, session):
        self.items = [{"id": item.nodeid, "ranks": _ranks(item)} for item in session.items]

    def pytest_sessionfinish(self):
        with open(os.environ["K3_COLLECT_TO"], "w") as file:
            json.dump({"items": self.items, "errors": self.errors}, file)


def pytest_configure(config):
    config.pluginmanager.register(Collector(), "k3-collector")


def _ranks(item) -> list[int]:
    return [int(count) for marker in item.iter_markers("ranks") for count in marker.args[:1]]
