"""The console script `k3-harness`. Knows the commands by name and imports only the one that was asked for.

A command is a module with `configure(parser)` and `command(options) -> exit code`.
"""

from __future__ import annotations

import argparse
import importlib
import sys

COMMANDS = {
    "plan": ("harness.planning", "say what must run, why, and what it costs; submit nothing"),
    "run": ("harness.run", "plan, submit, watch, collect, and show the matrix"),
    "submit": ("harness.submit", "plan and submit; collect later, from any shell"),
    "status": ("harness.status", "how each job of a run is doing"),
    "watch": ("harness.watch", "follow a run to its end"),
    "logs": ("harness.logs", "what a job's ranks printed"),
    "cancel": ("harness.cancel", "end jobs of a run"),
    "collect": ("harness.collect", "bring a run home into the ledger; resumes from anything"),
    "bench": ("harness.repeat", "time benchmarks in fresh processes, in turn with another commit's"),
    "pack": ("harness.pack", "put plan and snapshot into one file for a host without network"),
    "exec": ("harness.execute", "run a packed plan where it was carried to"),
    "tune": ("harness.tune", "warm and keep the kernels' tuned configurations"),
    "doctor": ("harness.doctor", "check a cluster profile against the real scheduler and a node"),
    "verify": ("harness.verify", "ask the scheduler again about a run"),
}
USAGE_ERROR = 2


def main(arguments: list[str] | None = None) -> int:
    """Run one command. Errors of the caller or of the machine are one line and exit code 2."""
    arguments = sys.argv[1:] if arguments is None else arguments
    parser = argparse.ArgumentParser(prog="k3-harness", description="Send claims to a scheduler, bring records home.")
    subparsers = parser.add_subparsers(dest="name", metavar="COMMAND", required=True)
    wanted = next((word for word in arguments if not word.startswith("-")), "")
    for name, (module, text) in COMMANDS.items():
        subparser = subparsers.add_parser(name, help=text, description=text)
        if name == wanted:
            command = importlib.import_module(module)
            command.configure(subparser)
    options = parser.parse_args(arguments)
    return _guarded(command, options)


def _guarded(command, options: argparse.Namespace) -> int:
    try:
        return command.command(options)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except (ValueError, OSError, RuntimeError) as error:
        if not _is_told(error):
            raise
        print(f"error: {error}", file=sys.stderr)
        return USAGE_ERROR


def _is_told(error: Exception) -> bool:
    """Errors that our packages raise to be read; anything else is a fault of ours and keeps its traceback."""
    return type(error).__module__.split(".")[0] in ("harness", "ledger") or isinstance(error, OSError)


if __name__ == "__main__":
    sys.exit(main())
