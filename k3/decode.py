"""What decoding remembers between calls, and greedy generation with it.

Attention Residuals keep nothing: their bank is rebuilt over the layers for every token.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from k3.kda import KDAState


class Cache:
    """Per layer: KDA's convolution histories and fp32 state, or MLA's normed latents with their tails."""

    def __init__(self) -> None:
        self.kda: dict[int, KDAState] = {}
        self.mla: dict[int, Tensor] = {}

    def kda_state(self, layer_index: int) -> KDAState | None:
        return self.kda.get(layer_index)

    def store_kda(self, layer_index: int, state: KDAState) -> None:
        self.kda[layer_index] = state

    def extend_mla(self, layer_index: int, latent: Tensor) -> Tensor:
        """Append latent [B, T, *] and return all of them, [B, S, *]."""
        past = self.mla.get(layer_index)
        self.mla[layer_index] = latent if past is None else torch.cat([past, latent], dim=1)
        return self.mla[layer_index]


@torch.no_grad()
def generate(model, input_ids: Tensor, max_new_tokens: int) -> Tensor:
    """Greedy continuation of ids [B, T], one token per step through a cache: [B, T + max_new_tokens]."""
    cache, step = Cache(), input_ids
    for _ in range(max_new_tokens):
        step = model(step, cache=cache)["logits"][:, -1:].argmax(-1)
        input_ids = torch.cat([input_ids, step], dim=1)
    return input_ids
