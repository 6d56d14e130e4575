"""`k3-harness pack`: a planned run in one file (plan, snapshot, jobs, inputs), for a host without git or network.

Also owns opening such a file again: nothing in it is believed before every file has been checked by hash.
"""

from __future__ import annotations

import argparse
import shutil
import tarfile
from pathlib import Path, PurePosixPath

from harness import planning, revision, spool
from harness.spec import HarnessError, JobSpec, load, store
from harness.submit import prepare
from ledger import claimfile
from ledger.record import digest

LARGEST_INPUT = 256 * 1024**2


def configure(parser: argparse.ArgumentParser) -> None:
    """Arguments of `k3-harness pack`."""
    planning.add_selection(parser)
    parser.add_argument("-o", "--output", type=Path, help="the file to write; RUN.k3pack.tar.gz if left out")


def command(options: argparse.Namespace) -> int:
    """Plan for the named cluster and write one file."""
    session = planning.prepare(options)
    try:
        if not session.plan.expected:
            raise HarnessError("nothing to pack: no selected cell has to be run there (--all packs settled cells, too)")
        prepare(session.plan, session.snapshot, session.cluster, session.run_dir, session.nonce)
        left_out = add_inputs(session.run_dir, session.root)
        target = options.output or Path(f"{session.run_dir.name}.k3pack.tar.gz")
        write(session.run_dir, target)
    finally:
        spool.discard(session.run_dir)
    print(f"{target}: {len(session.plan.expected)} jobs, {target.stat().st_size / 1e6:.1f} MB; there: "
          f"k3-harness exec {target.name} [--cluster NAME]")  # fmt: skip
    for name in left_out:
        print(f"input {name} is too large to pack; it must be found on that host, too")
    return 0


def add_inputs(run_dir: Path, root: Path) -> list[str]:
    """Copy the files of every input the jobs need to inputs/NAME; returns the names of those too large."""
    from harness.inputs import resolve

    declared, left_out = claimfile.load(run_dir / "snapshot").inputs, []
    for name in spool.read_run(run_dir).inputs:
        folder = resolve(declared[name], root).folder
        sources = [(folder / file, run_dir / "inputs" / name / file) for file in declared[name].files] if folder else []
        if sum(source.stat().st_size for source, _ in sources) > LARGEST_INPUT:
            left_out.append(name)
            continue
        for source, target in sources:
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, target)
    return left_out


def write(run_dir: Path, target: Path) -> None:
    """The whole run directory as one compressed file, under its own name."""
    partial = target.with_name(f".{target.name}.part")
    with tarfile.open(partial, "w:gz", compresslevel=6) as archive:
        archive.add(run_dir, arcname=run_dir.name, filter=_anonymous)
    partial.replace(target)


def _anonymous(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
    """Files and folders without their owner; submitit's absolute link beside a batch script stays behind."""
    if not (member.isfile() or member.isdir()):
        return None
    member.uid = member.gid = 0
    member.uname = member.gname = ""
    return member


def unpack(file: Path, folder: Path) -> Path:
    """Open a packed run below `folder`. Raises HarnessError, and leaves nothing, unless every file is as planned."""
    try:
        with tarfile.open(file) as archive:
            name = (archive.getnames() or [""])[0]
            if not spool.RUN_ID.match(name):
                raise HarnessError(f"{file} is not a packed run; write one with k3-harness pack")
            if (folder / name).exists():
                raise HarnessError(f"{folder / name} exists already; go on with k3-harness collect {name}")
            folder.mkdir(parents=True, exist_ok=True)
            _extract(archive, folder)
    except (tarfile.TarError, EOFError) as error:
        raise HarnessError(f"{file} cannot be read as a packed run: {error}; carry it over again") from error
    if faults := damage(folder / name):
        shutil.rmtree(folder / name)
        raise HarnessError(f"{file} is not what was packed: {', '.join(faults[:3])}; carry it over again")
    return folder / name


def _extract(archive: tarfile.TarFile, folder: Path) -> None:
    """Plain files and folders, each inside `folder`, or nothing. Before Python 3.11.4 tarfile has no filter for it."""
    for member in archive:
        path = PurePosixPath(member.name)
        if not (member.isfile() or member.isdir()) or path.is_absolute() or ".." in path.parts:
            raise HarnessError(f"{archive.name} holds {member.name}, which is no plain file of the run; carry it again")
    archive.extractall(folder, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))


def damage(run_dir: Path) -> list[str]:
    """Every way in which the folder differs from the plan's promise."""
    record = spool.read_run(run_dir)
    faults = revision.differences(record.manifest, run_dir / "snapshot")
    if digest(record.manifest) != record.snapshot:
        faults.append("the manifest does not hash to the snapshot")
    for expected in record.expected:
        spec = load(run_dir / "jobs" / expected.job / "spec.json", JobSpec)
        if (spec.snapshot, spec.tests, spec.topology, spec.nonce) != (
            record.snapshot, expected.tests, expected.topology, record.nonce,
        ):  # fmt: skip
            faults.append(f"the orders of job {expected.job} are not the plan's")
    return faults


def use_inputs(run_dir: Path, root: Path) -> None:
    """Point the jobs at the inputs as they are on this host. Raises HarnessError naming one that is not here."""
    from harness.inputs import resolve

    declared, places = claimfile.load(run_dir / "snapshot").inputs, {}
    for name in spool.read_run(run_dir).inputs:
        packed = run_dir / "inputs" / name
        found = packed if packed.is_dir() else resolve(declared[name], root).folder
        if found is None:
            raise HarnessError(f"input {name} is not here: {resolve(declared[name], root).reason}")
        places[declared[name].env] = str(found)
    for folder in spool.job_dirs(run_dir):
        spec = load(folder / "spec.json", JobSpec)
        store(folder / "spec.json", _with_env(spec, places))


def _with_env(spec: JobSpec, places: dict[str, str]) -> JobSpec:
    from msgspec.structs import replace

    return replace(spec, env={**spec.env, **{name: place for name, place in places.items() if name}})
