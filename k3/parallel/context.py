"""Context parallelism: one sequence over the cp ranks, exact in outputs and gradients, for rows and packed documents.

Two ways, both chosen per batch by `layouts.context_layout`:

- headwise: every document is cut into 2 * cp chunks and rank r holds chunks r and 2 * cp - 1 - r (zigzag, which
  balances causal attention). KDA swaps tokens for heads by one all-to-all before its convolution and back by one
  after its recurrence. Needs local heads divisible by cp.
- state: every rank holds a contiguous run of tokens. KDA runs on its own tokens from a zero state; a second run, from
  the unit state with zero values, gives the transition of the state and its effect on every output; one all-gather of
  (transition, state) and a composition of prefixes do the rest. Over long shares the heads run in groups by turns
  instead, once, from the state of the rank before (`turns`). The convolution gets its history by a small all-gather.
  Communication does not grow with the sequence.

MLA gathers the latent, one vector a token instead of keys and values of every head, and attends chunk by chunk.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from k3.kda import KDAState
from k3.parallel import collectives
from k3.parallel.turns import choose_groups, keep_in_graph, run_in_turns
from k3.sequence import SequenceLayout, document_bounds

TOKENS = 1  # the token dim of every tensor [B, T, *]


class Span(NamedTuple):
    """Tokens start..stop of the whole sequence, in the document that starts at `document`."""

    start: int
    stop: int
    document: int


def zigzag_spans(bounds: list[int], size: int, rank: int) -> list[Span]:
    """The chunks rank holds, in its local order: of each document first chunk `rank`, then its mirror."""
    spans = []
    for first, last in zip(bounds, bounds[1:], strict=False):
        step = (last - first) // (2 * size)
        for chunk in (rank, 2 * size - 1 - rank):
            spans.append(Span(first + chunk * step, first + (chunk + 1) * step, first))
    return [span for span in spans if span.stop > span.start]


def contiguous_spans(bounds: list[int], size: int, rank: int) -> list[Span]:
    """The pieces of documents inside this rank's contiguous share of all tokens."""
    step = bounds[-1] // size
    start, stop = rank * step, (rank + 1) * step
    pieces = zip(bounds, bounds[1:], strict=False)
    return [Span(max(a, start), min(b, stop), a) for a, b in pieces if max(a, start) < min(b, stop)]


@dataclass(frozen=True, kw_only=True, eq=False)
class ContextLayout(SequenceLayout):
    """This rank's share of `total` tokens. `cu_seqlens` stays global: the documents of the whole packed row.

    `head_groups`: over how many groups of heads states are passed in turn; 1 is no turns, None `choose_groups`.
    """

    parallel: Any
    total: int
    bounds: list[int]  # of documents, in the whole sequence
    head_groups: int | None = None
    _moved: dict = field(default_factory=dict, repr=False)

    @property
    def local_tokens(self) -> int:
        """Tokens on each rank."""
        return self.total // self.parallel.cp_size

    @property
    def spans(self) -> list[Span]:
        """What this rank holds, in local order."""
        return self.spans_of(self.parallel.cp_rank)

    @property
    def order(self) -> Tensor:
        """Global position of every token, ranks one after the other."""
        ranks = range(self.parallel.cp_size)
        return torch.cat([torch.arange(s.start, s.stop) for rank in ranks for s in self.spans_of(rank)])

    def spans_of(self, rank: int) -> list[Span]:
        """What rank `rank` holds, in its local order."""
        raise NotImplementedError

    def check(self, input_ids: Tensor, cache=None) -> None:
        """Raise ValueError unless the ids are this rank's share, [B, total / cp]."""
        refuse_state(cache)
        found = input_ids.shape[TOKENS]
        if found != self.local_tokens:
            raise ValueError(
                f"{found} tokens where a rank's share of {self.total} over cp_size={self.parallel.cp_size} is "
                f"{self.local_tokens}; split the whole batch once with layout.split"
            )

    def split(self, x: Tensor, dim: int = TOKENS) -> Tensor:
        """Return this rank's tokens of the whole x. Raises ValueError when x does not hold all tokens (split twice)."""
        if x.shape[dim] != self.total:
            raise ValueError(
                f"{x.shape[dim]} tokens along dim {dim} where the whole sequence has {self.total}; "
                "split the whole batch once, and hand the model what was split"
            )
        return torch.cat([x.narrow(dim, s.start, s.stop - s.start) for s in self.spans], dim)

    def join(self, x: Tensor, dim: int = TOKENS) -> Tensor:
        """Return the whole x from the ranks' tokens, in order. No gradient. Undoes `split`."""
        whole = collectives.all_gather(x, dim, self.parallel.group("cp"), "join")
        return self.sort(whole, dim)

    def sort(self, x: Tensor, dim: int = TOKENS) -> Tensor:
        """Put tokens gathered rank after rank into sequence order."""
        return x.index_select(dim, self.moved("inverse", x.device))

    @property
    def inverse(self) -> Tensor:
        """Where each token of the whole sequence stands among the ranks' tokens."""
        return self.order.argsort()

    def moved(self, name: str, device: torch.device) -> Tensor:
        """One of this layout's index tensors on `device`, moved there once."""
        if (name, device) not in self._moved:
            self._moved[name, device] = getattr(self, name).to(device)
        return self._moved[name, device]

    def shift_labels(self, labels: Tensor) -> Tensor:
        """Refused: the label of a share's last token lies on another rank."""
        raise ValueError("shift_labels=True on a share of the tokens; shift the whole batch before it is split")

    def mla(self, core: Callable, q: Tensor, latent: Tensor) -> Tensor:
        """Gather the latent (backward reduce-scatter) and attend span by span to the document so far."""
        whole = self.sort(collectives.gather_pieces(latent, TOKENS, self.parallel.group("cp"), "mla"))
        outputs, done = [], 0
        for span in self.spans:
            size = span.stop - span.start
            outputs.append(core(q[:, done : done + size], whole[:, span.document : span.stop]))
            done += size
        return torch.cat(outputs, dim=TOKENS)


