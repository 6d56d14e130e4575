"""MXFP4 codes against the handed tables: decoding, encoding under every rule, and the libraries where they agree."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from k3.ops import mxfp4

GOLDEN = Path(__file__).parent / "golden"
RULES = ("floor", "even", "ceil6")


def _tables() -> dict[str, torch.Tensor]:
    return load_file(GOLDEN / "mxfp4.safetensors")


def _decode_inputs(table: dict[str, torch.Tensor], scale_row: int) -> tuple[torch.Tensor, torch.Tensor]:
    """All 256 bytes as 16 blocks under one scale."""
    scale = table["decode.scale"][scale_row].expand(16)
    return table["decode.byte"].reshape(16, 16), scale.reshape(16, 1)


@pytest.mark.parametrize("dtype", ["bf16", "f32", "f64"])
@pytest.mark.parametrize("scale_row", range(8))
def test_decode_equals_table(scale_row, dtype):
    """All 256 bytes under scales 0, 1, 119, 126, 127, 128, 254 and 255 decode to the table's bits."""
    table = _tables()
    expected = table[f"decode.value_{dtype}"][scale_row].reshape(16, 32)
    got = mxfp4.unpack(*_decode_inputs(table, scale_row), expected.dtype)
    torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(got.signbit() & ~got.isnan(), expected.signbit() & ~expected.isnan())


@pytest.mark.parametrize("ties", ["even", "zero"])
@pytest.mark.parametrize("rule", RULES)
def test_encode_equals_table(rule, ties):
    """The 48 rows (ties, thresholds, zeros, subnormals, infinities, NaN) encode to the table's bytes."""
    table = _tables()
    packed, scale = mxfp4.pack(table["encode.input_f32"], rule, ties)
    key = f"encode.{rule}_{'rne' if ties == 'even' else 'tiesdown'}"
    assert torch.equal(scale.flatten(), table[f"{key}.scale"])
    assert torch.equal(packed, table[f"{key}.packed"])


@pytest.mark.parametrize("rule", RULES)
def test_bfloat16_encodes_like_float32(rule):
    """A bf16 weight takes a path of its own and gives the bytes of the same values in float32."""
    rounded = _tables()["encode.input_f32"].bfloat16()
    for narrow, wide in zip(mxfp4.pack(rounded, rule), mxfp4.pack(rounded.float(), rule), strict=True):
        assert torch.equal(narrow, wide)


@pytest.mark.parametrize(
    "library, rule",
    [("torchao_floor", "floor"), ("torchao_even", "even"), ("torchao_rceil", "ceil6"),
     ("compressed_tensors_0.20.1", "even")],
)  # fmt: skip
def test_agrees_with_library(library, rule):
    """On every finite row where the table says a library agrees with its rule, our bytes are the library's."""
    table, facts = _tables(), json.loads((GOLDEN / "mxfp4.json").read_text())
    entry = facts["checks"]["encode"]["compressed_tensors_0.20.1" if "compressed" in library else library]
    names = facts["encode_row_names"]
    agreed = [row for row in range(48) if table["encode.finite_rows"][row] and names[row] not in entry["different"]]
    assert len(agreed) == entry["rows_equal"]
    packed, scale = mxfp4.pack(table["encode.input_f32"][agreed], rule)
    assert torch.equal(packed, table[f"lib.{library}.packed"][agreed])
    if library.startswith("torchao"):
        assert torch.equal(scale.flatten(), table[f"lib.{library}.scale"][agreed])


@pytest.mark.parametrize("rule", RULES)
def test_fake_quantise_is_what_a_reader_sees(rule):
    """Fake quantisation returns the decoded export of the bf16-rounded weight, and passes the gradient unchanged."""
    weight = torch.randn(63, 96, generator=torch.Generator().manual_seed(3)).mul(0.02).requires_grad_()
    out = mxfp4.fake_quantise(weight, rule)
    expected = mxfp4.unpack_naive(*mxfp4.pack_naive(weight.detach().bfloat16().float(), rule), torch.float32)
    assert torch.equal(out, expected)
    incoming = torch.randn(63, 96, generator=torch.Generator().manual_seed(4))
    out.backward(incoming)
    assert torch.equal(weight.grad, incoming)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "f32"])
def test_source_scale_returns_source_bytes(dtype):
    """Decoding random codes and packing them with their own scales gives the source bytes back, -0 included."""
    random = torch.Generator().manual_seed(5)
    packed = torch.randint(0, 256, (65, 48), dtype=torch.uint8, generator=random)
    scale = torch.randint(0, 253, (65, 3), dtype=torch.uint8, generator=random)  # 253 overflows
    packed[0], packed[1, :16] = 0x88, 0  # a row of -0, a block of +0 under a scale that is not 0
    scale[2:5, 0] = torch.tensor([0, 1, 252])
    packed[5:9] &= 0xBB  # magnitudes up to 1.5, for which no rule gives the scale back
    again = mxfp4.pack_like(mxfp4.unpack(packed, scale, dtype), scale)
    assert torch.equal(again[0], packed) and torch.equal(again[1], scale)


def test_source_scale_is_dropped_where_it_does_not_fit():
    """A block whose values are not all representable under the source scale is packed by the rule instead."""
    weight = torch.full((1, 64), 3.0)
    weight[0, 5] = 2.9  # the first block only
    packed, scale = mxfp4.pack_like(weight, torch.full((1, 2), 127, dtype=torch.uint8))  # the rule would take 126
    expected = mxfp4.pack(weight, "even")
    assert expected[1].tolist() == [[126, 126]] and scale.tolist() == [[126, 127]]
    assert torch.equal(packed[:, :16], expected[0][:, :16])
