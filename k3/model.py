"""The K3 text model: embedding, decoder layers, output mix, head. The same class serves one rank and a thousand."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from k3.config import K3Config
from k3.initial import fill
from k3.layers import RMSNorm, linear
from k3.loss import lm_loss
from k3.residual import DecoderLayer, mix
from k3.sequence import SequenceLayout


class Decoder(nn.Module):
    """The layers of one pipeline stage; the first stage has the embedding, the last one the output mix and norm."""

    def __init__(self, config: K3Config, layer_indices: Sequence[int], first: bool, last: bool, *, device, dtype):
        super().__init__()
        D, eps, factory = config.hidden_size, config.rms_norm_eps, {"device": device, "dtype": dtype}
        if first:
            self.embed_tokens = nn.Embedding(config.vocab_size, D, padding_idx=config.pad_token_id, **factory)
        self.layers = nn.ModuleDict({str(i): DecoderLayer(config, i, **factory) for i in layer_indices})
        if last:
            self.output_attn_res_norm, self.output_attn_res_proj = RMSNorm(D, eps, **factory), linear(D, 1, **factory)
            self.norm = RMSNorm(D, eps, **factory)

    def forward(self, prefix: Tensor, bank: Sequence[Tensor], layout=None, cache=None) -> tuple[Tensor, list[Tensor]]:
        """Run this stage's layers on the residual state."""
        bank = list(bank)
        for layer in self.layers.values():
            prefix, bank = layer(prefix, bank, layout=layout, cache=cache)
        return prefix, bank

    def output(self, prefix: Tensor, bank: Sequence[Tensor]) -> Tensor:
        """The head's input: the last mix over depth, normalised."""
        return self.norm(mix(prefix, bank, self.output_attn_res_proj, self.output_attn_res_norm))


class K3Model(nn.Module):
    """Kimi K3's text backbone; `state_dict` keys are the public checkpoint's, with routed experts stacked."""

    def __init__(self, config: K3Config, parallel=None, *, device=None, dtype=None):
        super().__init__()
        self.config, self.parallel = config, parallel
        self.first_stage = parallel is None or parallel.pp_is_first
        self.last_stage = parallel is None or parallel.pp_is_last
        everything = range(config.num_hidden_layers)
        self.layer_indices = list(everything if parallel is None else parallel.layer_indices(config))
        factory = {"device": device, "dtype": dtype}
        decoder = Decoder(config, self.layer_indices, self.first_stage, self.last_stage, **factory)
        self.language_model = nn.ModuleDict({"model": decoder})
        if self.last_stage:
            self.language_model["lm_head"] = linear(config.hidden_size, config.vocab_size, **factory)
        self.loss_fn = lm_loss
        self.reset_parameters()

    @property
    def decoder(self) -> Decoder:
        return self.language_model["model"]

    def forward(
        self,
        input_ids: Tensor,
        labels: Tensor | None = None,
        loss_mask: Tensor | None = None,
        layout=None,
        cache=None,
        shift_labels: bool = False,
        **unsupported: object,
    ) -> dict[str, Tensor | None]:
        """input_ids, labels, loss_mask [B, T] -> {"logits": [B, T, vocab], "loss": scalar or None}.

        labels are aligned (position t predicts labels[t]) unless `shift_labels`. Raises NotImplementedError for
        pixel values, images, videos and every other input this text model does not have.
        """
        refuse(unsupported)
        if not (self.first_stage and self.last_stage):
            raise NotImplementedError(
                f"this chunk holds layers {self.layer_indices} of {self.config.num_hidden_layers}; run the stages "
                "through k3.parallel.pipeline.Pipeline"
            )
        if layout is not None:
            layout.check(input_ids, cache)
        prefix, bank = self.decoder(self.embed(input_ids), [], layout=layout, cache=cache)
        logits = self.head(prefix, bank)
        return {"logits": logits, "loss": self.loss(logits, labels, loss_mask, layout, shift_labels)}

    def embed(self, input_ids: Tensor) -> Tensor:
        return self.decoder.embed_tokens(input_ids)

    def head(self, prefix: Tensor, bank: Sequence[Tensor]) -> Tensor:
        return self.language_model["lm_head"](self.decoder.output(prefix, bank))

    def loss(self, logits: Tensor, labels: Tensor | None, loss_mask=None, layout=None, shift: bool = False):
        """The loss of aligned labels, or of labels equal to the ids if `shift`; None without labels."""
        if labels is None:
            return None
        if shift:
            labels = (layout or SequenceLayout()).shift_labels(labels)
        return self.loss_fn(logits, labels, loss_mask)

    def reset_parameters(self, seed: int | None = None) -> None:
        """Give every parameter its first value, from a `seed` that torch draws if None; nothing on the meta device."""
        if next(self.parameters()).device.type != "meta":
            fill(self, random_seed() if seed is None else seed)


def random_seed() -> int:
    """A seed for `reset_parameters` from torch's global generator."""
    return int(torch.randint(2**62, (), device="cpu"))


def refuse(inputs: dict[str, object]) -> None:
    """Raise for inputs beyond text, by name; those that are None were not given."""
    given = sorted(name for name, value in inputs.items() if value is not None)
    if given:
        raise NotImplementedError(f"{', '.join(given)}: K3 here is the text backbone; pass input_ids alone")
