"""Expert parallelism: dropless dispatch of latents to the ranks that hold their experts, and back.

Group rank e * etp + j of the ep x etp group holds part j of the experts e * E/ep ... A token's latent goes to all etp
parts of each of its experts; the partial outputs are summed when they return, before any norm. Rows are sorted by
(expert, source rank, source order), so the order of every sum is fixed.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from k3.moe import StackedExperts, combine
from k3.parallel import collectives
from k3.precision import at_least_fp32

TAG = "experts"


class ExpertDispatcher:
    """Drop-in for `moe.LocalDispatcher` over the ep x etp group.

    Where every tp rank sees all tokens (tensor parallel without sequence parallel) each takes its share of them, so
    that a token reaches an expert once; the results are joined again.
    """

    def __init__(self, parallel: Any, num_experts: int):
        self.parallel, self.local_experts = parallel, num_experts // parallel.ep_size
        self.group = parallel.group("ep_etp")
        self.shares_tokens = parallel.tp_size > 1 and not parallel.sequence_parallel

    def __call__(self, z: Tensor, idx: Tensor, weight: Tensor, experts: StackedExperts) -> Tensor:
        """z [N, L], idx [N, k], weight [N, k] fp32 -> sum_j weight_j * expert_j(z), [N, L] cast to z's dtype once."""
        if not self.shares_tokens:
            return self.dispatch(z, idx, weight, experts)
        N, group = z.shape[0], self.parallel.group("tp")
        pad = (0, 0, 0, -N % self.parallel.tp_size)
        z, idx, weight = (collectives.take_piece(F.pad(x, pad), 0, group, TAG) for x in (z, idx, weight))
        return collectives.join_pieces(self.dispatch(z, idx, weight, experts), 0, group, TAG)[:N]

    def dispatch(self, z: Tensor, idx: Tensor, weight: Tensor, experts: StackedExperts) -> Tensor:
        """Send rows out, run this rank's experts on what arrives, and combine what returns."""
        order = idx.flatten().argsort(stable=True)  # [N*k], rows of (token, choice) by expert
        sent, received = self.exchange_counts(idx)
        outgoing, incoming = sent.sum(1).tolist(), received.sum(1).tolist()
        rows = self.for_each_part(z[order // idx.shape[1]], outgoing)
        arrived = collectives.all_to_all(rows, outgoing, incoming, self.group, TAG)  # by (source, expert)
        by_expert = expert_order(received)
        done = experts(arrived[by_expert], received.sum(0))[by_expert.argsort()]
        returned = collectives.all_to_all(done, incoming, outgoing, self.group, TAG)
        rows = self.sum_parts(returned, outgoing)
        return combine(rows[order.argsort()].unflatten(0, idx.shape), weight).to(z.dtype)

    def exchange_counts(self, idx: Tensor) -> tuple[Tensor, Tensor]:
        """Rows per (group rank, local expert) that this rank sends and receives, [ep * etp, E/ep] each."""
        ep, etp = self.parallel.ep_size, self.parallel.etp_size
        counts = torch.bincount(idx.flatten(), minlength=ep * self.local_experts).view(ep, self.local_experts)
        sent = counts.repeat_interleave(etp, dim=0)
        return sent, collectives.exchange(sent, None, None, self.group, "counts")

    def for_each_part(self, rows: Tensor, outgoing: list[int]) -> Tensor:
        """Repeat the rows of each expert range once per etp part."""
        etp = self.parallel.etp_size
        if etp == 1:
            return rows
        return torch.cat([block for block in rows.split(outgoing[::etp]) for _ in range(etp)])

    def sum_parts(self, rows: Tensor, outgoing: list[int]) -> Tensor:
        """Undo `for_each_part`: the sum of the etp parts, at least fp32."""
        etp = self.parallel.etp_size
        if etp == 1:
            return rows
        blocks = at_least_fp32(rows).split(outgoing)
        return torch.cat([torch.stack(blocks[e : e + etp]).sum(0) for e in range(0, len(blocks), etp)])


def expert_order(received: Tensor) -> Tensor:
    """The stable order that turns rows by (source, expert) into rows by (expert, source); received [sources, E]."""
    sources, experts = received.shape
    ids = torch.arange(experts, device=received.device).repeat(sources)
    return ids.repeat_interleave(received.flatten()).argsort(stable=True)


def parallelize_experts(model: torch.nn.Module, parallel: Any) -> None:
    """Give every routed layer of this stage the dispatcher of its ep x etp group."""
    for layer in model.decoder.layers.values():
        if hasattr(layer.ffn, "dispatcher"):
            layer.ffn.dispatcher = ExpertDispatcher(parallel, model.config.num_experts)
