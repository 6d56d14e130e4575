"""Context parallelism with the kernels that training uses: bfloat16 layers on two GPUs against one.

In float64 and float32 the layouts of par_context.py take torch's paths on a GPU, too. Here KDA runs fla's chunked
kernels and MLA the fused attention, over rows of up to 128k tokens and packed documents. The reference is the whole
sequence on each rank's own GPU through the same kernels, so limits hold for two roundings of bfloat16; a kernel that
reads another head's gate, or a lost state, is off by 1e-1 or more.
"""

import pytest
import torch

from k3.kda import KDA
from k3.mla import MLA
from k3.parallel import ParallelState, connect, context_layout
from k3.sequence import SequenceLayout
from suites.gpu_common import exact_float32, within  # noqa: F401
from suites.layout_layers import built, draw, run, summed
from suites.ranks import device

pytestmark = [
    pytest.mark.skipif(device().type != "cuda", reason="needs ranks on GPUs; run it by k3-harness run gpu"),
    pytest.mark.usefixtures("exact_float32"),
]
FORWARD, BACKWARD = 2e-2, 5e-2
MODES = ("headwise", "state")
TWO = pytest.mark.ranks(2, timeout_s=180)
# Tokens of documents before and after padding to 2 * cp: some shorter than the convolution, one across the middle.
DOCUMENTS = {"state": (1, 3, 700, 2, 64, 1, 2000, 65, 1260), "headwise": (4, 8, 700, 4, 64, 4, 2000, 68, 1244)}


def compare(kind, mode: str, length: int, bounds: torch.Tensor | None = None, groups: int | None = None) -> None:
    """Output, input gradient and every parameter's gradient of a layer over two ranks against the whole on one."""
    parallel = connect(ParallelState(cp_size=2), device().type)
    layer, x, upstream = built(kind, 0), draw(length, 2), draw(length, 3)
    layout = context_layout(parallel, mode, length, bounds, head_groups=groups)
    whole = SequenceLayout(cu_seqlens=None if bounds is None else bounds.to(device()))
    wanted = run(layer, x, upstream, layout=whole)
    wanted |= {name: layout.split(wanted[name]) for name in ("y", "dx")}
    found = summed(run(layer, layout.split(x), layout.split(upstream), layout=layout), parallel.group("cp"))
    limits = dict.fromkeys(wanted, BACKWARD) | {"y": FORWARD}
    within({name: (found[name], wanted[name]) for name in wanted}, limits)


@TWO
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("length", [8192, 32768, 131072])
def test_kda_rows(mode, length):
    """A KDA layer over one row of `length` tokens split over two GPUs equals the whole row on one."""
    compare(KDA, mode, length)


@TWO
@pytest.mark.parametrize("mode", MODES)
def test_kda_packed(mode):
    """A KDA layer over packed documents, some of one token and one on both GPUs, equals the whole row on one."""
    lengths = torch.tensor([0, *DOCUMENTS[mode]])
    compare(KDA, mode, int(lengths.sum()), lengths.cumsum(0).to(torch.int32))


@TWO
@pytest.mark.parametrize("groups", [2, 4])
def test_kda_rows_in_turns(groups):
    """A KDA layer that passes its states over groups of heads in turn equals the whole row on one GPU."""
    compare(KDA, "state", 8192, groups=groups)


@TWO
@pytest.mark.parametrize("groups", [2, 4])
def test_kda_packed_in_turns(groups):
    """Packed documents with states passed in turn equal the whole row on one GPU."""
    lengths = torch.tensor([0, *DOCUMENTS["state"]])
    compare(KDA, "state", int(lengths.sum()), lengths.cumsum(0).to(torch.int32), groups)


@TWO
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("length", [8192, 32768, 131072])
def test_mla_rows(mode, length):
    """A latent attention layer over one row of `length` tokens split over two GPUs equals the whole row on one."""
    compare(MLA, mode, length)


@TWO
@pytest.mark.parametrize("mode", MODES)
def test_mla_packed(mode):
    """A latent attention layer over packed documents on two GPUs equals the whole row on one."""
    lengths = torch.tensor([0, *DOCUMENTS[mode]])
    compare(MLA, mode, int(lengths.sum()), lengths.cumsum(0).to(torch.int32))
