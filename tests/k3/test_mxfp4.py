"""k3.ops.mxfp4: the fast path against its naive twin, and what it refuses."""

import pytest
import torch

from k3.ops import mxfp4
from k3.paths import listen


@pytest.mark.parametrize("rule", ["floor", "even", "ceil6"])
@pytest.mark.parametrize("ties", ["even", "zero"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_pack_equals_its_naive_twin(rule, ties, dtype):
    """Over magnitudes from subnormal to near overflow, with ties and zeros, the fast bytes are the naive ones."""
    random = torch.Generator().manual_seed(11)
    weight = torch.randn(1000, 64, generator=random) * torch.exp2(torch.randint(-140, 126, (1000, 1), generator=random))
    weight[::7, ::5] = 0.0
    weight[1::7] = weight[1::7].bfloat16().float()
    weight = weight.to(dtype)
    for fast, naive in zip(mxfp4.pack(weight, rule, ties), mxfp4.pack_naive(weight, rule, ties), strict=True):
        assert torch.equal(fast, naive)


@pytest.mark.parametrize("dtype", mxfp4.DTYPES)
def test_unpack_equals_its_naive_twin(dtype):
    """Random codes under every scale byte decode to the same bits as one code at a time in float64."""
    random = torch.Generator().manual_seed(12)
    packed = torch.randint(0, 256, (256, 2, 16), dtype=torch.uint8, generator=random).flatten(-2)
    scale = torch.arange(256, dtype=torch.uint8)[:, None].expand(256, 2).contiguous()
    fast, naive = mxfp4.unpack(packed, scale, dtype), mxfp4.unpack_naive(packed, scale, dtype)
    torch.testing.assert_close(fast, naive, rtol=0, atol=0, equal_nan=True)


def test_stacked_experts_keep_their_leading_axes(monkeypatch):
    """A stack [E, out, in] packs to [E, out, in/2] and [E, out, in/32], also when it spans several chunks."""
    monkeypatch.setattr(mxfp4, "_CHUNK", 64)
    weight = torch.randn(3, 5, 96, generator=torch.Generator().manual_seed(13))
    packed, scale = mxfp4.pack(weight)
    assert packed.shape == (3, 5, 48) and scale.shape == (3, 5, 3)
    one = mxfp4.pack_naive(weight[2, 4:])
    assert torch.equal(packed[2, 4:], one[0]) and torch.equal(scale[2, 4:], one[1])


def test_codes_may_start_at_an_odd_byte():
    """Codes that are a view beginning at an odd byte of their storage decode like a copy of them."""
    stored = torch.randint(0, 256, (33,), dtype=torch.uint8, generator=torch.Generator().manual_seed(14))
    scale = torch.tensor([120, 125], dtype=torch.uint8)
    assert torch.equal(mxfp4.unpack(stored[1:], scale), mxfp4.unpack_naive(stored[1:], scale))


@pytest.mark.parametrize("blocks", [1, 2])
def test_codes_may_be_columns_of_a_wider_matrix(blocks):
    """A rank's columns of a packed weight, which lie apart in memory, decode as their copy does, and pack back."""
    random = torch.Generator().manual_seed(16)
    packed = torch.randint(0, 256, (6, 64), dtype=torch.uint8, generator=random)
    scale = torch.randint(100, 140, (6, 4), dtype=torch.uint8, generator=random)
    mine, mine_scale = packed[:, 16 : 16 * (1 + blocks)], scale[:, 1 : 1 + blocks]
    values = mxfp4.unpack(mine, mine_scale)
    assert torch.equal(values, mxfp4.unpack(mine.contiguous(), mine_scale.contiguous()))
    heard: list[str] = []
    with listen(heard.append):
        again = mxfp4.pack_like(values, mine_scale)
    assert torch.equal(again[0], mine) and torch.equal(again[1], mine_scale)
    assert "torch.mxfp4_pack" in heard


@pytest.mark.parametrize("rows", [mxfp4.PIECE - 1, mxfp4.PIECE + 1])
def test_source_scales_over_several_pieces(rows):
    """Codes and scales of more or less than one piece come back; a block that does not fit its scale is packed anew."""
    random = torch.Generator().manual_seed(15)
    codes = torch.randint(0, 256, (rows, 16), dtype=torch.uint8, generator=random)
    scale = torch.randint(0, 253, (rows, 1), dtype=torch.uint8, generator=random)
    values = mxfp4.unpack(codes, scale)
    assert all(torch.equal(*both) for both in zip(mxfp4.pack_like(values, scale), (codes, scale), strict=True))
    values[-1] = torch.linspace(1, 1.1, 32)
    again = mxfp4.pack_like(values, scale)
    assert torch.equal(again[0][:-1], codes[:-1]) and torch.equal(again[0][-1:], mxfp4.pack(values[-1:])[0])


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: mxfp4.pack(torch.zeros(2, 20)), "divisible by 32, got 20"),
        (lambda: mxfp4.pack(torch.zeros(2, 32, dtype=torch.float16)), "torch.float16"),
        (lambda: mxfp4.pack(torch.zeros(2, 32), "round"), "unknown MXFP4 scale rule 'round'"),
        (lambda: mxfp4.pack(torch.zeros(2, 32), ties="up"), "unknown tie rule 'up'"),
        (lambda: mxfp4.unpack(torch.zeros(2, 16, dtype=torch.int8), torch.zeros(2, 1).byte()), "torch.int8"),
        (lambda: mxfp4.unpack(torch.zeros(2, 32).byte(), torch.zeros(2, 1).byte()), "one scale per 16 bytes"),
        (lambda: mxfp4.unpack(torch.zeros(2, 16).byte(), torch.zeros(2, 1).byte(), torch.float16), "torch.float16"),
    ],
)
def test_refuses_by_name(call, message):
    """A width, dtype or rule that MXFP4 does not have is refused with the value in the message."""
    with pytest.raises(ValueError, match=message):
        call()
