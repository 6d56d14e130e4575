"""What a training loop calls per batch: one forward on this rank's layers, or one step over all pipeline stages."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from k3.model import K3Model
from k3.parallel import ParallelState, context_layout
from k3.sequence import SequenceLayout

BATCH_FIELDS = ("input_ids", "labels", "loss_mask", "cu_seqlens")
Batch = Mapping[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class ForwardStep:
    """Forward of one batch through one chunk: `step(batch, model=None) -> {"logits", "loss"}`.

    batch: a mapping with input_ids [B, T] and optional labels, loss_mask (and cu_seqlens if `use_thd`), or an
    iterator of such mappings, whose next one is taken. Under context parallelism the batch is the whole one, equal on
    all cp ranks; it is split here, once, and the logits are this rank's share.

    With pp_size > 1 a call is a whole step, since the schedule interleaves forward and backward: when it returns, every
    stage has its gradients, and there is nothing to call `backward` on. A mapping is cut along B into `microbatches`
    (None: one row each); of an iterator the next `microbatches` mappings are taken (None: pp_size). The mean loss is
    returned on the ranks of the last stage, None elsewhere, logits nowhere. Under `torch.no_grad()` it only evaluates
    and returns logits and, of labels, the loss, both on the last stage.
    """

    chunks: list[K3Model]
    parallel: ParallelState
    use_thd: bool = False
    kda_cp_mode: str = "headwise"
    microbatches: int | None = None
    _pipelines: dict[tuple[int, int, int], Any] = field(default_factory=dict, repr=False)

    def __call__(self, batch: Batch | Iterator[Batch], model: K3Model | None = None) -> dict[str, Tensor | None]:
        if self.parallel.pp_size > 1:
            return self._run_stages(self._microbatches(batch))
        batch, layout = self._prepare(batch if isinstance(batch, Mapping) else next(batch))
        return (model or self.chunks[0])(**batch, layout=layout)

    def _prepare(self, batch: Batch) -> tuple[dict[str, Tensor], SequenceLayout | None]:
        """This rank's tensors of a whole batch, and how they lie."""
        self._check(batch)
        batch = {name: tensor for name, tensor in batch.items() if tensor is not None}
        cu_seqlens = batch.pop("cu_seqlens", None)
        layout = None if cu_seqlens is None else SequenceLayout(cu_seqlens=cu_seqlens)
        if self.parallel.cp_size > 1:
            layout = context_layout(self.parallel, self.kda_cp_mode, batch["input_ids"].shape[1], cu_seqlens)
            batch = {name: layout.split(tensor) for name, tensor in batch.items()}
        return batch, layout

    def _check(self, batch: Batch) -> None:
        if strange := sorted(set(batch) - set(BATCH_FIELDS)):
            raise NotImplementedError(f"batch fields {', '.join(strange)}: K3 takes {', '.join(BATCH_FIELDS)} alone")
        if self.use_thd != ("cu_seqlens" in batch):
            raise ValueError(
                f"use_thd={self.use_thd} asks for batches {'with' if self.use_thd else 'without'} cu_seqlens"
            )

    def _microbatches(self, batch: Batch | Iterator[Batch]) -> list[Batch]:
        """The microbatches of one step. Raises ValueError where they cannot be cut or are too few."""
        if not isinstance(batch, Mapping):
            wanted = self.microbatches or self.parallel.pp_size
            found = list(islice(batch, wanted))
            if len(found) < wanted:
                raise ValueError(f"the iterator ended after {len(found)} of {wanted} microbatches; give it whole steps")
            return found
        if self.use_thd:
            raise ValueError(
                "one packed row cannot be cut into microbatches; pass an iterator of packed batches of one total length"
            )
        rows = batch["input_ids"].shape[0]
        wanted = self.microbatches or rows
        if rows % wanted:
            raise ValueError(f"{rows} rows are not divisible by microbatches={wanted}; pad the batch or use a divisor")
        cut = {name: x.chunk(wanted) for name, x in batch.items() if x is not None}
        return [{name: parts[index] for name, parts in cut.items()} for index in range(wanted)]

    def _run_stages(self, microbatches: Sequence[Batch]) -> dict[str, Tensor | None]:
        prepared = [self._prepare(batch) for batch in microbatches]
        shapes = {tuple(batch["input_ids"].shape) for batch, _ in prepared}
        if len(shapes) > 1:
            raise ValueError(f"microbatches of shapes {sorted(shapes)}; pad all microbatches of a step to one shape")
        names = set(prepared[0][0])
        if any(set(batch) != names for batch, _ in prepared):
            raise ValueError("microbatches differ in their fields; give all of a step the same ones")
        whole = {name: torch.cat([batch[name] for batch, _ in prepared]) for name in names}
        layouts = [layout for _, layout in prepared]
        options = {"layouts": None if layouts[0] is None else layouts}
        pipeline = self._pipeline(len(prepared), *shapes.pop())
        if not torch.is_grad_enabled():
            return self._evaluate(pipeline, whole, options)
        if "labels" not in whole:
            raise ValueError("a step over pipeline stages needs labels; without them evaluate under torch.no_grad()")
        loss = pipeline.step(whole["input_ids"], whole["labels"], whole.get("loss_mask"), **options)
        return {"logits": None, "loss": loss if pipeline.holds_last else None}

    def _evaluate(self, pipeline: Any, whole: dict[str, Tensor], options: dict[str, Any]) -> dict[str, Tensor | None]:
        logits = pipeline.evaluate(whole["input_ids"], **options)
        if not pipeline.holds_last or "labels" not in whole:
            return {"logits": logits, "loss": None}
        return {"logits": logits, "loss": pipeline.loss(logits, whole["labels"], whole.get("loss_mask"))}

    def _pipeline(self, microbatches: int, rows: int, tokens: int) -> Any:
        """The schedules for microbatches of this shape, made once."""
        from k3.parallel.pipeline import Pipeline

        shape = microbatches, rows, tokens
        if shape not in self._pipelines:
            self._pipelines[shape] = Pipeline(self.chunks, microbatches=microbatches, rows=rows, tokens=tokens)
        return self._pipelines[shape]
