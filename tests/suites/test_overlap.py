"""The arithmetic of kernel intervals: unions, intersections, and what counts as which kind."""

import pytest

from suites.overlap import Overlap, by_kind, merged, overlap_of


def test_union():
    """Overlapping, touching, nested and equal intervals merge; gaps stay."""
    assert merged([(5, 6), (0, 2), (1, 3), (3, 4), (0.5, 1), (5, 6)]) == [(0, 4), (5, 6)]
    assert merged([]) == []


@pytest.mark.parametrize(
    ("communication", "computation", "both"),
    [
        ([(0, 4)], [(1, 2), (3, 6)], 2),  # partly, in two places
        ([(0, 1), (2, 3)], [(1, 2)], 0),  # touching is not overlapping
        ([(0, 4), (1, 3)], [(2, 5), (2, 5)], 2),  # kernels side by side count once
        ([], [(0, 1)], 0),
        ([(1, 2)], [(0, 3)], 1),  # hidden whole
    ],
)
def test_intersection(communication, computation, both):
    """The time in which both kinds run is that of the intersection of the unions."""
    found = overlap_of(communication, computation)
    assert found.both_s == pytest.approx(both)
    assert found == overlap_of(communication[::-1], computation[::-1])


def test_kinds():
    """NCCL's kernels communicate, copies and announced ranges are neither, all else computes."""
    found = by_kind(
        [
            ("ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)", 0.0, 2.0),
            ("nccl:all_to_all", 0.0, 9.0),
            ("Memcpy DtoD (Device -> Device)", 0.0, 9.0),
            ("chunk_kda_fwd_kernel", 1.0, 4.0),
        ]
    )
    assert found == Overlap(2.0, 3.0, 1.0) and found.share == 0.5
    assert Overlap(0.0, 1.0, 0.0).share == 0.0
