"""Every tensor of a release from its configuration alone: name, dtype, shape, bytes and shard.

The layer is the unit: layers of one kind share a template of suffixes, so that the 497,220 keys of the public
release cost a few string operations each. Reads no weights and no index; imports no torch.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any, Literal, NamedTuple

from k3.checkpoint.names import EXPERTS, LAYERS, ROOT, a_log_padded, layer_of

ITEM_BYTES = {"BF16": 2, "F32": 4, "U8": 1}
BLOCK = 32  # inputs per MXFP4 scale
VISION_CHANNELS = 3
# Upper bound of what one tensor adds to a shard's header beside its name.
_HEADER_ENTRY_BYTES = 160
QUANTIZATION = {"quant_method": "compressed-tensors", "format": "mxfp4-pack-quantized"}


class Tensor(NamedTuple):
    """One stored tensor; inside a template the name is the suffix after the layer's prefix."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def size_bytes(self) -> int:
        return prod(self.shape) * ITEM_BYTES[self.dtype]


class Group(NamedTuple):
    """Tensors that share shards: a layer, the globals, the projector or the vision tower."""

    prefix: str
    template: tuple[Tensor, ...]

    def tensors(self) -> Iterator[Tensor]:
        return (tensor._replace(name=self.prefix + tensor.name) for tensor in self.template)


class Shard(NamedTuple):
    """One planned file: its name, and a slice of a group's template."""

    file: str
    group: Group

    @property
    def names(self) -> list[str]:
        prefix = self.group.prefix
        return [prefix + tensor.name for tensor in self.group.template]

    @property
    def size_bytes(self) -> int:
        return sum(tensor.size_bytes for tensor in self.group.template)


@dataclass(frozen=True)
class Release:
    """What a release must contain. `experts` says how routed experts are stored; `vision` is the vision config."""

    config: Any
    experts: Literal["mxfp4", "bf16"] = "mxfp4"
    vision: Mapping[str, Any] | None = None

    @classmethod
    def from_folder(cls, folder: str | Path) -> Release:
        """Read `config.json` of a release folder."""
        return cls.from_hf(json.loads((Path(folder) / "config.json").read_text()))

    @classmethod
    def from_hf(cls, hf: Mapping[str, Any]) -> Release:
        """Read the public nested config; a vision config without sizes means a release without vision tensors."""
        from k3.config import K3Config

        vision = hf.get("vision_config") or {}
        complete = "vt_num_hidden_layers" in vision
        return cls(K3Config.from_hf(dict(hf)), expert_format(hf), vision if complete else None)

    @cached_property
    def groups(self) -> tuple[Group, ...]:
        """The layers in order, then the globals, the projector and the vision tower: one official shard each."""
        templates: dict[tuple, tuple[Tensor, ...]] = {}
        groups = []
        for layer in range(self.config.num_hidden_layers):
            kind = self.config.attention_type(layer), self.config.is_moe(layer)
            if kind not in templates:
                templates[kind] = layer_template(self.config, *kind, self.experts)
            groups.append(Group(f"{LAYERS}{layer}.", templates[kind]))
        groups.append(Group(ROOT, global_template(self.config)))
        if self.vision is not None:
            groups.append(Group("mm_projector.", projector_template(self.vision)))
            groups.append(Group("vision_tower.", vision_template(self.vision)))
        return tuple(groups)

    @property
    def num_tensors(self) -> int:
        return sum(len(group.template) for group in self.groups)

    @property
    def size_bytes(self) -> int:
        sizes = {id(group.template): sum(t.size_bytes for t in group.template) for group in self.groups}
        return sum(sizes[id(group.template)] for group in self.groups)

    def tensors(self) -> Iterator[Tensor]:
        """Every tensor under its full public name, in shard order."""
        for group in self.groups:
            yield from group.tensors()

    def find(self, name: str) -> Tensor | None:
        """Return the tensor with this full public name, or None."""
        for group in self._groups_by_prefix(name):
            if found := self._lookup[id(group.template)].get(name.removeprefix(group.prefix)):
                return found._replace(name=name)
        return None

    def _groups_by_prefix(self, name: str) -> tuple[Group, ...]:
        layer, count = layer_of(name), self.config.num_hidden_layers
        if layer is not None:
            return self.groups[layer : layer + 1] if layer < count else ()
        return tuple(group for group in self.groups[count:] if name.startswith(group.prefix))

    @cached_property
    def _lookup(self) -> dict[int, dict[str, Tensor]]:
        """Suffix -> tensor of every distinct template, by the template's identity."""
        return {id(group.template): {t.name: t for t in group.template} for group in self.groups}

    def shards(self, max_shard_size_bytes: int | None = None) -> list[Shard]:
        """Plan the files: one per group as published, cut further where a file would exceed the limit."""
        cut: dict[int, list[tuple[Tensor, ...]]] = {}
        parts = []
        for group in self.groups:
            if id(group.template) not in cut:
                cut[id(group.template)] = split_template(group, max_shard_size_bytes)
            parts += [Group(group.prefix, part) for part in cut[id(group.template)]]
        total = len(parts)
        return [Shard(shard_file(number, total), part) for number, part in enumerate(parts, 1)]


