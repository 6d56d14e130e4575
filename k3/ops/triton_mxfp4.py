"""MXFP4 encode and decode as Triton kernels; `k3.ops.mxfp4` owns the format, its rules and the torch definition.

Both kernels are bound by bytes: one program handles a run of whole 32-element groups, each byte is touched once, and
all scale arithmetic is on exponent bits, so nothing depends on how a log2 rounds.
"""

import torch
import triton
import triton.language as tl

GROUP = 32
_UNPACK, _PACK = (128, 4), (256, 4)  # groups of a program, and its warps
RULES = {"floor": 0x800000, "even": 0x600000, "ceil6": 0x400001}  # mantissa from which the shared exponent goes up


@triton.jit
def _decode_code(code, scale):
    """E2M1 code (int32) times an exact power of two (fp32), through the bits of the eight magnitudes."""
    magnitude = code & 7
    normal = ((magnitude >> 1) + 126) << 23 | (magnitude & 1) << 22
    bits = tl.where(magnitude > 1, normal, magnitude * 0x3F000000) | (code & 8) << 28
    return bits.to(tl.float32, bitcast=True) * scale


@triton.jit
def _dequantise(packed, scales, out, groups, BLOCK: tl.constexpr):
    group = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = group < groups
    s = tl.load(scales + group, mask=inside, other=127).to(tl.int32)
    bits = tl.where(s == 0, 0x00400000, tl.where(s == 255, 0x7FC00000, s << 23))
    scale = bits.to(tl.float32, bitcast=True)[:, None]
    pair = group[:, None] * 16 + tl.arange(0, 16)[None, :]
    byte = tl.load(packed + pair, mask=inside[:, None], other=0).to(tl.int32)
    value = tl.join(_decode_code(byte & 15, scale), _decode_code(byte >> 4, scale)).reshape(BLOCK, 32)
    at = group[:, None] * 32 + tl.arange(0, 32)[None, :]
    tl.store(out + at, value.to(out.dtype.element_ty), mask=inside[:, None])


@triton.jit
def _encode(size, inverse, HALF: tl.constexpr):
    """E2M1 magnitude code, as the low bits of an int32, of the float32 with bits `size` times 2^k.

    Below 2 the codes count halves, below 4 ones, above it twos: the least of three lines, clamped to the last code.
    Adding 2^23 rounds to an integer, ties to even. The lines are exact for the eight digits of bfloat16; float32 picks
    its line first and adds once, so that it rounds once.
    """
    r = size.to(tl.float32, bitcast=True) * inverse
    if HALF:
        line = tl.minimum(tl.minimum(r + r, r + 2.0), tl.minimum(r * 0.5 + 4.0, 7.0)) + 8388608.0
    else:
        r = tl.minimum(r, 6.0)
        small, middle = r < 2.0, r < 4.0
        steps = r * tl.where(small, 2.0, tl.where(middle, 1.0, 0.5))
        line = steps + tl.where(small, 8388608.0, tl.where(middle, 8388610.0, 8388612.0))
    return line.to(tl.int32, bitcast=True) & 0xF


@triton.jit
def _quantise(weight, packed, scales, groups, ROUND_UP: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr):
    group = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = group < groups
    pair = group[:, None] * 16 + tl.arange(0, 16)[None, :]
    if HALF:  # two bfloat16 in a word, each the upper half of its float32
        word = tl.load(weight + pair, mask=inside[:, None], other=0)
        signs = ((word >> 12) & 0x08) | ((word >> 24) & 0x80)
        low, high = (word & 0x7FFF) << 16, word & 0x7FFF0000
    else:
        even = tl.load(weight + pair * 2, mask=inside[:, None], other=0)
        odd = tl.load(weight + pair * 2 + 1, mask=inside[:, None], other=0)
        signs = ((even >> 28) & 0x08) | ((odd >> 24) & 0x80)
        low, high = even & 0x7FFFFFFF, odd & 0x7FFFFFFF
    top = tl.max(tl.maximum(low, high), axis=1)
    exponent = (top >> 23) - 2 + ((top & 0x7FFFFF) >= ROUND_UP).to(tl.int32)
    finite = top < 0x7F800000
    scale = tl.where(finite, tl.minimum(tl.maximum(exponent, 0), 254), 255)
    inverse = tl.where(scale >= 254, 0x00400000, (254 - scale) << 23).to(tl.float32, bitcast=True)[:, None]
    codes = _encode(low, inverse, HALF) | _encode(high, inverse, HALF) << 4 | signs
    tl.store(packed + pair, tl.where(finite[:, None], codes, 0).to(tl.uint8), mask=inside[:, None])
    tl.store(scales + group, scale.to(tl.uint8), mask=inside)


def dequantise(packed: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Values [..., 2P] of packed codes uint8 [..., P] and scale bytes uint8 [..., P / 16]; twin in `k3.ops.mxfp4`."""
    if packed.dtype != torch.uint8 or scale.dtype != torch.uint8:
        raise ValueError(f"packed is {packed.dtype}, scale {scale.dtype}; MXFP4 bytes are uint8: view them as such")
    if packed.numel() != scale.numel() * 16:
        raise ValueError(f"packed {tuple(packed.shape)} needs one scale per 16 bytes; scale is {tuple(scale.shape)}")
    packed, scale = packed.contiguous(), scale.contiguous()
    out = torch.empty(*packed.shape[:-1], packed.shape[-1] * 2, dtype=dtype, device=packed.device)
    if out.numel():
        block, warps = _UNPACK
        grid = (triton.cdiv(scale.numel(), block),)
        _dequantise[grid](packed, scale, out, scale.numel(), BLOCK=block, num_warps=warps)
    return out


def quantise(weight: torch.Tensor, *, rule: str = "even") -> tuple[torch.Tensor, torch.Tensor]:
    """(packed uint8 [..., I / 2], scale uint8 [..., I / 32]) of weight [..., I]; nearest element, ties to even code."""
    if rule not in RULES:
        raise ValueError(f"rule={rule!r} is not an MXFP4 scale rule of this kernel; use one of {sorted(RULES)}")
    if weight.shape[-1] % GROUP:
        raise ValueError(f"the input axis has {weight.shape[-1]} elements; MXFP4 groups need a multiple of {GROUP}")
    if weight.dtype not in (torch.bfloat16, torch.float32):
        raise ValueError(f"MXFP4 packs bfloat16 or float32, not {weight.dtype}; convert the weight first")
    weight = weight.contiguous()
    lead, groups = weight.shape[:-1], weight.numel() // GROUP
    packed = torch.empty(*lead, weight.shape[-1] // 2, dtype=torch.uint8, device=weight.device)
    scale = torch.empty(*lead, weight.shape[-1] // GROUP, dtype=torch.uint8, device=weight.device)
    if groups:
        block, warps = _PACK
        grid = (triton.cdiv(groups, block),)
        sizes = {"ROUND_UP": RULES[rule], "HALF": weight.dtype == torch.bfloat16, "BLOCK": block}
        _quantise[grid](weight.view(torch.int32), packed, scale, groups, **sizes, num_warps=warps)
    return packed, scale
