"""Tensors beyond 2^31 elements and 2^31 bytes: every engine of the host counts them, in inference and in training."""

from __future__ import annotations

import numpy as np
import pytest

import foreplan as fp
from foreplan.runtime.room import room
from tests.cpu.check import needs_onednn

GIB = 1 << 30
TARGETS = ["numpy", pytest.param("cpu:threads=1", marks=needs_onednn())]


def needs(nbytes: int) -> None:
    found = room()
    if found is not None and found.nbytes < nbytes + GIB:
        pytest.skip(f"needs {nbytes >> 30} GiB of free memory, and a GiB for others: run it where there is more")


@pytest.mark.thorough
@pytest.mark.parametrize("target", TARGETS)
def test_more_than_2_31_elements(target: str) -> None:
    """Of one byte."""
    needs(5 * GIB)
    count = 2**31 + 4096
    x = np.zeros(count, np.uint8)
    places = [0, 2**31 - 1, 2**31, 2**31 + 1, count - 2, count - 1]
    x[places] = [1, 3, 5, 0, 0, 7]
    graph = fp.trace(lambda x: np.maximum(x * np.uint8(3), np.uint8(2)), fp.spec((count,), "uint8"))
    (found,) = fp.compile(graph, target=target).bind().step({"x": x}).outputs.values()
    assert found[places].tolist() == [3, 9, 15, 2, 2, 21]
    assert int(found.sum(dtype=np.int64)) == 2 * count + 1 + 7 + 13 + 19


@pytest.mark.thorough
@pytest.mark.parametrize("target", TARGETS)
def test_more_than_2_31_bytes_of_an_input(target: str) -> None:
    """3 GiB of float32: element-wise, and a sum of each row."""
    needs(7 * GIB)
    rows, width = 3 * GIB // 4 // 1024, 1024
    x = np.zeros((rows, width), np.float32)
    x[:, 0] = np.arange(rows) % 1000
    x[-1] = 1
    graph = fp.trace(lambda x: (x * 2 + 1).sum(axis=1), fp.spec((rows, width)))
    (found,) = fp.compile(graph, target=target).bind().step({"x": x}).outputs.values()
    expected = 2.0 * (np.arange(rows) % 1000) + width
    expected[-1] = 3 * width
    np.testing.assert_array_equal(found, expected)


@pytest.mark.thorough
@pytest.mark.parametrize("target", TARGETS)
def test_more_than_2_31_bytes_of_a_table_are_trained(target: str) -> None:
    """3 GiB of float32, of which a step reads and changes some rows, the first and the last among them."""
    needs(8 * GIB)
    rows, width, rate = 3 * GIB // 4 // 64, 64, 0.5
    ids = np.array([0, 2**31 // 256 - 1, 2**31 // 256, rows // 2, rows - 1])
    graph = fp.trace(lambda i: fp.nn.embedding(i, rows, width, name="e"), fp.spec((len(ids),), "int64"))
    step = fp.compile(graph, fp.losses.mse, fp.optim.SGD(rate), target=target)
    session = step.bind(seed=1)
    names = [slot.name for slot in step.program.required_inputs]
    others = np.setdiff1d(np.arange(0, rows, rows // 50), ids)
    whole = session.parameters["e.weight"]
    before, rest = whole[ids], whole[others]
    del whole
    target_of_step = np.ones((len(ids), width), np.float32)
    loss = session.step(dict(zip(names, (ids, target_of_step)))).loss
    after = session.parameters["e.weight"]
    assert loss == pytest.approx(float(np.mean((before - 1.0) ** 2)), rel=1e-5)
    np.testing.assert_allclose(after[ids], before - rate * 2 * (before - 1) / before.size, rtol=1e-5, atol=1e-7)
    np.testing.assert_array_equal(after[others], rest)
