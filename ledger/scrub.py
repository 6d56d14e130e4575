"""Makes a run safe to publish: no absolute paths, user names, addresses or host names, and nothing else lost.

Names become pseudonyms by HMAC under a secret kept beside the signing key: two machines can be told apart, none can
be guessed. What is not known to be safe is left out, not searched for secrets.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Iterable
from typing import Any

import msgspec

from ledger.record import Answer, Attempt, Environment, Fingerprint, JobRecord, Start
from ledger.runs import Run, Stream, TestRow
from ledger.witness import expand_nodes

SCHEDULER_KEYS = ("SLURM_JOB_ID", "SLURM_ARRAY_JOB_ID", "SLURM_ARRAY_TASK_ID", "SLURM_RESTART_COUNT", "SLURM_PROCID",
                  "SLURM_NNODES", "SLURM_NTASKS", "SLURM_STEP_NUM_TASKS", "SLURM_GPUS_ON_NODE")  # fmt: skip
ENVIRONMENT_PREFIXES = ("OMP_", "MKL_", "CUDA_", "CUBLAS_", "NCCL_", "TORCH_", "PYTORCH_", "TRITON_", "FLA_")
SACCT_COLUMNS = frozenset(["JobID", "JobIDRaw", "State", "ExitCode", "DerivedExitCode", "NodeList", "NNodes", "NTasks",
                           "AllocTRES", "Submit", "Start", "End"])  # fmt: skip
GPU_KEYS = ("index", "name", "memory_bytes")
SAFE_VALUE = re.compile(r"^[\w.,:=+-]{0,80}$")
ABSOLUTE = re.compile(r"(?<![\w.<>])~?/(?=[\w.~])(?:[^\s/:'\",;()<>|]+/)*([^\s/:'\",;()<>|]*)")
SOURCE_NAME = re.compile(r"^\w+\.(py|jsonl|json|toml|so)$")
ADDRESS = re.compile(
    r"\b\d{1,3}(?:\.\d{1,3}){3}\b|(?:\b[0-9a-fA-F]{1,4}:){3,7}[0-9a-fA-F]{1,4}\b|[\w.+-]+@[\w-]+[\w.-]*"
)


class Scrubber:
    """Replaces what identifies people and machines in one run."""

    def __init__(self, run: Run, secret: bytes, users: Iterable[str] = ()):
        self.secret = secret
        self.users = sorted({user for user in users if len(user) > 1} | _users(run), key=len, reverse=True)
        names = {name for name in _names(run) if len(name) > 1}
        ordered = sorted(names, key=len, reverse=True)
        joined = "|".join(map(re.escape, ordered)) or r"(?!)"
        self.names = re.compile(rf"(?<![\w-])({joined})(?![\w-])")
        people = "|".join(map(re.escape, self.users)) or r"(?!)"
        self.people = re.compile(rf"(?<![\w-])({people})(?![\w-])")

    def pseudonym(self, name: str, prefix: str = "h") -> str:
        """The same short word for the same name, under this secret."""
        if not name:
            return ""
        found = hmac.new(self.secret, f"{prefix}:{name}".encode(), hashlib.sha256).hexdigest()
        return f"{prefix}-{found[:12]}"

    def text(self, text: str) -> str:
        """Free text with paths, addresses and known names replaced."""
        found = ABSOLUTE.sub(_path, text)
        found = self.names.sub(lambda match: self.pseudonym(match[1]), ADDRESS.sub("<address>", found))
        return self.people.sub("<user>", found)

    def value(self, value: Any) -> Any:
        """Any JSON value with every text in it scrubbed."""
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, dict):
            return {self.text(key): self.value(item) for key, item in value.items()}
        return [self.value(item) for item in value] if isinstance(value, (list, tuple)) else value

    # --- records ----------------------------------------------------------------------------------------------

    def run(self, run: Run) -> Run:
        """The whole run, scrubbed; verdicts drawn from it are the same."""
        head = msgspec.structs.replace(run.record, cluster=self.pseudonym(run.record.cluster, "c"))
        return msgspec.structs.replace(
            run, record=head, faults=[self.text(fault) for fault in run.faults],
            jobs={name: self.job(job) for name, job in run.jobs.items()},
            streams=[self.stream(stream) for stream in run.streams],
        )  # fmt: skip

    def job(self, job: JobRecord) -> JobRecord:
        return msgspec.structs.replace(
            job, cluster=self.pseudonym(job.cluster, "c"), note=self.text(job.note),
            attempts=tuple(self.attempt(attempt) for attempt in job.attempts),
            answers=tuple(self.answer(answer) for answer in job.answers),
        )  # fmt: skip

    def attempt(self, attempt: Attempt) -> Attempt:
        nodes = tuple(self.pseudonym(node) for node in attempt.nodes)
        return msgspec.structs.replace(attempt, nodes=nodes, reason=self.text(attempt.reason))

    def answer(self, answer: Answer) -> Answer:
        """Of sacct's answers, the columns the witness reads; of others, only that they were asked."""
        name = answer.command[0].split("/")[-1] if answer.command else ""
        error = self.text(answer.error)
        if name != "sacct" or "-o" not in answer.command:
            return msgspec.structs.replace(answer, command=(name,), output="", error=error)
        names = answer.command[answer.command.index("-o") + 1].split(",")
        lines = [self.row(names, line) for line in answer.output.splitlines()]
        return msgspec.structs.replace(
            answer, command=(name, *answer.command[1:]), output="\n".join(lines), error=error
        )

    def row(self, names: list[str], line: str) -> str:
        cells = line.split("|")
        if cells == names:
            return line
        return "|".join(self.cell(name, cell) for name, cell in zip(names, cells, strict=False))

    def cell(self, name: str, cell: str) -> str:
        if name not in SACCT_COLUMNS:
            return ""
        if name == "NodeList":
            return ",".join(self.pseudonym(node) for node in expand_nodes(cell))
        return cell.split(" by ")[0] if name == "State" else cell

    def stream(self, stream: Stream) -> Stream:
        return msgspec.structs.replace(
            stream, starts=[self.start(start) for start in stream.starts],
            environments=[self.environment(found) for found in stream.environments],
            faults=[self.text(fault) for fault in stream.faults],
            tests=[(line, self.test(row), begun) for line, row, begun in stream.tests],
        )  # fmt: skip

    def start(self, start: Start) -> Start:
        kept = {key: value for key in SCHEDULER_KEYS if SAFE_VALUE.match(value := start.scheduler_env.get(key, ""))}
        kept = {key: value for key, value in kept.items() if value}
        if node := start.scheduler_env.get("SLURMD_NODENAME"):
            kept["SLURMD_NODENAME"] = self.pseudonym(node)
        return msgspec.structs.replace(start, scheduler_env=kept)

    def environment(self, found: Environment) -> Environment:
        modules = {name: self.text(path) for name, path in found.modules.items()}
        return msgspec.structs.replace(found, fingerprint=self.fingerprint(found.fingerprint), modules=modules)

    def fingerprint(self, found: Fingerprint) -> Fingerprint:
        env = {key: value for key, value in found.env.items()
               if key.startswith(ENVIRONMENT_PREFIXES) and SAFE_VALUE.match(value)}  # fmt: skip
        gpus = tuple({**{key: gpu[key] for key in GPU_KEYS if key in gpu},
                      "uuid": self.pseudonym(str(gpu.get("uuid", "")), "g")} for gpu in found.gpus)  # fmt: skip
        return msgspec.structs.replace(found, host=self.pseudonym(found.host), node=self.pseudonym(found.node),
                                       os=self.text(found.os), gpus=gpus, env=env)  # fmt: skip

    def test(self, row: TestRow) -> TestRow:
        measures = tuple(msgspec.structs.replace(m, context=self.value(m.context)) for m in row.measures)
        return msgspec.structs.replace(row, message=self.text(row.message), measures=measures,
                                       data={self.text(path): value for path, value in row.data.items()})  # fmt: skip


def _path(match: re.Match) -> str:
    """An absolute path becomes <path>, and keeps the name of a source file."""
    return f"<path>/{match[1]}" if SOURCE_NAME.match(match[1]) else "<path>"


def _names(run: Run) -> set[str]:
    """Every host and node name that a run mentions where names belong."""
    found: set[str] = set()
    for stream in run.streams:
        for environment in stream.environments:
            found |= {environment.fingerprint.host, environment.fingerprint.node}
        for start in stream.starts:
            env = start.scheduler_env
            found |= {v for k, v in env.items() if k.endswith(("NODENAME", "HOST", "NODE_NAME", "MASTER_ADDR"))}
            found |= {name for k, v in env.items() if k.endswith("NODELIST") for name in expand_nodes(v)}
    for job in run.jobs.values():
        found |= {node for attempt in job.attempts for node in attempt.nodes}
    return (found | {name.split(".")[0] for name in found}) - {"", "localhost"}


def _users(run: Run) -> set[str]:
    keys = ("SLURM_JOB_USER", "USER", "LOGNAME", "SLURM_JOB_ACCOUNT")
    found = {s.scheduler_env.get(key, "") for stream in run.streams for s in stream.starts for key in keys}
    return {name for name in found if len(name) > 1}
