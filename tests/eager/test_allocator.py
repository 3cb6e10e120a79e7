"""The caching allocator: its rules one by one, and a replay beside what an H100 had, phase by phase."""

from __future__ import annotations

import pytest

import foreplan as fp
from foreplan.eager import Variant, as_pytorch
from foreplan.eager.allocator import CachingAllocator
from tests.eager.card import MIB, of_card, steps


def test_small_blocks_share_segments_of_two_mebibytes() -> None:
    allocator = CachingAllocator()
    a, b = allocator.allocate(1), allocator.allocate(513)
    assert (a.nbytes, b.nbytes, b.address - a.address) == (512, 1024, 512)
    assert (allocator.allocated, allocator.reserved) == (1536, 2 * MIB)


@pytest.mark.parametrize(
    ("nbytes", "segment"), [(MIB, 2), (MIB + 1, 20), (10 * MIB - 512, 20), (10 * MIB, 10), (11 * MIB + 1, 12)]
)
def test_the_segment_of_a_first_block(nbytes: int, segment: int) -> None:
    allocator = CachingAllocator()
    allocator.allocate(nbytes)
    assert allocator.reserved == segment * MIB


def test_a_large_block_is_split_if_more_than_a_mebibyte_is_left() -> None:
    allocator = CachingAllocator()
    assert allocator.allocate(11 * MIB).nbytes == 12 * MIB
    allocator = CachingAllocator()
    allocator.free(allocator.allocate(20 * MIB))
    assert allocator.allocate(18 * MIB).nbytes == 18 * MIB
    assert allocator.reserved == 20 * MIB


def test_the_smallest_block_that_is_large_enough_is_taken_and_neighbours_become_one() -> None:
    allocator = CachingAllocator()
    taken = [allocator.allocate(size * MIB) for size in (4, 2, 6, 3)]
    addresses = [block.address for block in taken]
    allocator.free(taken[0])
    allocator.free(taken[2])
    assert allocator.allocate(6 * MIB).address == addresses[2]
    assert allocator.allocate(4 * MIB).address == addresses[0]
    allocator = CachingAllocator()
    for block in [allocator.allocate(5 * MIB) for _ in range(4)]:
        allocator.free(block)
    assert allocator.allocate(20 * MIB).address == allocator.segments[0].address and allocator.reserved == 20 * MIB


@pytest.mark.parametrize("adam", [False, True])
def test_gpt2_takes_what_it_took_on_an_h100(adam: bool) -> None:
    """But for the 65 MiB of cuBLAS, which are there before, and the place of a block in a segment: 1 MiB each."""
    case = of_card(model="gpt2_small:batch=4,seq=1024", **({"adam": True} if adam else {}))
    optimizer = fp.optim.Adam(1e-4) if adam else fp.optim.Nesterov(1e-4)
    found = as_pytorch(fp.models.build("gpt2_small:batch=4,seq=1024"), "cross_entropy", optimizer, Variant(), True)
    for phase, mine, theirs in zip(found.phases, found.replayed, steps(case), strict=True):
        assert theirs["live"] - mine.allocated / MIB == pytest.approx(65, abs=5), phase
        assert theirs["reserved"] - mine.reserved / MIB == pytest.approx(65, abs=3), phase
        if phase.name == "backward":
            assert theirs["most_live"] - mine.most_allocated / MIB == pytest.approx(65, abs=4.6 if adam else 0.01)


def test_mobilenet_takes_what_it_took_on_an_h100() -> None:
    case = of_card(model="torchvision mobilenet_v2:batch=32")
    graph = fp.models.build("mobilenet_v2:batch=32")
    found = as_pytorch(graph, "cross_entropy", fp.optim.Nesterov(1e-4), Variant(), True)
    for phase, mine, theirs in zip(found.phases, found.replayed, steps(case), strict=True):
        assert theirs["live"] - mine.allocated / MIB == pytest.approx(65, abs=2), phase
        if phase.name in ("inputs", "model", "backward"):
            assert theirs["most_live"] - mine.most_allocated / MIB == pytest.approx(65, abs=2), phase