def expert_format(hf: Mapping[str, Any]) -> Literal["mxfp4", "bf16"]:
    """Return how a config says routed experts are stored. Raises NotImplementedError for any other quantization."""
    quantization = hf.get("text_config", {}).get("quantization_config") or hf.get("quantization_config")
    if quantization is None:
        return "bf16"
    found = {key: quantization.get(key) for key in QUANTIZATION}
    if found != QUANTIZATION:
        raise NotImplementedError(f"quantization_config {found} is not supported; K3 releases use {QUANTIZATION}")
    return "mxfp4"


def shard_file(number: int, total: int) -> str:
    """Return the published file name pattern of shard `number` (from 1)."""
    return f"model-{number:05d}-of-{total:06d}.safetensors"


def split_template(group: Group, max_shard_size_bytes: int | None) -> list[tuple[Tensor, ...]]:
    """Cut a template in order so that no file, header included, exceeds the limit; a packed pair is never cut."""
    if max_shard_size_bytes is None:
        return [group.template]
    parts: list[list[Tensor]] = [[]]
    filled = 0
    for atom in _atoms(group.template):
        size = sum(t.size_bytes + _HEADER_ENTRY_BYTES + len(t.name) + len(LAYERS) for t in atom)
        if size > max_shard_size_bytes:
            names = " + ".join(group.prefix + t.name for t in atom)
            raise ValueError(
                f"max_shard_size_bytes={max_shard_size_bytes} cannot hold {names}; use at least {size} bytes"
            )
        if filled and filled + size > max_shard_size_bytes:
            parts.append([])
            filled = 0
        parts[-1] += atom
        filled += size
    return [tuple(part) for part in parts]


def _atoms(template: tuple[Tensor, ...]) -> Iterator[tuple[Tensor, ...]]:
    """Single tensors, and pairs as one."""
    tensors = iter(template)
    for tensor in tensors:
        yield (tensor, next(tensors)) if tensor.name.endswith(".weight_packed") else (tensor,)


def layer_template(config: Any, attention: str, is_moe: bool, experts: str) -> tuple[Tensor, ...]:
    """Every tensor of one layer under its suffix."""
    D = config.hidden_size
    vectors = ("input_layernorm", "post_attention_layernorm", "self_attention_res_norm", "mlp_res_norm")
    rows = [Tensor(f"{name}.weight", "BF16", (D,)) for name in vectors]
    rows += [Tensor(f"{name}.weight", "BF16", (1, D)) for name in ("self_attention_res_proj", "mlp_res_proj")]
    rows += kda_template(config) if attention == "kda" else mla_template(config)
    rows += moe_template(config, experts) if is_moe else mlp_template("mlp.", D, config.intermediate_size)
    return tuple(rows)


def kda_template(config: Any) -> list[Tensor]:
    """A KDA mixer: projections in BF16, everything the recurrence reads directly in F32, A_log padded."""
    D, H, K = config.hidden_size, config.kda_num_heads, config.kda_head_dim
    linears = dict.fromkeys(("q_proj", "k_proj", "v_proj", "g_proj"), (H * K, D))
    linears |= {"f_a_proj": (K, D), "f_b_proj": (H * K, K), "b_proj": (H, D), "o_proj": (D, H * K)}
    kernel = (H * K, 1, config.kda_short_conv_kernel_size)
    rows = [Tensor(f"self_attn.{name}.weight", "BF16", shape) for name, shape in linears.items()]
    rows += [Tensor(f"self_attn.{name}_conv1d.weight", "F32", kernel) for name in "qkv"]
    rows.append(Tensor("self_attn.A_log", "F32", (a_log_padded(H, K),)))
    rows.append(Tensor("self_attn.dt_bias", "F32", (H * K,)))
    rows.append(Tensor("self_attn.o_norm.weight", "F32", (K,)))
    return rows