class HeadwiseLayout(ContextLayout):
    """Zigzag shares; KDA swaps tokens for heads."""

    def spans_of(self, rank: int) -> list[Span]:
        return zigzag_spans(self.bounds, self.parallel.cp_size, rank)

    def kda(self, core: Callable, q: Tensor, k: Tensor, v: Tensor, z: Tensor, beta: Tensor, weights: Any, state=None):
        """Run `core` on all tokens of 1/cp of the heads: o [B, T/cp, H, V] and no state."""
        refuse_state(state)
        H = beta.shape[-1]
        wide = [x.unflatten(-1, (H, -1)) for x in (q, k, v, z, beta)]  # [B, T/cp, H, *]
        mine = self.tokens_to_heads(torch.cat(wide, dim=-1))  # [B, T, H/cp, 4K + 1]
        *projections, beta = mine.split([x.shape[-1] for x in wide], dim=-1)
        q, k, v, z = (x.flatten(-2) for x in projections)
        bounds = None if self.cu_seqlens is None else self.moved("cu_seqlens", q.device)
        o, _ = core(q, k, v, z, beta.squeeze(-1), self.own_heads(weights), cu_seqlens=bounds, state=None)
        return self.heads_to_tokens(o), None

    def own_heads(self, weights: Any) -> Any:
        """The part of each per-head tensor that belongs to this rank's heads; the rest gets a zero gradient."""
        size, rank = self.parallel.cp_size, self.parallel.cp_rank
        return type(weights)(*(w.unflatten(0, (size, -1))[rank] for w in weights))

    def tokens_to_heads(self, x: Tensor) -> Tensor:
        """[B, T/cp, H, F] -> [B, T, H/cp, F] in sequence order. One all-to-all, and one in backward."""
        size = self.parallel.cp_size
        rows = x.unflatten(2, (size, -1)).movedim(2, 0)  # [cp (to), B, T/cp, H/cp, F]
        rows = collectives.all_to_all(rows, None, None, self.parallel.group("cp"), "kda")  # [cp (from), ...]
        return self.sort(rows.movedim(0, 1).flatten(1, 2))

    def heads_to_tokens(self, x: Tensor) -> Tensor:
        """[B, T, H/cp, F] -> [B, T/cp, H, F]; undoes `tokens_to_heads`. One all-to-all, and one in backward."""
        size = self.parallel.cp_size
        rows = x.index_select(TOKENS, self.moved("order", x.device)).unflatten(1, (size, -1)).movedim(1, 0)
        rows = collectives.all_to_all(rows, None, None, self.parallel.group("cp"), "kda")  # [cp (from), ...]
        return rows.movedim(0, 2).flatten(2, 3)


