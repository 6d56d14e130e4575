"""Pipeline parallelism on torch.distributed.pipelining: stages, what crosses their boundaries, and one step.

One tensor crosses a boundary: the live prefix and the snapshots side by side, [B, T, (1 + K) * D], and its gradient
comes back with the same width. With `cached` (interleaved stages only) a stage sends the snapshots its receiver's rank
has not seen; the others wait on that rank since its previous virtual stage, and their gradients join there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleLoopedBFS,
)

from k3.loss import IGNORE_INDEX
from k3.model import K3Model
from k3.parallel import collectives, stages
from k3.parallel.data import HEAD, ParallelLoss, fully_shard_model
from k3.sharding import local_shape


@dataclass
class Batch:
    """The microbatches of one step, as every stage of this rank finds them: by index, never split by the engine."""

    labels: Tensor | None = None
    loss_mask: Tensor | None = None
    layouts: Sequence[Any] | None = None
    count: Tensor | None = None

    def layout(self, index: int) -> Any:
        """The sequence layout of a microbatch."""
        return self.layouts[index] if self.layouts is not None else None


@dataclass
class SnapshotCache:
    """Snapshots that stay on this rank between its virtual stages, per microbatch, as leaves that gather gradients."""

    leaves: dict[int, list[Tensor]] = field(default_factory=dict)


class _Tap(Function):
    """Identity on the prefix; in backward the snapshots also get what their leaves gathered in later stages."""

    @staticmethod
    def forward(ctx, prefix, leaves, *bank):
        ctx.leaves = leaves
        return prefix.view_as(prefix)

    @staticmethod
    def backward(ctx, grad):
        return grad, None, *(leaf.grad for leaf in ctx.leaves)


class Stage(nn.Module):
    """One chunk as the engine runs it: folded tensor in and out; ids into the first, logits out of the last."""

    def __init__(self, model: K3Model, pipeline: Pipeline):
        super().__init__()
        self.model, self.parallel = model, model.parallel
        self.pipeline = [pipeline]  # in a list: the pipeline is not a child module
        self.sent = pipeline.sent_snapshots(self.parallel.stage)
        self.received = pipeline.sent_snapshots(self.parallel.stage - 1)

    def forward(self, *inputs: Tensor, mb: Tensor) -> Tensor:
        """Run microbatch `mb` through this chunk's layers."""
        pipeline, index = self.pipeline[0], int(mb)
        prefix, bank = self.enter(inputs[0], index)
        prefix, bank = self.model.decoder(prefix, bank, layout=pipeline.batch.layout(index))
        if self.parallel.pp_is_last:
            return self.model.head(prefix, bank)
        if pipeline.cached:
            prefix = self.keep(prefix, bank, index)
        folded = torch.cat([prefix, *bank[len(bank) - self.sent :]], dim=-1)
        self.record("send", folded.nbytes, backward=False)
        return folded

    def enter(self, x: Tensor, index: int) -> tuple[Tensor, list[Tensor]]:
        """Embed ids, or unfold what the stage before sent; asserts the announced shape."""
        if self.parallel.pp_is_first:
            layout = self.pipeline[0].batch.layout(index)
            if layout is not None:
                layout.check(x)
            return self.model.embed(x), []
        width = self.model.config.hidden_size
        assert x.shape[-1] == (1 + self.received) * width, f"{tuple(x.shape)} is not {1 + self.received} x {width} wide"
        if x.requires_grad:
            x.register_hook(lambda grad: self.record("send", grad.nbytes, backward=True))
        prefix, *arrived = x.split(width, dim=-1)
        return prefix, [*self.pipeline[0].cache.leaves.get(index, []), *arrived]

    def keep(self, prefix: Tensor, bank: list[Tensor], index: int) -> Tensor:
        """Leave the bank on this rank for its next virtual stage; tie the gradients gathered there to this stage."""
        later = self.parallel.stage + self.parallel.pp_size < self.parallel.num_stages
        cache = self.pipeline[0].cache.leaves
        if not later:
            cache.pop(index, None)
            return prefix
        cache[index] = [snapshot.detach().requires_grad_() for snapshot in bank]
        for leaf in cache[index]:
            leaf.grad = torch.zeros_like(leaf)
        return _Tap.apply(prefix, cache[index], *bank)

    def record(self, operation: str, size_bytes: int, backward: bool) -> None:
        """Count one boundary message."""
        group = self.parallel.group("pp")
        collectives.record(operation, group, next(self.model.parameters()).device, size_bytes, "boundary", backward)


