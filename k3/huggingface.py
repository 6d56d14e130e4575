"""Kimi K3 for transformers' Auto classes: the public nested config, and a causal language model around `K3Model`.

Imported by `registry` alone. The loss here is the shifted one of every transformers class. `generate` runs the whole
prefix at every step; `k3.decode.generate` keeps a cache.
"""

from __future__ import annotations

from os import PathLike
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from k3.config import K3Config
from k3.model import K3Model, refuse
from k3.sequence import SequenceLayout


class KimiK3TextConfig(PretrainedConfig):
    """The nested text_config, kept as published."""

    model_type = "kimi_linear"
    base_config_key = "text_config"


class KimiK3Config(PretrainedConfig):
    """The public config of `model_type` kimi_k3; `K3Config.from_hf_config` judges it when a model is built."""

    model_type = "kimi_k3"
    sub_configs = {"text_config": KimiK3TextConfig}

    def __init__(self, text_config: dict[str, Any] | PretrainedConfig | None = None, **kwargs: Any):
        if text_config is None:
            text_config = K3Config().to_hf()["text_config"]
        self.text_config = KimiK3TextConfig(**text_config) if isinstance(text_config, dict) else text_config
        super().__init__(**kwargs)


class KimiK3ForCausalLM(PreTrainedModel, GenerationMixin):
    """`K3Model` under transformers' names; parameters have the public names with routed experts stacked."""

    config_class = KimiK3Config
    base_model_prefix = "language_model"

    def __init__(self, config: KimiK3Config):
        super().__init__(config)
        backbone = K3Model(K3Config.from_hf_config(config))
        self.language_model = backbone.language_model
        object.__setattr__(self, "backbone", backbone)  # a second path to the same modules, not a second child
        self.post_init()

    @classmethod
    def from_pretrained(
        cls,
        folder: str | PathLike[str],
        *,
        config: KimiK3Config | None = None,
        dtype: str | torch.dtype | None = None,
        **unsupported: Any,
    ) -> KimiK3ForCausalLM:
        """Load a public-layout folder with `load_hf_weights`; dtype as in transformers, the config's by default."""
        from k3.checkpoint import load_hf_weights

        given = {name: value for name, value in unsupported.items() if value not in (None, False)}
        if unknown := sorted(set(given) - {"_from_auto", "adapter_kwargs", "trust_remote_code"}):
            raise NotImplementedError(
                f"from_pretrained: {', '.join(unknown)} is not implemented; pass config and dtype"
            )
        config = config or KimiK3Config.from_pretrained(folder)
        model = cls._from_config(config, **({} if dtype in (None, "auto") else {"dtype": dtype}))
        load_hf_weights(model.backbone, folder, model.backbone.config)
        return model.eval()

    def save_pretrained(self, *_: Any, **__: Any) -> None:
        raise NotImplementedError(
            "save_pretrained would write stacked experts under names no other reader knows; use "
            "k3.checkpoint.save_hf_weights(model.backbone, folder, model.backbone.config)"
        )

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        return_dict: bool | None = None,
        use_cache: bool | None = None,
        position_ids: Tensor | None = None,
        logits_to_keep: int | Tensor = 0,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        **unsupported: Any,
    ) -> CausalLMOutputWithPast | tuple:
        """ids, mask, labels [B, T]; labels equal the ids and are shifted here; padded positions get zero logits."""
        flags = {"output_attentions": output_attentions, "output_hidden_states": output_hidden_states}
        refuse(unsupported | {name: flag or None for name, flag in flags.items()})
        logits = self._logits(input_ids, attention_mask)
        loss = self.backbone.loss(logits, labels, loss_mask=_next_is_real(attention_mask), shift=True)
        kept = logits if isinstance(logits_to_keep, int) and logits_to_keep == 0 else _keep(logits, logits_to_keep)
        output = CausalLMOutputWithPast(loss=loss, logits=kept)
        return output if return_dict is not False else output.to_tuple()

    def _logits(self, input_ids: Tensor, attention_mask: Tensor | None) -> Tensor:
        """Padded tokens are removed and every row becomes a document of one packed row, as in the vendor's class."""
        if attention_mask is None or bool(attention_mask.all()):
            return self.backbone(input_ids)["logits"]
        real = attention_mask.bool()
        cu_seqlens = nn.functional.pad(real.sum(-1).cumsum(0), (1, 0)).to(torch.int32)
        packed = self.backbone(input_ids[real][None], layout=SequenceLayout(cu_seqlens=cu_seqlens))["logits"][0]
        return packed.new_zeros(*input_ids.shape, packed.shape[-1]).masked_scatter(real.unsqueeze(-1), packed)

    def prepare_inputs_for_generation(self, input_ids: Tensor, attention_mask: Tensor | None = None, **_: Any) -> dict:
        return {"input_ids": input_ids, "attention_mask": attention_mask}

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        return False

    def _init_weights(self, module: nn.Module) -> None:
        """K3Model has initialised itself."""

    def get_input_embeddings(self) -> nn.Module:
        return self.backbone.decoder.embed_tokens

    def get_output_embeddings(self) -> nn.Module:
        return self.language_model["lm_head"]


def _next_is_real(attention_mask: Tensor | None) -> Tensor | None:
    """[B, T] mask of positions that are real and whose label after the shift is real too."""
    if attention_mask is None:
        return None
    following = nn.functional.pad(attention_mask[:, 1:], (0, 1))
    return attention_mask * following


def _keep(logits: Tensor, which: int | Tensor) -> Tensor:
    return logits[:, -which:] if isinstance(which, int) else logits[:, which]