class StateLayout(ContextLayout):
    """Contiguous shares; KDA passes its state and the convolution's history."""

    def spans_of(self, rank: int) -> list[Span]:
        return contiguous_spans(self.bounds, self.parallel.cp_size, rank)

    def continues(self, rank: int) -> bool:
        """Whether the first document of rank's share began on an earlier rank."""
        first = self.spans_of(rank)[0]
        return first.document < first.start

    @property
    def local_cu_seqlens(self) -> Tensor | None:
        """Bounds of the pieces of documents on this rank; None when there is one."""
        if len(self.spans) == 1:
            return None
        starts = [span.start - self.spans[0].start for span in self.spans]
        return torch.tensor([*starts, self.local_tokens], dtype=torch.int32)

    def kda(self, core: Callable, q: Tensor, k: Tensor, v: Tensor, z: Tensor, beta: Tensor, weights: Any, state=None):
        """Run `core` on this rank's tokens, from the state that earlier ranks leave: o [B, T/cp, H, V] and no state."""
        refuse_state(state)
        bounds = None if self.local_cu_seqlens is None else self.moved("local_cu_seqlens", q.device)
        tails, history = self.history(q, k, v, weights.q_conv.shape[-1] - 1)
        if (groups := self.groups_of(beta.shape[-1])) > 1:
            o = run_in_turns(self, core, (q, k, v, z, beta), weights, history, groups, bounds)
            return keep_in_graph(o, tails), None
        before = KDAState(*history, None)
        o, after = core(q, k, v, z, beta, weights, cu_seqlens=bounds, state=before, keep_state=True)
        through, transition = self.run_from_unit_state(core, (q, k, v, z, beta), weights, before, after.S)
        gathered = collectives.gather_pieces(
            torch.stack([transition, after.S[-q.shape[0] :]]).unsqueeze(0), 0, self.parallel.group("cp"), "kda"
        )  # [cp, 2, B, H, K, V]
        o = keep_in_graph(keep_in_graph(o, tails), gathered)
        return o if through is None else self.add_entering_state(o, through, self.entering_state(gathered)), None

    def groups_of(self, heads: int) -> int:
        """The head groups of a layer with `heads` local heads. Raises ValueError when they do not divide them."""
        groups = self.head_groups or choose_groups(heads, self.parallel.cp_size, self.local_tokens)
        if heads % groups:
            raise ValueError(f"head_groups={groups} does not divide {heads} local heads; use a divisor, or 1")
        return groups

    def history(self, q: Tensor, k: Tensor, v: Tensor, reach: int) -> tuple[Tensor, list[Tensor | None]]:
        """The `reach` convolution inputs before this rank's tokens, zero before the document: 3 x [B, reach, H*K]."""
        kept = min(reach, self.local_tokens)
        tail = torch.cat([q, k, v], dim=-1)[:, self.local_tokens - kept :]
        tails = collectives.gather_pieces(tail, TOKENS, self.parallel.group("cp"), "kda")  # [B, cp * kept, 3*H*K]
        if not self.continues(self.parallel.cp_rank):
            return tails, [None, None, None]
        before = torch.cat([tails.new_zeros(len(tails), reach, tails.shape[-1]), tails], dim=TOKENS)
        end = reach + self.parallel.cp_rank * kept
        inside = min(reach, self.spans[0].start - self.spans[0].document)
        seen = torch.arange(reach, device=q.device) >= reach - inside
        window = before[:, end - reach : end] * seen[:, None].to(tails.dtype)
        return tails, list(window.chunk(3, dim=-1))

    def run_from_unit_state(self, core: Callable, tensors, weights: Any, before, S: Tensor):
        """What the state that enters does: to each output of the first piece, [B, t, H, K], and to the last state.

        With zero values and the unit state, the recurrence returns the transition itself. Outputs are None where no
        state enters; the transition is zero where the share's last document begins on this rank.
        """
        B, H, K = tensors[0].shape[0], *S.shape[1:3]
        nothing = S.new_zeros(B, H, K, K)
        if not self.continues(self.parallel.cp_rank):
            return None, nothing
        size = self.spans[0].stop - self.spans[0].start
        unit = torch.eye(K, dtype=S.dtype, device=S.device).expand(B, H, K, K)
        no_values = weights._replace(v_conv=torch.zeros_like(weights.v_conv))
        past = before._replace(S=unit)
        first = (x[:, :size] for x in tensors)
        through, after = core(*first, no_values, cu_seqlens=None, state=past, keep_state=True)
        return through, after.S if len(self.spans) == 1 else nothing

    def entering_state(self, gathered: Tensor) -> Tensor:
        """Compose the earlier ranks' (transition, state): S <- M S + S', from zero where a document begins."""
        state = torch.zeros_like(gathered[0, 0])
        for rank in range(self.parallel.cp_rank):
            transition, local = gathered[rank].unbind(0)
            state = transition @ state + local if self.continues(rank) else local
        return state

    def add_entering_state(self, o: Tensor, through: Tensor, state: Tensor) -> Tensor:
        """o_t + S^T (M_t^T q_t) on the first piece of the share; `through` is M_t^T q_t."""
        size = through.shape[TOKENS]
        effect = torch.einsum("bthk,bhkv->bthv", through.to(state.dtype), state)
        first = (o[:, :size].to(state.dtype) + effect).to(o.dtype)
        return torch.cat([first, o[:, size:]], dim=TOKENS)


def refuse_state(state: Any) -> None:
    """Decoding caches belong to whole sequences."""
    if state is not None:
        raise NotImplementedError("a decoding cache under context parallelism; decode with cp_size=1")


MODES = {"headwise": HeadwiseLayout, "state": StateLayout}


def shared_layout(
    parallel: Any, mode: str, total: int, cu_seqlens: Tensor | None, head_groups: int | None
) -> ContextLayout:
    """The layout of a batch whose tokens are shared out over cp ranks. Raises ValueError naming value and rule."""
    size = parallel.cp_size
    bounds = document_bounds(cu_seqlens, total)
    if mode == "state" and total % size:
        raise ValueError(
            f"{total} tokens are not divisible by cp_size={size}; pad the row to {-(-total // size) * size}"
        )
    if mode == "headwise":
        for first, last in zip(bounds, bounds[1:], strict=False):
            if (last - first) % (2 * size):
                raise ValueError(
                    f"a document of {last - first} tokens is not divisible by 2*cp_size={2 * size}; pad it to "
                    f"{-(-(last - first) // (2 * size)) * 2 * size}"
                )
    return MODES[mode](cu_seqlens=cu_seqlens, parallel=parallel, total=total, bounds=bounds, head_groups=head_groups)