class Pipeline:
    """The schedules of this rank's chunks for one shape of microbatches: `rows` sequences of `tokens` local tokens.

    1F1B for one chunk, interleaved 1F1B for several; a forward-only schedule of its own for evaluation. Gradients are
    not scaled by the engine: the loss is the mean over the tokens of all microbatches and of all dp and cp ranks.
    `fully_shard` shards every chunk by FSDP2.
    """

    def __init__(
        self,
        chunks: Sequence[K3Model],
        *,
        microbatches: int,
        rows: int,
        tokens: int,
        cached: bool = False,
        fully_shard: bool = False,
    ):
        self.parallel = chunks[0].parallel
        if microbatches < self.parallel.pp_size:
            raise ValueError(
                f"{microbatches} microbatches are fewer than pp_size={self.parallel.pp_size}; use at least as many"
            )
        device = next(chunks[0].parameters()).device
        if device.type == "cuda" and collectives.backend_of(self.parallel.group("pp"), device) == "gloo":
            raise NotImplementedError("gloo aborts on sends of CUDA tensors; use nccl for a pipeline on GPUs")
        if cached and len(chunks) == 1:
            raise ValueError("cached=True with one stage a rank sends every snapshot anyway; use vpp_size above 1")
        self.config, self.microbatches, self.cached = chunks[0].config, microbatches, cached
        self.rows, self.tokens = rows, tokens
        self.chunks, self.batch, self.cache = list(chunks), Batch(), SnapshotCache()
        self.loss = ParallelLoss(self.parallel, self.config.vocab_size)
        self.stages = [Stage(chunk, self) for chunk in self.chunks]
        if fully_shard:
            for stage in self.stages:
                fully_shard_model(stage.model, root=stage, reshard_after_forward=False)
        self.schedule = self._schedule(training=True)
        self.evaluation = self._schedule(training=False)

    def sent_snapshots(self, stage: int) -> int:
        """Snapshots that `stage` sends to the next one: all so far, less what the receiver's rank holds (cached)."""
        if not 0 <= stage < self.parallel.num_stages - 1:
            return 0
        before = stage + 1 - self.parallel.pp_size  # the receiver's previous virtual stage
        held = self._snapshots_after(before) if self.cached and before >= 0 else 0
        return self._snapshots_after(stage) - held

    def _snapshots_after(self, stage: int) -> int:
        config, parallel = self.config, self.parallel
        block = config.attn_res_block_size
        per_stage = stages.counts(config.num_hidden_layers, block, parallel.num_stages, parallel.pp_layout)
        return stages.snapshots(sum(per_stage[: stage + 1]), block)

    def _schedule(self, training: bool):
        engine_stages = [self._engine_stage(stage) for stage in self.stages]
        options: dict[str, Any] = {"scale_grads": False}
        if training:
            options["loss_fn"] = self._microbatch_loss
        if len(engine_stages) == 1:
            kind = Schedule1F1B if training else ScheduleGPipe
            return kind(engine_stages[0], self.microbatches, **options)
        kind = ScheduleInterleaved1F1B if training else ScheduleLoopedBFS
        return kind(engine_stages, self.microbatches, **options)

    def _engine_stage(self, stage: Stage) -> PipelineStage:
        chunk, parallel = stage.model, stage.parallel
        device = next(chunk.parameters()).device
        boundary = self._example(chunk, 1 + stage.received)
        ids = torch.empty(self.rows, self.tokens, dtype=torch.int64, device="meta")
        inputs = ids if parallel.pp_is_first else boundary
        outputs = self._logits_example(chunk) if parallel.pp_is_last else self._example(chunk, 1 + stage.sent)
        return PipelineStage(
            stage, parallel.stage, parallel.num_stages, device, inputs, outputs, group=parallel.group("pp")
        )

    def _example(self, chunk: K3Model, pieces: int) -> Tensor:
        tokens = self.tokens // self.parallel.tp_size if self.parallel.sequence_parallel else self.tokens
        dtype = next(p.dtype for name, p in chunk.named_parameters() if name.endswith("input_layernorm.weight"))
        shape = (self.rows, tokens, pieces * self.config.hidden_size)
        return torch.empty(shape, dtype=dtype, device="meta", requires_grad=True)

    def _logits_example(self, chunk: K3Model) -> Tensor:
        weight = chunk.language_model["lm_head"].weight
        columns = local_shape(HEAD, (self.config.vocab_size, 1), self.parallel)[0]
        return torch.empty(self.rows, self.tokens, columns, dtype=weight.dtype, device="meta", requires_grad=True)

    def step(
        self,
        input_ids: Tensor,
        labels: Tensor,
        loss_mask: Tensor | None = None,
        layouts: Sequence[Any] | None = None,
    ) -> Tensor:
        """Forward and backward of all microbatches, [microbatches * rows, tokens] each; the loss, on every rank.

        Gradients accumulate; call `sync_gradients` on every chunk after the last step. `layouts`: one per microbatch.
        """
        self.batch = Batch(labels, loss_mask, layouts, self._label_count(labels, loss_mask))
        self.cache.leaves.clear()
        losses: list[Tensor] = []
        index = torch.arange(self.microbatches)
        arguments = (input_ids,) if self.parallel.pp_rank == 0 else ()
        target = index if self.holds_last else None
        self.schedule.step(*arguments, mb=index, target=target, losses=losses, return_outputs=False)
        return self._share_loss(losses)

    @torch.no_grad()
    def evaluate(self, input_ids: Tensor, layouts: Sequence[Any] | None = None) -> Tensor | None:
        """Forward alone; logits of all microbatches on the last stage's ranks, None elsewhere."""
        self.batch = Batch(layouts=layouts)
        self.cache.leaves.clear()
        arguments = (input_ids,) if self.parallel.pp_rank == 0 else ()
        return self.evaluation.eval(*arguments, mb=torch.arange(self.microbatches))

    @property
    def holds_last(self) -> bool:
        """Whether one of this rank's chunks is the last stage."""
        return any(chunk.parallel.pp_is_last for chunk in self.chunks)

    def _rows_of(self, x: Tensor | None, index: int) -> Tensor | None:
        return None if x is None else x[index * self.rows : (index + 1) * self.rows]

    def _microbatch_loss(self, logits: Tensor, index: Tensor) -> Tensor:
        """This microbatch's share of the mean over all labels of the step."""
        labels, mask = (self._rows_of(x, int(index)) for x in (self.batch.labels, self.batch.loss_mask))
        total, _ = self.loss.sum_and_count(logits, labels, mask)
        return total / self.batch.count.to(total.dtype)

    def _label_count(self, labels: Tensor, loss_mask: Tensor | None) -> Tensor:
        """Labels that count, over all microbatches and all dp and cp ranks; at least 1."""
        count = (labels != IGNORE_INDEX).float()
        if loss_mask is not None:
            count = count * loss_mask
        count = count.sum()
        if self.parallel.dp_size * self.parallel.cp_size > 1:
            count = collectives.sum_ranks(count, self.parallel.group("dp_cp"), "loss")
        return count.clamp_min(1)

    def _share_loss(self, losses: list[Tensor]) -> Tensor:
        """The step's loss on every rank: summed over microbatches, over dp and cp, and passed back over pp."""
        device = next(self.chunks[0].parameters()).device
        loss = torch.stack(losses).sum().detach() if losses else torch.zeros((), device=device)
        loss = loss.to(torch.float64)
        if self.parallel.dp_size * self.parallel.cp_size > 1:
            loss = collectives.sum_ranks(loss, self.parallel.group("dp_cp"), "loss")
        return collectives.sum_ranks(loss, self.parallel.group("pp"), "loss")
