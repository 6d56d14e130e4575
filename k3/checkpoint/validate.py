"""`k3-validate-checkpoint`: prove that a folder is the release its configuration describes, or name what is not.

Stages, each needing the one before: pin, index, headers, payloads. A report is written, atomically, only when all that
were asked for passed; a mismatch ends with exit code 1 and the tensor's name. Stages before the payloads import no
torch, and argparse is used because richer libraries take longer to import than an index to audit.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

from k3.checkpoint.errors import CheckpointError
from k3.checkpoint.index import INDEX_FILE, audit, read_index
from k3.checkpoint.pins import check_pin, find_pin, sha256_of
from k3.checkpoint.release import Release
from k3.checkpoint.source import JOURNAL, Source, refuse_interrupted
from k3.checkpoint.writer import write_durably

SCHEMA = "1.0"
PROVES = {
    "index": "names, shards and total bytes of the index; no shard was opened",
    "headers": "layout only: names, dtypes, shapes and places of every tensor; no payload was read",
    "payloads": "layout, and that every tensor survives public -> native -> public byte for byte",
}


def main(argv: list[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    argv = sys.argv[1:] if argv is None else argv
    command = COMMANDS.get(argv[0]) if argv else None
    try:
        if command is not None:
            return command(argv[1:])
        return _validate_command(argv)
    except (CheckpointError, ValueError, NotImplementedError, OSError) as error:
        print(f"refused: {error}", file=sys.stderr)
        return 1


def validate(
    folder: str | Path, depth: str = "payloads", pin: str | None = None, *, jobs: int = 2, resume: Path | None = None
) -> dict[str, Any]:
    """Return the report of a folder that passed. Raises CheckpointError for the first stage that does not.

    `depth` is "index", "headers" or "payloads"; `resume` is where finished shards are remembered between runs.
    """
    started, folder = time.monotonic(), Path(folder)
    refuse_interrupted(folder)
    release = Release.from_folder(folder)
    report = _check_index(folder, release, pin)
    if depth != "index":
        with Source.open(folder) as source:
            report["ignored_by_text_model"] = len(source.check(release.config))
            if depth == "payloads":
                from k3.checkpoint.payloads import check_payloads

                report |= check_payloads(source, release, jobs=jobs, resume=resume, identity=report["index_sha256"])
    return {"schema": SCHEMA, "depth": depth, "proves": PROVES[depth], **report, "duration_s": _since(started)}


def _check_index(folder: Path, release: Release, pin: str | None) -> dict[str, Any]:
    """Audit the index, and compare with the pin first: a wrong release would only give thousands of faults."""
    index = read_index(folder / INDEX_FILE)
    hashes = {"config_sha256": sha256_of(folder / "config.json"), "index_sha256": index.sha256}
    if pin is not None:
        check_pin(found := find_pin(pin), hashes)
        hashes["release"] = found["release"]
    keys, shards = len(index.weight_map), len(set(index.weight_map.values()))
    found = audit(index, release)
    if not found.passed:
        raise CheckpointError("the index is not that of the configuration:\n" + found.text())
    return {
        **hashes,
        "experts": release.experts,
        "vision": release.vision is not None,
        "keys": keys,
        "shards": shards,
        "total_bytes": release.size_bytes,
    }


def _since(started: float) -> float:
    return round(time.monotonic() - started, 3)


def _validate_command(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="k3-validate-checkpoint",
        description=__doc__.split("\n")[0],
        epilog=f"Other commands: {', '.join(COMMANDS)}; each has --help.",
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--output", type=Path, required=True, help="where the report goes if everything passed")
    depth = parser.add_mutually_exclusive_group()
    depth.add_argument("--index-only", action="store_const", const="index", dest="depth", help="config and index alone")
    depth.add_argument(
        "--headers-only", action="store_const", const="headers", dest="depth", help="proves layout, not payloads"
    )
    parser.add_argument("--release", help="a known release (9f62e4e9) or a pin file whose hashes must match")
    parser.add_argument("--jobs", type=int, default=2, help="shards read at once")
    options = parser.parse_args(argv)
    options.output.unlink(missing_ok=True)  # an old report must not outlive a failing run
    resume = options.output.with_name(options.output.name + ".progress")
    depth = options.depth or "payloads"
    report = validate(options.folder, depth, options.release, jobs=options.jobs, resume=resume)
    _publish(options.output, report)
    resume.unlink(missing_ok=True)
    size = f"{report['keys']} keys in {report['shards']} shards, {report['total_bytes']} bytes"
    print(f"passed: {size}; this proves {report['proves']}")
    return 0


def _publish(path: Path, report: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_durably(path, json.dumps(report, indent=2) + "\n")


def _pin_command(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="k3-validate-checkpoint make-pin", description="Write the pin of a release.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--name", required=True, help="the release's own name, for example its commit")
    options = parser.parse_args(argv)
    report = validate(options.folder, "index")
    _publish(
        options.output, {"release": options.name, **{key: report[key] for key in ("config_sha256", "index_sha256")}}
    )
    print(f"pinned {options.name}: {report['keys']} keys")
    return 0


def _recover_command(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="k3-validate-checkpoint recover", description="Finish an interrupted save.")
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args(argv).folder
    from k3.checkpoint.commit import recover

    print(f"{folder}: " + ("the new checkpoint is complete" if recover(folder) else f"no {JOURNAL}, nothing to do"))
    return 0


def _qat_command(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="k3-validate-checkpoint audit-qat", description="Compare what two checkpoints quantise, and every value."
    )
    parser.add_argument("trained", type=Path, help="the trainer's checkpoint (bf16 masters, or packed)")
    parser.add_argument("exported", type=Path, help="the packed export")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--scale-rule", default="even")
    options = parser.parse_args(argv)
    from k3.checkpoint.audit_qat import audit_qat

    report = audit_qat(options.trained, options.exported, scale_rule=options.scale_rule)
    for layer in report["layers"]:
        print(f"{layer['layer']}: " + ("; ".join(layer["differences"]) or f"{layer['tensors']} tensors equal"))
    if options.output and report["passed"]:
        _publish(options.output, report)
    return 0 if report["passed"] else 1


COMMANDS = {"make-pin": _pin_command, "audit-qat": _qat_command, "recover": _recover_command}

if __name__ == "__main__":
    sys.exit(main())
