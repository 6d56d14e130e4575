"""Packed sequences: the contract of a packed row, packing and unpacking, and who holds which token."""

import pytest
import torch

from k3.parallel import ParallelState, context_layout
from k3.parallel.context import contiguous_spans, zigzag_spans
from k3.sequence import SequenceLayout, document_bounds, pack_documents, unpack_thd_forward_output


@pytest.mark.parametrize(
    "bounds,rule",
    [
        ([[0, 8]], "rank 1"),
        ([0.0, 8.0], "integer bounds"),
        ([1, 8], "must start at 0"),
        ([0, 7], "must end at T=8"),
        ([0, 5, 3, 8], "must not decrease"),
        ([1, 5, 3, 7], "must start at 0 and must end at T=8 and must not decrease"),
    ],
)
def test_bounds_name_value_and_rule(bounds, rule):
    """Bounds that do not describe the row are refused with the value and every rule they break."""
    with pytest.raises(ValueError, match=rule):
        document_bounds(torch.tensor(bounds), 8)


def test_a_packed_batch_is_one_row():
    """Packed ids have the shape [1, total]."""
    with pytest.raises(ValueError, match=r"pack all documents into one row, \[1, T\]"):
        SequenceLayout(cu_seqlens=torch.tensor([0, 8])).check(torch.zeros(2, 8))


def test_documents_must_divide_by_twice_cp():
    """Headwise needs every padded document divisible by 2 * cp, state passing the whole row by cp."""
    parallel = ParallelState(cp_size=2)
    with pytest.raises(ValueError, match=r"a document of 6 tokens is not divisible by 2\*cp_size=4; pad it to 8"):
        context_layout(parallel, "headwise", 10, torch.tensor([0, 4, 10]))
    with pytest.raises(ValueError, match="9 tokens are not divisible by cp_size=2; pad the row to 10"):
        context_layout(parallel, "state", 9, torch.tensor([0, 4, 9]))


def test_local_cp_size_is_one_or_cp():
    """A packed batch is prepared for one rank or for all cp ranks, nothing between."""
    with pytest.raises(ValueError, match="local_cp_size=2 is neither 1 nor cp_size=4"):
        context_layout(ParallelState(cp_size=4), "state", 8, local_cp_size=2)
    assert type(context_layout(ParallelState(cp_size=4), "state", 8, local_cp_size=1)) is SequenceLayout


def test_one_rank_never_enters_context_parallelism():
    """With cp_size 1 the layout is the plain one."""
    assert type(context_layout(ParallelState(), "headwise", 7, torch.tensor([0, 7]))) is SequenceLayout


@pytest.mark.parametrize("size", [1, 2, 4, 8])
@pytest.mark.parametrize("spans", [zigzag_spans, contiguous_spans])
def test_every_token_has_one_rank(spans, size):
    """The ranks' spans cover every token once and every rank holds the same number."""
    bounds = [0, 16, 16, 80, 96]
    held = [[t for s in spans(bounds, size, rank) for t in range(s.start, s.stop)] for rank in range(size)]
    assert sorted(token for tokens in held for token in tokens) == list(range(96))
    assert {len(tokens) for tokens in held} == {96 // size}


def test_zigzag_balances_causal_attention():
    """Every rank attends to the same number of keys in total."""
    work = [
        sum((s.start + s.stop + 1) * (s.stop - s.start) for s in zigzag_spans([0, 64], 4, rank)) for rank in range(4)
    ]
    assert len(set(work)) == 1


def test_pack_and_unpack():
    """Documents are padded to 2 * cp with ignored labels, and unpacking drops the padding again."""
    documents = [torch.arange(1, 6), torch.tensor([7]), torch.arange(8, 16)]
    packed = pack_documents(documents, documents, cp_size=2)
    assert packed.cu_seqlens.tolist() == [0, 8, 12, 20]
    assert packed.labels[0, 5:8].tolist() == [-100] * 3
    found = unpack_thd_forward_output(packed.input_ids, packed.cu_seqlens, packed.lengths)
    assert all(torch.equal(a, b) for a, b in zip(found, documents, strict=True))


def test_labels_follow_documents():
    """Labels of another length than their document are refused."""
    with pytest.raises(ValueError, match="differ in length"):
        pack_documents([torch.arange(3)], [torch.arange(2)])
