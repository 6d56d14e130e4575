"""The public nested config: how its fields map to `K3Config`, which have no role here, and which values are refused."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterable, Mapping
from os import PathLike
from pathlib import Path
from typing import Any


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


# text_config fields with a role, named alike in K3Config
TEXT = _words("""
    num_hidden_layers hidden_size num_attention_heads num_key_value_heads vocab_size intermediate_size
    max_position_embeddings rms_norm_eps hidden_act activation_situ_beta activation_situ_linear_beta q_lora_rank
    kv_lora_rank qk_nope_head_dim qk_rope_head_dim v_head_dim mla_use_nope mla_use_output_gate attn_res_block_size
    first_k_dense_replace moe_intermediate_size routed_expert_hidden_size num_experts num_experts_per_token
    num_shared_experts moe_router_activation_func moe_renormalize routed_scaling_factor num_expert_group topk_group
    topk_method use_grouped_topk latent_moe_use_norm moe_layer_freq pad_token_id
    initializer_range
""")
# linear_attn_config field -> K3Config field
LINEAR_ATTENTION = {
    "kda_layers": "kda_layers",
    "full_attn_layers": "full_attention_layers",
    "num_heads": "kda_num_heads",
    "head_dim": "kda_head_dim",
    "short_conv_kernel_size": "kda_short_conv_kernel_size",
    "gate_lower_bound": "kda_gate_lower_bound",
    "use_full_rank_gate": "kda_use_full_rank_gate",
}
# stored without effect in the vendor's code, so a config may leave them out
OPTIONAL = _words("""
    max_position_embeddings topk_method use_grouped_topk num_key_value_heads pad_token_id initializer_range
""")

# fields that change nothing in the forward pass, whatever they hold; so does any field that begins with "_"
INERT_TEXT = _words("""
    architectures auto_map model_type dtype torch_dtype transformers_version use_cache bos_token_id eos_token_id
    bad_words_ids begin_suppress_tokens chunk_size_feed_forward decoder_start_token_id
    diversity_penalty do_sample early_stopping encoder_no_repeat_ngram_size exponential_decay_length_penalty
    finetuning_task forced_bos_token_id forced_eos_token_id id2label label2id is_decoder length_penalty max_length
    min_length no_repeat_ngram_size num_beam_groups num_beams num_return_sequences output_attentions
    output_hidden_states output_scores prefix problem_type remove_invalid_values repetition_penalty return_dict
    return_dict_in_generate sep_token_id suppress_tokens task_specific_params temperature tf_legacy_loss
    tokenizer_class top_k top_p torchscript typical_p use_bfloat16 rope_theta head_dim
""")
INERT_TOP = _words("""
    architectures auto_map model_type dtype torch_dtype bos_token_id eos_token_id pad_token_id transformers_version
    image_placeholder media_placeholder_token_id vision_config use_cache return_dict output_hidden_states
    output_attentions id2label label2id problem_type chunk_size_feed_forward
