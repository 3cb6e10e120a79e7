"""What is described and made stays what it was, whatever else was described and made before."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from foreplan.graph import TensorType, Window
from foreplan.graph.types import FLOAT32
from foreplan.runtime.cpu import threads
from foreplan.runtime.cpu.gemm.products import matrix
from foreplan.runtime.cpu.onednn import library as c
from foreplan.runtime.cpu.onednn import primitives
from foreplan.runtime.cpu.onednn.primitives import OLD, After, Primitive
from tests.cpu.check import needs_onednn, scratch

pytestmark = needs_onednn()
MANY = 1100  # more than oneDNN keeps


@pytest.fixture(autouse=True)
def one_thread_again() -> Iterator[None]:
    yield
    threads.set_threads(1)


def product_added_to(m: int, k: int, n: int) -> Primitive:
    return primitives.matmul(matrix(m, k), matrix(k, n), matrix(m, n), [After(OLD)])


def result(made: Primitive, m: int, k: int, n: int) -> np.ndarray:
    """Of ones, of which it may be added to; what lies behind its scratch memory is watched."""
    arrays = [np.ones(shape, np.float32) for shape in ((m, k), (k, n), (m, n))]
    memory = scratch(made.scratchpad + (1 << 20))
    memory[...] = 0xA5
    addresses = {place: array.ctypes.data for place, array in zip((c.SRC, c.WEIGHTS, c.DST), arrays)}
    made.bind(addresses | {c.SCRATCHPAD: memory.ctypes.data})()
    assert (memory[made.scratchpad :] == 0xA5).all()
    return arrays[2]


@pytest.mark.parametrize("sizes", [(1, 1, 16), (1, 3, 3), (40, 3, 3)])
def test_a_product_that_was_described_before_is_added_to(sizes: tuple[int, int, int]) -> None:
    """oneDNN's cache gives a description that it has seen, which points to attributes that are gone."""
    assert (result(product_added_to(*sizes), *sizes) == 1 + sizes[1]).all()
    described = product_added_to(*sizes)
    for n in range(1, MANY):
        assert (result(product_added_to(2, 2, n), 2, 2, n) == 3).all()
    assert (result(described, *sizes) == 1 + sizes[1]).all()


@pytest.mark.parametrize("sizes", [(1, 17, 17), (8, 1, 5), (5, 13, 8)])
def test_a_product_described_for_one_thread_stays_within_its_scratch_memory(sizes: tuple[int, int, int]) -> None:
    """Though another of the same description was made for two threads before."""
    m, k, n = sizes
    right = Window(TensorType(FLOAT32, (k, n)), (4, 4 * k))
    threads.set_threads(2)
    made = primitives.matmul(matrix(m, k), right, matrix(m, n), ())
    with threads.one_thread():
        small = primitives.matmul(matrix(m, k), right, matrix(m, n), ())
    for product in (made, small):
        assert (result(product, m, k, n) == k).all()
