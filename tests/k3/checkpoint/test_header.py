"""k3.checkpoint.header and writer: strict headers, and shards that safetensors reads back."""

import json
import struct

import pytest
import torch
from safetensors.torch import load_file, save_file

from k3.checkpoint.errors import CheckpointError
from k3.checkpoint.header import encode_header, read_header
from k3.checkpoint.release import Tensor
from k3.checkpoint.writer import ShardWriter


def _write(path, header, payload=b"\0" * 8):
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + payload)
    return path


def test_header_agrees_with_safetensors(tmp_path):
    """Names, dtypes, shapes and offsets of a file the library wrote are found, and cover it."""
    tensors = {"b": torch.zeros(3, 5, dtype=torch.bfloat16), "a": torch.ones(2), "c": torch.zeros(0, 4).byte()}
    save_file(tensors, tmp_path / "x.safetensors", metadata={"format": "pt"})
    stored = read_header(tmp_path / "x.safetensors")
    assert {name: (entry.dtype, entry.shape) for name, entry in stored.items()} == {
        "a": ("F32", (2,)), "b": ("BF16", (3, 5)), "c": ("U8", (0, 4)),
    }  # fmt: skip
    raw = (tmp_path / "x.safetensors").read_bytes()
    assert raw[stored["a"].begin : stored["a"].end] == torch.ones(2).numpy().tobytes()


@pytest.mark.parametrize(
    "entry, message",
    [
        ({"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}, "spans 4 bytes, not 8"),
        ({"dtype": "F32", "shape": [2], "data_offsets": [4, 12]}, "starts at byte"),
        ({"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}, "is cut at byte"),
        ({"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}, "its header describes"),
        ({"dtype": "F32", "shape": [2]}, "unreadable entry"),
        ({"dtype": "F32", "shape": [2], "data_offsets": [0]}, "unreadable entry"),
        (7, "unreadable entry"),
    ],
)
def test_inconsistent_entries_are_refused(entry, message, tmp_path):
    """A size, gap, overrun or shape of entry that cannot be is refused with the file's name."""
    with pytest.raises(CheckpointError, match=message) as refusal:
        read_header(_write(tmp_path / "x.safetensors", {"t": entry}))
    assert "x.safetensors" in str(refusal.value)


def test_overlap_is_refused(tmp_path):
    """Two tensors that share bytes are refused."""
    one = {"dtype": "U8", "shape": [5], "data_offsets": [0, 5]}
    other = {"dtype": "U8", "shape": [5], "data_offsets": [3, 8]}
    with pytest.raises(CheckpointError, match="starts at byte"):
        read_header(_write(tmp_path / "x.safetensors", {"a": one, "b": other}))


def test_writer_gives_what_safetensors_reads(tmp_path):
    """A shard written tensor by tensor is read back by the library, transposed views included."""
    tensors = {"w": torch.randn(4, 3).T, "u": torch.arange(7, dtype=torch.uint8), "h": torch.randn(2, 2).bfloat16()}
    planned = [Tensor("w", "F32", (3, 4)), Tensor("u", "U8", (7,)), Tensor("h", "BF16", (2, 2))]
    with ShardWriter(tmp_path / "x.safetensors", planned) as writer:
        for tensor in tensors.values():
            writer.write(tensor)
    found = load_file(tmp_path / "x.safetensors")
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())
    assert len(encode_header([(*tensor, tensor.size_bytes) for tensor in planned])) % 8 == 0


@pytest.mark.parametrize("tensor", [torch.zeros(3, 4).bfloat16(), torch.zeros(4, 3)])
def test_unplanned_tensor_leaves_no_file(tensor, tmp_path):
    """A tensor of another dtype or shape than planned is refused and nothing appears under either name."""
    with (
        pytest.raises(ValueError, match="planned as"),
        ShardWriter(tmp_path / "x.safetensors", [Tensor("w", "F32", (3, 4))]) as writer,
    ):
        writer.write(tensor)
    assert not list(tmp_path.iterdir())
