"""MXFP4 (E2M1 codes, one E8M0 scale per 32 inputs): pack, unpack and fake-quantise, exact to the bit.

Layout: the last axis is the input axis; byte i holds element 2i in its low nibble and 2i+1 in its high one;
scale byte s means 2^(s-127), 255 means NaN. `pack_naive` and `unpack_naive` are the definition, written from the
encoding table; the fast path looks codes up by the upper 16 bits of the scaled value, and `mxfp4_cpu` does what a
source's scale makes simpler. The caller chooses the scale rule; nothing here knows which tensors are packed.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import Literal

import torch

from k3.ops import mxfp4_cpu
from k3.paths import announce

BLOCK = 32
MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
ScaleRule = Literal["floor", "even", "ceil6"]
# Added to the float32 bits of a block's maximum before its exponent is read: what moves the maximum to the next power
# of two. floor: nothing; even: from 1.75 * 2^k; ceil6: anything above 1.5 * 2^k, so that 6 * 2^(k-2) still holds it.
SCALE_RULES: dict[str, int] = {"floor": 0, "even": 0x200000, "ceil6": 0x3FFFFF}
DTYPES = (torch.bfloat16, torch.float32, torch.float64)
PIECE = mxfp4_cpu.ROWS  # blocks that `Survival` takes at once
_CHUNK = 1 << 19  # elements worked on at once: temporaries stay in cache, and small beside the tensor


def pack(
    weight: torch.Tensor, rule: ScaleRule = "even", ties: str = "even", *, backend: str = "auto"
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise `weight` [..., I] (bf16 or fp32) to codes [..., I/2] and scales [..., I/32], both uint8.

    `ties` decides between two equally near codes: "even" the even code, "zero" the smaller one. A block with a NaN or
    an infinity becomes scale 255 and codes 0; a block of zeros gets scale 0 and keeps its signs.
    Source: OCP MX v1.0 section 6.3 and the rules of SCALE_RULES. Naive twin: `pack_naive`.
    backend: "torch", "triton" (CUDA, ties "even") or "auto".
    """
    blocks = _blocks(weight)
    if _choose(backend, weight.is_cuda and ties == "even") == "triton":
        if ties != "even":
            raise ValueError(f"backend='triton' rounds ties to even, not ties={ties!r}; use backend='torch'")
        from k3.ops.triton_mxfp4 import quantise

        announce("triton.mxfp4_pack")
        return quantise(weight, rule=rule)
    announce("torch.mxfp4_pack")
    packed = torch.empty(len(blocks), BLOCK // 2, dtype=torch.uint8, device=weight.device)
    scale = torch.empty(len(blocks), dtype=torch.uint8, device=weight.device)
    for rows in _chunks(len(blocks)):
        scale[rows] = _scales(blocks[rows], rule)
        packed[rows] = _codes(blocks[rows], scale[rows], ties)
    return packed.view(*weight.shape[:-1], -1), scale.view(*weight.shape[:-1], -1)


def pack_like(
    weight: torch.Tensor, source_scale: torch.Tensor, rule: ScaleRule = "even"
) -> tuple[torch.Tensor, torch.Tensor]:
    """`pack`, but a block keeps `source_scale` [..., I/32] where every value is representable with it, sign included.

    Packing what `unpack` gave with its own scales therefore returns the source bytes.
    """
    announce("torch.mxfp4_pack")
    blocks, scale = _blocks(weight.detach()), source_scale.reshape(-1).clone()
    packed = _codes_under(blocks, scale)
    bits = torch.int16 if weight.dtype == torch.bfloat16 else torch.int32
    again, blocks = unpack(packed, scale[:, None], weight.dtype).view(bits), blocks.view(bits)
    if not torch.equal(again, blocks):
        same = (again == blocks).all(-1)
        packed[~same], own = pack(blocks[~same].view(weight.dtype), rule)
        scale[~same] = own[:, 0]
    return packed.view(*weight.shape[:-1], -1), scale.view(*weight.shape[:-1], -1)


class Survival:
    """Proves of one pair after the other that `unpack` to bf16 and `pack_like` give every byte back, on a CPU.

    They give a piece back if its codes come back: these then decode to its values, so that the scale is kept.
    """

    def __init__(self):
        self._trip = mxfp4_cpu.RoundTrip(_large_table())

    def first_lost(self, pieces: Iterable[torch.Tensor], scale: torch.Tensor) -> int | None:
        """The first block that is not given back, of scales [n] and codes [n, 16] in pieces of PIECE blocks or less."""
        start = 0
        for codes in pieces:
            part = scale[start : start + len(codes)]
            if not self._trip.returns(codes, part):
                again = pack_like(unpack(codes, part[:, None]), part[:, None])
                lost = (again[0] != codes).any(1) | (again[1][:, 0] != part)
                if lost.any():
                    return start + int(lost.nonzero()[0])
            start += len(codes)
        return None


def unpack(
    packed: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype = torch.bfloat16, *, backend: str = "auto"
) -> torch.Tensor:
    """Decode codes [..., I/2] and scales [..., I/32] to [..., I]. Naive twin: `unpack_naive`.

    Exact for scales 0..252; in bf16 and fp32 scale 253 overflows to infinity from code 4.0 up and 254 from 2.0 up.
    """
    _check_pair(packed, scale, dtype)
    if _choose(backend, packed.is_cuda and dtype != torch.float64) == "triton":
        from k3.ops.triton_mxfp4 import dequantise

        announce("triton.mxfp4_unpack")
        return dequantise(packed, scale, dtype)
    announce("torch.mxfp4_unpack")
    rows = scale.numel()
    codes, scales = packed.reshape(rows, BLOCK // 2), scale.reshape(rows)
    out = torch.empty(rows, BLOCK, dtype=dtype, device=packed.device)
    if dtype == torch.bfloat16 and packed.is_cpu:
        codes = codes.clone() if codes.storage_offset() % 2 else codes  # it reads two bytes at once
        mxfp4_cpu.decode(_large_table(), codes, scales, out)
        if (extreme := mxfp4_cpu.is_extreme(scales)).any():
            out[extreme] = _values(codes[extreme], scales[extreme], dtype)
    else:
        for part in _chunks(rows):
            out[part] = _values(codes[part], scales[part], dtype)
    return out.view(*packed.shape[:-1], -1)


class _FakeQuantise(torch.autograd.Function):
    """Forward: pack and unpack the bf16-rounded value. Backward: the gradient passes unchanged (straight through)."""

    @staticmethod
    def forward(ctx, weight: torch.Tensor, rule: str) -> torch.Tensor:
        return unpack(*pack(weight.detach().to(torch.bfloat16), rule), dtype=weight.dtype)

    @staticmethod
    def backward(ctx, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad, None


def fake_quantise(weight: torch.Tensor, rule: ScaleRule = "even") -> torch.Tensor:
    """What a reader of the exported bytes will see, in `weight`'s dtype; the gradient is that of the identity."""
    return _FakeQuantise.apply(weight, rule)


def pack_naive(weight: torch.Tensor, rule: ScaleRule = "even", ties: str = "even") -> tuple[torch.Tensor, torch.Tensor]:
    """The definition of `pack` in float64: exponents by frexp, codes by counting the midpoints below each value."""
    blocks = weight.double().unflatten(-1, (-1, BLOCK))
    amax = blocks.abs().amax(-1)
    fraction, exponent = torch.frexp(amax)  # amax = fraction * 2^exponent, fraction in [0.5, 1)
    up = {"floor": fraction > 1, "even": fraction >= 0.875, "ceil6": fraction > 0.75}[rule]
    scale = (exponent - 1 + up - 2 + 127).clamp(0, 254)
    scale = torch.where(amax == 0, 0, torch.where(amax.isfinite(), scale, 255))
    value = torch.ldexp(blocks.abs(), (127 - scale)[..., None].double())
    code = torch.zeros(blocks.shape, dtype=torch.uint8)
    for low in range(7):
        middle = (MAGNITUDES[low] + MAGNITUDES[low + 1]) / 2
        code += (value >= middle) if ties == "even" and low % 2 else (value > middle)
    code = torch.where((scale == 255)[..., None], 0, code | (torch.signbit(blocks).to(torch.uint8) << 3))
    code = code.flatten(-2)
    return code[..., 0::2] | (code[..., 1::2] << 4), scale.to(torch.uint8)


def unpack_naive(packed: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """The definition of `unpack`: one code at a time, in float64."""
    table = torch.tensor([*MAGNITUDES, *(-m for m in MAGNITUDES)], dtype=torch.float64)
    codes = torch.stack([packed & 15, packed >> 4], dim=-1).flatten(-2)
    power = torch.where(scale == 255, torch.nan, torch.exp2(scale.double() - 127))
    return (table[codes.long()] * power.repeat_interleave(BLOCK, dim=-1)).to(dtype)


def _choose(backend: str, fits_triton: bool) -> str:
    if backend not in ("auto", "torch", "triton"):
        raise ValueError(f"MXFP4 backend={backend!r} is unknown; use one of auto, torch, triton")
    return ("triton" if fits_triton else "torch") if backend == "auto" else backend


def _blocks(weight: torch.Tensor) -> torch.Tensor:
    """[blocks, 32] view of a weight whose last axis is whole blocks; bf16 stays, everything else must be fp32."""
    if weight.dtype not in (torch.bfloat16, torch.float32):
        raise ValueError(f"MXFP4 packs bfloat16 or float32, not {weight.dtype}; convert the weight first")
    if weight.shape[-1] % BLOCK:
        raise ValueError(
            f"MXFP4 needs an input width divisible by {BLOCK}, got {weight.shape[-1]} in {tuple(weight.shape)}; "
            "export this model as bf16"
        )
    return weight.reshape(-1, BLOCK)


def _check_pair(packed: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> None:
    if packed.dtype != torch.uint8 or scale.dtype != torch.uint8:
        raise ValueError(f"MXFP4 codes and scales are uint8, got {packed.dtype} and {scale.dtype}; view them as uint8")
    if (*packed.shape[:-1], packed.shape[-1] * 2) != (*scale.shape[:-1], scale.shape[-1] * BLOCK):
        raise ValueError(f"MXFP4 codes {tuple(packed.shape)} need one scale per 16 bytes, got {tuple(scale.shape)}")
    if dtype not in DTYPES:
        raise ValueError(f"MXFP4 values do not fit {dtype}; ask for one of {DTYPES}")


def _chunks(rows: int) -> list[slice]:
    step = _CHUNK // BLOCK
    return [slice(start, min(start + step, rows)) for start in range(0, rows, step)]


def _scales(blocks: torch.Tensor, rule: str) -> torch.Tensor:
    """Scale bytes [rows]: exponent of the (rounded) block maximum minus 2, clamped; 255 where it is not finite."""
    if rule not in SCALE_RULES:
        raise ValueError(f"unknown MXFP4 scale rule {rule!r}; use one of {sorted(SCALE_RULES)}")
    wide = blocks.dtype == torch.float32
    bits = blocks.view(torch.int32) & 0x7FFFFFFF if wide else blocks.view(torch.int16) & 0x7FFF
    while bits.shape[-1] > 8:  # torch reduces a short last axis slowly, halves of it quickly
        half = bits.shape[-1] // 2
        bits = torch.maximum(bits[:, :half], bits[:, half:])
    bits = bits.amax(-1) if wide else bits.amax(-1).int() << 16
    scale = (((bits + SCALE_RULES[rule]) >> 23) - 2).clamp_(0, 254)
    return scale.masked_fill_(bits >= 0x7F800000, 255).to(torch.uint8)


def _values(codes: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Values [rows, 32] of codes [rows, 16] under the given scale bytes [rows]: the definition, by two small tables."""
    pairs, powers = _pair_table(codes.device), _power_table(codes.device).to(dtype)
    values = pairs.index_select(0, codes.flatten().int()).view(torch.bfloat16).view(-1, BLOCK)
    return values.to(dtype) * powers.index_select(0, scale.int())[:, None]


def _codes_under(blocks: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Codes [rows, 16] of `blocks`, right in every block whose values are all representable under its scale."""
    kept = torch.empty(len(blocks), BLOCK // 2, dtype=torch.uint8, device=blocks.device)
    if blocks.dtype == torch.bfloat16 and blocks.is_cpu:
        mxfp4_cpu.encode(blocks, scale, kept)
        if (extreme := mxfp4_cpu.is_extreme(scale)).any():
            kept[extreme] = _codes(blocks[extreme], scale[extreme], "even")
    else:
        for part in _chunks(len(blocks)):
            kept[part] = _codes(blocks[part], scale[part], "even")
    return kept


def _codes(blocks: torch.Tensor, scale: torch.Tensor, ties: str) -> torch.Tensor:
    """Packed codes [rows, 16] of `blocks` [rows, 32] under the given scale bytes [rows]."""
    inverse = _power_table(blocks.device).to(blocks.dtype).index_select(0, 254 - scale.int().clamp_max(254))
    scaled = blocks * inverse[:, None]
    if blocks.dtype == torch.float32:  # round to odd: the upper half alone still tells which side of a midpoint
        bits = scaled.view(torch.int32)
        upper = (bits | ((bits & 0xFFFF) + 0xFFFF)).view(torch.uint16)[:, 1::2]
    else:
        upper = scaled.view(torch.uint16)
    code = _code_table(ties, blocks.device).index_select(0, upper.int().flatten()).view(torch.int16)
    packed = (code | (code >> 4)).to(torch.uint8).view(-1, BLOCK // 2)
    refused = scale == 255
    return packed.masked_fill_(refused[:, None], 0) if refused.any() else packed


@cache
def _pair_table(device: torch.device) -> torch.Tensor:
    """[256] int32: the two bf16 values of a byte, side by side."""
    values = torch.tensor([*MAGNITUDES, *(-m for m in MAGNITUDES)], dtype=torch.bfloat16)
    byte = torch.arange(256)
    return torch.stack([values[byte & 15], values[byte >> 4]], dim=-1).view(torch.int32).flatten().to(device)


@cache
def _large_table() -> torch.Tensor:
    """What `mxfp4_cpu.decode` looks values up in."""
    return mxfp4_cpu.large_table(_pair_table(torch.device("cpu")).view(torch.int16).view(256, 2))


@cache
def _power_table(device: torch.device) -> torch.Tensor:
    """[256] fp32: 2^(s-127) for every scale byte, NaN for 255. Exact in bf16 too."""
    bits = torch.arange(256, dtype=torch.int32) << 23
    bits[0], bits[255] = 1 << 22, 0x7FC00000
    return bits.view(torch.float32).to(device)


@cache
def _code_table(ties: str, device: torch.device) -> torch.Tensor:
    """[65536] uint8: the code of each bf16 bit pattern (NaN and infinity saturate; their blocks are masked)."""
    if ties not in ("even", "zero"):
        raise ValueError(f"unknown tie rule {ties!r}; use 'even' or 'zero'")
    value = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).float()
    code = torch.zeros(1 << 16, dtype=torch.uint8)
    for low in range(7):
        middle = (MAGNITUDES[low] + MAGNITUDES[low + 1]) / 2
        code += (value.abs() >= middle) if ties == "even" and low % 2 else (value.abs() > middle)
    return (code | (torch.signbit(value).to(torch.uint8) << 3)).to(device)
