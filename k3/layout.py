"""`k3-layout`: what a layout costs before anything runs.

`pp` prints stage tables: layers, balance, and what crosses each boundary. `plan` sizes one rank of a full layout.
Torch-free; `plan` builds the model on the meta device and imports torch at that point.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Annotated

import typer

from k3.parallel import stages

KIB = 1024
PUBLIC_LAYERS, PUBLIC_BLOCK, PUBLIC_HIDDEN = 93, 12, 7168

app = typer.Typer(add_completion=False, no_args_is_help=True)


@app.callback()
def commands() -> None:
    """What a layout costs before anything runs."""


@dataclass(frozen=True)
class StageTable:
    """One pipeline layout: decoder layers per stage and what its boundaries carry per token."""

    layers: list[int]
    block: int
    hidden: int
    element_bytes: int = 2

    @property
    def bottleneck(self) -> int:
        """Layers of the fullest stage."""
        return max(self.layers)

    @property
    def efficiency_percent(self) -> float:
        """Share of time a stage works, to first order: mean over bottleneck."""
        return 100 * stages.efficiency(self.layers)

    @property
    def bubble_percent(self) -> float:
        """What imbalance alone costs: 100 minus the efficiency."""
        return 100 - self.efficiency_percent

    @property
    def snapshots(self) -> list[int]:
        """Snapshots that cross each boundary."""
        return stages.boundary_snapshots(self.layers, self.block)

    @property
    def kib_per_token(self) -> list[float]:
        """KiB each boundary carries per token and direction: (1 + snapshots) hidden-wide pieces."""
        piece = self.hidden * self.element_bytes / KIB
        return [(1 + count) * piece for count in self.snapshots]

    @property
    def aligned(self) -> bool:
        """Whether every boundary lies between Attention Residual blocks."""
        return all(first % self.block == 0 for first in stages.starts(self.layers))

    def as_dict(self) -> dict:
        """Return the fields and everything derived from them, for --json."""
        derived = ("bottleneck", "efficiency_percent", "bubble_percent", "snapshots", "kib_per_token", "aligned")
        return {**asdict(self), **{name: getattr(self, name) for name in derived}}


def automatic(pp: int, layers: int = PUBLIC_LAYERS, block: int = PUBLIC_BLOCK, hidden: int = PUBLIC_HIDDEN):
    """Return the table of the automatic layout of `pp` stages."""
    return StageTable(stages.aligned(layers, block, pp), block, hidden)


def explicit(per_stage: list[int], layers: int = PUBLIC_LAYERS, block: int = PUBLIC_BLOCK, hidden: int = PUBLIC_HIDDEN):
    """Return the table of an explicit layout; raises ValueError when a stage is empty or a layer is missing."""
    rows = [["decoder"] * count for count in per_stage]
    rows[0], rows[-1] = ["embedding", *rows[0]], [*rows[-1], "loss"]
    return StageTable(stages.counts(layers, block, len(per_stage), rows), block, hidden)


@dataclass(frozen=True)
class Comparison:
    """Two layouts of the same layers, to first order: time follows the bottleneck stage."""

    before: StageTable
    after: StageTable

    @property
    def time_percent(self) -> float:
        """Change of time per step; negative is faster."""
        return 100 * (self.after.bottleneck / self.before.bottleneck - 1)

    @property
    def throughput_percent(self) -> float:
        """Change of tokens per second."""
        return 100 * (self.before.bottleneck / self.after.bottleneck - 1)

    def sentence(self) -> str:
        """Return the comparison in words."""
        return (
            f"{self.before.layers} -> {self.after.layers}: bottleneck {self.before.bottleneck} -> "
            f"{self.after.bottleneck} layers, time {self.time_percent:+.1f} %, "
            f"throughput {self.throughput_percent:+.1f} % to first order"
        )


def text_table(tables: list[StageTable]) -> str:
    """Return stage tables as aligned text, one layout a line."""
    rows = [("pp", "layers per stage", "max", "efficiency", "bubble", "blocks", "snapshots", "KiB/token at boundaries")]
    for table in tables:
        rows.append(
            (
                str(len(table.layers)),
                str(table.layers),
                str(table.bottleneck),
                f"{table.efficiency_percent:.3f} %",
                f"{table.bubble_percent:.3f} %",
                "aligned" if table.aligned else "split",
                str(table.snapshots),
                f"{', '.join(f'{kib:g}' for kib in table.kib_per_token) or '-'} (sum {sum(table.kib_per_token):g})",
            )
        )
    return aligned_text(rows)


@app.command()
def pp(
    stages_: Annotated[list[int] | None, typer.Argument(metavar="[STAGES]...", help="numbers of stages")] = None,
    layout: Annotated[list[str] | None, typer.Option(help="explicit layers per stage, e.g. 32,32,29")] = None,
    layers: Annotated[int, typer.Option(help="decoder layers")] = PUBLIC_LAYERS,
    block: Annotated[int, typer.Option(help="layers of an Attention Residual block")] = PUBLIC_BLOCK,
    hidden: Annotated[int, typer.Option(help="hidden size")] = PUBLIC_HIDDEN,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON")] = False,
) -> None:
    """Print pipeline stage tables; two explicit layouts are also compared."""
    try:
        chosen = stages_ if stages_ or layout else range(2, len(stages.block_sizes(layers, block)) + 1)
        tables = [automatic(count, layers, block, hidden) for count in chosen or ()]
        tables += [explicit([int(c) for c in row.split(",")], layers, block, hidden) for row in layout or ()]
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    if as_json:
        typer.echo(json.dumps([table.as_dict() for table in tables], indent=1))
        return
    typer.echo(text_table(tables))
    if layout and len(layout) == 2:
        typer.echo(Comparison(*tables[-2:]).sentence())


@app.command()
def plan(
    tp: Annotated[int, typer.Option(help="tensor-parallel ranks")] = 1,
    cp: Annotated[int, typer.Option(help="context-parallel ranks")] = 1,
    dp: Annotated[int, typer.Option(help="data-parallel ranks")] = 1,
    ep: Annotated[int, typer.Option(help="expert-parallel ranks")] = 1,
    etp: Annotated[int, typer.Option(help="ranks inside an expert")] = 1,
    pp_: Annotated[int, typer.Option("--pp", help="pipeline stages")] = 1,
    sequence_parallel: Annotated[bool, typer.Option(help="split the residual stream over tp")] = True,
    fsdp: Annotated[bool, typer.Option(help="shard parameters and gradients over the replicas too")] = False,
    tokens: Annotated[int, typer.Option(help="tokens of a sequence")] = 8192,
    rows: Annotated[int, typer.Option(help="sequences of a microbatch")] = 1,
    microbatches: Annotated[int, typer.Option(help="microbatches of a step")] = 8,
    kda_cp_mode: Annotated[str, typer.Option(help="headwise, state, or auto: headwise where heads divide")] = "auto",
    memory_gib: Annotated[float, typer.Option(help="memory of a rank")] = 141 * 1e9 / 1024**3,
    config: Annotated[str | None, typer.Option(help="a config.json or its folder; the public model if absent")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON")] = False,
) -> None:
    """Size one rank of every stage of a layout, and say what does not fit."""
    from k3 import K3Config, layout_plan
    from k3.parallel.mesh import ParallelState, layout_faults

    model = K3Config.from_hf(config) if config else K3Config()
    if kda_cp_mode == "auto":
        kda_cp_mode = "headwise" if model.kda_num_heads // tp % cp == 0 else "state"
    work = layout_plan.Workload(tokens=tokens, rows=rows, microbatches=microbatches, kda_cp_mode=kda_cp_mode, fsdp=fsdp)
    sizes = {"tp_size": tp, "cp_size": cp, "dp_size": dp, "ep_size": ep, "etp_size": etp, "pp_size": pp_}
    if faults := layout_faults(model, kda_cp_mode, sizes):
        raise typer.BadParameter("; ".join(faults))
    parallel = ParallelState(**sizes, sequence_parallel=sequence_parallel and tp > 1)
    plans = layout_plan.plan(model, parallel, work)
    verdict = layout_plan.verdict(model, parallel, work, plans, int(memory_gib * 1024**3))
    if as_json:
        found = {"world_size": parallel.world_size, "stages": [layout_plan.as_dict(p) for p in plans]}
        typer.echo(json.dumps({**found, "verdict": verdict}, indent=1))
        return
    typer.echo(
        f"{parallel.world_size} ranks, {microbatches} x {rows} x {tokens} tokens a replica and step, "
        f"KDA context {kda_cp_mode}; GiB a rank, sent per step"
    )
    typer.echo(plan_table(plans))
    typer.echo(verdict)


def plan_table(plans: list) -> str:
    """Return the plans of all stages as aligned text, GiB per rank."""
    axes = ("tp", "cp", "ep", "pp", "dp")
    head = ("stage", "layers", "parameters", "weights", "gradients", "optimizer", "activations", "total", "boundary")
    rows = [(*head, *(f"{axis} sent" for axis in axes))]
    for found in plans:
        sizes = [found.parameter_bytes, found.gradient_bytes, found.optimizer_bytes, found.activation_bytes]
        sizes += [found.total_bytes, found.boundary_bytes, *(found.traffic.get(axis, 0) for axis in axes)]
        cells = [f"{size / KIB**3:.2f}" for size in sizes]
        rows.append((str(found.stage), str(found.layers), f"{found.parameters:,}", *cells))
    return aligned_text(rows)


def aligned_text(rows: list[tuple[str, ...]]) -> str:
    """Return rows of cells with their columns aligned."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join("  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in rows)


def main() -> None:
    """Entry point of the `k3-layout` command."""
    app()


if __name__ == "__main__":
    main()
