"""What is drawn and read in blocks is what it would be at once, and nothing as large lies beside it."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from foreplan.graph import Initializer, Normal, Stored, TensorType, TruncatedNormal, Uniform
from foreplan.graph.init import BLOCK, blocks, generator_for
from foreplan.graph.types import FLOAT32

SHAPES = [(), (0, 3), (7,), (3 * BLOCK // 4 + 5,), (3, BLOCK // 2 + 1), (2, 3, BLOCK // 4), (700, 33, 20)]


def _truncated(shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    sample = np.asarray(rng.standard_normal(shape, dtype=np.float32))
    while (outside := np.abs(sample) > 2).any():
        sample[outside] = rng.standard_normal(int(outside.sum()), dtype=np.float32)
    return sample * np.float32(0.5)


WHOLE: list[tuple[Initializer, Callable[[tuple[int, ...], np.random.Generator], np.ndarray]]] = [
    (Normal(0.5, 1.0), lambda shape, rng: rng.standard_normal(shape, dtype=np.float32) * np.float32(0.5) + 1),
    (Uniform(-1.0, 3.0), lambda shape, rng: rng.random(shape, dtype=np.float32) * np.float32(4) - 1),
    (TruncatedNormal(0.5), _truncated),
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("init, whole", WHOLE, ids=lambda each: type(each).__name__)
def test_blocks_are_drawn_as_the_whole_would_be(
    init: Initializer,
    whole: Callable[[tuple[int, ...], np.random.Generator], np.ndarray],
    shape: tuple[int, ...],
) -> None:
    expected = whole(shape, generator_for(3, "w"))
    dense = np.zeros(shape, np.float32)
    turned = np.zeros(shape[::-1], np.float32).T
    for out in (dense, turned):
        init.fill(out, generator_for(3, "w"))
        np.testing.assert_array_equal(out, expected)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_blocks_cover_an_array_in_order(shape: tuple[int, ...]) -> None:
    array = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    found = list(blocks(array))
    assert all(block.nbytes <= BLOCK and np.shares_memory(block, array) for block in found if array.size)
    np.testing.assert_array_equal(np.concatenate([block.ravel() for block in found]), array.ravel())


def _beside(work: Callable[[], object]) -> int:
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("init", [init for init, _ in WHOLE], ids=lambda each: type(each).__name__)
def test_nothing_as_large_lies_beside_what_is_drawn(init: Initializer) -> None:
    out = np.empty((16, BLOCK), np.float32)  # 64 blocks
    most = 24 * BLOCK if isinstance(init, TruncatedNormal) else 6 * BLOCK  # the places of 4.6 % of the elements, twice
    assert _beside(lambda: init.fill(out, generator_for(3, "w"))) < most


def test_weights_in_a_file_are_read_into_their_place(tmp_path: Path) -> None:
    content = np.arange(16 * BLOCK // 4, dtype=np.float32).reshape(64, -1)
    (tmp_path / "weights").write_bytes(content.tobytes())
    type = TensorType(FLOAT32, content.shape)
    stored, out = Stored(tmp_path / "weights", 0, type, content.nbytes), np.empty_like(content)
    assert _beside(lambda: stored.fill(out, generator_for(0, ""))) < 3 * BLOCK
    np.testing.assert_array_equal(out, content)