def mla_template(config: Any) -> list[Tensor]:
    """A gated MLA mixer, all BF16."""
    D, H, V = config.hidden_size, config.num_attention_heads, config.v_head_dim
    Q, C, tail = config.q_lora_rank, config.kv_lora_rank, config.qk_rope_head_dim
    shapes = {
        "q_a_proj": (Q, D),
        "q_a_layernorm": (Q,),
        "q_b_proj": (H * (config.qk_nope_head_dim + tail), Q),
        "kv_a_proj_with_mqa": (C + tail, D),
        "kv_a_layernorm": (C,),
        "kv_b_proj": (H * (config.qk_nope_head_dim + V), C),
        "g_proj": (H * V, D),
        "o_proj": (D, H * V),
    }
    return [Tensor(f"self_attn.{name}.weight", "BF16", shape) for name, shape in shapes.items()]


def mlp_template(prefix: str, D: int, F: int) -> list[Tensor]:
    """A dense MLP of inner width F."""
    shapes = {"gate_proj": (F, D), "up_proj": (F, D), "down_proj": (D, F)}
    return [Tensor(f"{prefix}{name}.weight", "BF16", shape) for name, shape in shapes.items()]


def moe_template(config: Any, experts: str) -> list[Tensor]:
    """Router, latent projections, shared experts and every routed expert."""
    D, E, F, L = config.hidden_size, config.num_experts, config.moe_intermediate_size, config.routed_expert_hidden_size
    moe = "block_sparse_moe."
    rows = [
        Tensor(moe + "gate.weight", "BF16", (E, D)),
        Tensor(moe + "gate.e_score_correction_bias", "F32", (E,)),
        Tensor(moe + "routed_expert_down_proj.weight", "BF16", (L, D)),
        Tensor(moe + "routed_expert_norm.weight", "BF16", (L,)),
        Tensor(moe + "routed_expert_up_proj.weight", "BF16", (D, L)),
        *mlp_template(moe + "shared_experts.", D, config.num_shared_experts * F),
    ]
    for expert in range(E):
        for which, shape in (("w1", (F, L)), ("w2", (L, F)), ("w3", (F, L))):
            rows += expert_tensors(f"{EXPERTS}{expert}.{which}.", shape, experts)
    return rows


def expert_tensors(prefix: str, shape: tuple[int, int], experts: str) -> list[Tensor]:
    """One routed weight [out, in] as stored: a BF16 tensor, or codes and scales side by side."""
    rows, width = shape
    if experts == "bf16":
        return [Tensor(prefix + "weight", "BF16", shape)]
    if width % BLOCK:
        raise ValueError(
            f"{prefix}weight has input width {width}, MXFP4 needs a multiple of {BLOCK}; store this model as bf16"
        )
    return [
        Tensor(prefix + "weight_packed", "U8", (rows, width // 2)),
        Tensor(prefix + "weight_scale", "U8", (rows, width // BLOCK)),
    ]


def global_template(config: Any) -> tuple[Tensor, ...]:
    """Embedding, head, and what follows the last layer."""
    table, D = (config.vocab_size, config.hidden_size), config.hidden_size
    shapes = {
        "model.embed_tokens": table,
        "model.norm": (D,),
        "model.output_attn_res_norm": (D,),
        "model.output_attn_res_proj": (1, D),
        "lm_head": table,
    }
    return tuple(Tensor(f"{name}.weight", "BF16", shape) for name, shape in shapes.items())


def projector_template(vision: Mapping[str, Any]) -> tuple[Tensor, ...]:
    """The patch merger between vision tower and text."""
    merged = vision["mm_hidden_size"] * prod(vision["merge_kernel_size"])
    text = vision["text_hidden_size"]
    shapes = {"proj.0": (merged, merged), "proj.2": (text, merged), "post_norm": (text,)}
    return tuple(Tensor(f"{name}.weight", "BF16", shape) for name, shape in shapes.items())


def vision_template(vision: Mapping[str, Any]) -> tuple[Tensor, ...]:
    """The vision tower, all BF16 and without biases."""
    W, F, A = vision["vt_hidden_size"], vision["vt_intermediate_size"], vision["qkv_hidden_size"]
    patch = vision["patch_size"]
    grid = vision["init_pos_emb_height"], vision["init_pos_emb_width"]
    rows = {"patch_embed.proj": (W, VISION_CHANNELS, patch, patch), "patch_embed.pos_emb": (*grid, W)}
    block = {"norm0": (W,), "norm1": (W,), "wqkv": (3 * A, W), "wo": (W, A), "mlp.fc0": (F, W), "mlp.fc1": (W, F)}
    for index in range(vision["vt_num_hidden_layers"]):
        rows |= {f"encoder.blocks.{index}.{name}": shape for name, shape in block.items()}
    rows["encoder.final_layernorm"] = (W,)
    return tuple(Tensor(f"{name}.weight", "BF16", shape) for name, shape in rows.items())