""")
# fields that would change the model; the one value that does not
REFUSED_UNLESS = {
    "tie_word_embeddings": False,
    "num_nextn_predict_layers": 0,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "hidden_dropout": 0.0,
    "rope_scaling": None,
    "add_cross_attention": False,
    "cross_attention_hidden_size": None,
    "is_encoder_decoder": False,
    "tie_encoder_decoder": False,
    "pruned_heads": {},
    "ignore_index": -100,
}

PUBLISHED_QUANTIZATION = {
    "config_groups": {
        "group_0": {
            "format": "mxfp4-pack-quantized",
            "input_activations": None,
            "output_activations": None,
            "targets": ["Linear"],
            "weights": {
                "actorder": None,
                "block_structure": None,
                "dynamic": False,
                "group_size": 32,
                "num_bits": 4,
                "observer": "minmax",
                "observer_kwargs": {},
                "scale_dtype": "torch.uint8",
                "strategy": "group",
                "symmetric": True,
                "type": "float",
                "zp_dtype": None,
            },
        }
    },
    "format": "mxfp4-pack-quantized",
    "global_compression_ratio": None,
    "ignore": [
        "re:.*self_attn.*",
        "re:.*shared_experts.*",
        "re:.*mlp\\.(gate|up|gate_up|down)_proj.*",
        "re:.*lm_head.*",
        "re:.*vision_tower.*",
        "re:.*mm_projector.*",
    ],
    "kv_cache_scheme": None,
    "quant_method": "compressed-tensors",
    "quantization_status": "compressed",
}

# what `from_fields` starts from when the model did not come from a public file
PUBLIC_SHELL = {
    "architectures": ["KimiK3ForConditionalGeneration"],
    "bos_token_id": 163584,
    "dtype": "bfloat16",
    "eos_token_id": 163586,
    "ignore_index": -100,
    "media_placeholder_token_id": 163605,
    "model_type": "kimi_k3",
    "text_config": {
        "architectures": ["KimiLinearForCausalLM"],
        "bos_token_id": 163584,
        "dtype": "bfloat16",
        "eos_token_id": 163586,
        "initializer_range": 0.02,
        "linear_attn_config": {},
        "model_type": "kimi_linear",
        "num_nextn_predict_layers": 0,
        "tie_word_embeddings": False,
        "use_cache": True,
    },
    "tie_word_embeddings": False,
}


def read(source: str | PathLike[str] | Mapping[str, Any]) -> dict[str, Any]:
    """The public config as a dict of its own; a flat text config is put under `text_config`."""
    if not isinstance(source, Mapping):
        path = Path(source)
        source = json.loads((path / "config.json" if path.is_dir() else path).read_text())
    public = copy.deepcopy(dict(source))
    if "text_config" not in public and public.get("model_type") == "kimi_linear":
        public = {**copy.deepcopy(PUBLIC_SHELL), "text_config": public}
    return public


def to_fields(public: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """K3Config keywords from the public form, and every fault found on the way."""
    if public.get("model_type") != "kimi_k3" or not isinstance(public.get("text_config"), Mapping):
        kind, keys = public.get("model_type"), sorted(public)
        return {}, [f"model_type={kind!r} with fields {keys} is not kimi_k3 with a nested text_config"]
    text = public["text_config"]
    linear = text.get("linear_attn_config")
    values, found = _mapped(text, dict(zip(TEXT, TEXT, strict=True)), "text_config")
    if isinstance(linear, Mapping):
        more, also = _mapped(linear, LINEAR_ATTENTION, "linear_attn_config")
        values, found = values | more, [*found, *also, *_strangers(linear, LINEAR_ATTENTION, "linear_attn_config")]
    else:
        found.append("text_config.linear_attn_config is missing; the KDA layers are described there")
    values.setdefault("pad_token_id", None)
    known = {*TEXT, *INERT_TEXT, *REFUSED_UNLESS, "linear_attn_config", "quantization_config"}
    top_known = {*INERT_TOP, *REFUSED_UNLESS, "text_config", "quantization_config"}
    return values, [
        *found,
        *_strangers(text, known, "text_config"),
        *_strangers(public, top_known, "config"),
        *_refused(text, "text_config"),
        *_refused(public, "config"),
    ]


def from_fields(values: Mapping[str, Any], source: Mapping[str, Any] | None) -> dict[str, Any]:
    """The public form of `values`, over a copy of the form they came from."""
    public = copy.deepcopy(dict(source or PUBLIC_SHELL))
    text = public["text_config"]
    text.update({name: values[name] for name in TEXT})
    text["linear_attn_config"].update({name: _plain(values[ours]) for name, ours in LINEAR_ATTENTION.items()})
    public["pad_token_id"] = values["pad_token_id"]
    return public


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _mapped(section: Mapping[str, Any], table: Mapping[str, str], where: str) -> tuple[dict[str, Any], list[str]]:
    values = {ours: section[name] for name, ours in table.items() if name in section}
    missing = sorted(set(table) - set(section) - set(OPTIONAL))
    return values, [f"{where}.{name} is missing; the public config has it" for name in missing]


def _strangers(section: Mapping[str, Any], known: Iterable[str], where: str) -> list[str]:
    unknown = sorted(name for name in set(section) - set(known) if not name.startswith("_"))
    if not unknown:
        return []
    return [f"{where} has unknown fields {', '.join(unknown)}; remove them, or teach K3Config their role"]


def _refused(section: Mapping[str, Any], where: str) -> list[str]:
    found = [
        f"{where}.{name}={section[name]!r} is not implemented; the public model has {allowed!r}"
        for name, allowed in REFUSED_UNLESS.items()
        if name in section and section[name] != allowed
    ]
    quantization = section.get("quantization_config")
    if quantization is not None and quantization != PUBLISHED_QUANTIZATION:
        found.append(f"{where}.quantization_config is not the published one: {_differences(quantization)}")
    return found


def _differences(quantization: Any) -> str:
    """The entries in which a quantization_config departs from the published one."""
    if not isinstance(quantization, Mapping):
        return repr(quantization)
    names = sorted({*quantization, *PUBLISHED_QUANTIZATION})
    entries = [(name, quantization.get(name), PUBLISHED_QUANTIZATION.get(name)) for name in names]
    return ", ".join(f"{name}={found!r} instead of {public!r}" for name, found, public in entries if found != public)
