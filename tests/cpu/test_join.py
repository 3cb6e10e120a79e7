"""Tensors put into larger ones, however they lie, against the NumPy kernels."""

from __future__ import annotations

import numpy as np
import pytest

from foreplan.graph import Window
from foreplan.graph.layouts import channels_last
from foreplan.ops.join import Concat
from foreplan.runtime.cpu.kernels.join import concat
from foreplan.runtime.cpu.table import family_of
from tests.cpu.check import laid_out, needs_onednn, scratch, type_of
from tests.engines.test_join import tensor
from tests.kernels import as_images, dense

pytestmark = needs_onednn()


def test_most_bytes_say_how_a_joined_tensor_lies() -> None:
    small, large = tensor((2, 3, 4, 4), 1), tensor((2, 9, 4, 4), 2)
    op, types = Concat(1), [type_of(small), type_of(large)]
    family = family_of(op, types, op.infer(types), 1)
    assert family is not None
    for windows in (as_images(small, large), [*dense(small), *as_images(large)]):
        assert family.layout(op, windows, op.infer(types))[0].strides[1] == 4
    assert family.layout(op, [*as_images(small), *dense(large)], op.infer(types)) == list(
        map(Window.dense, op.infer(types))
    )


@pytest.mark.parametrize(
    ("shapes", "axis", "last", "wanted"),
    [
        ([(2, 3), (1, 3)], 0, False, ((0, 0, 0), (0, 1, 24))),
        ([(1, 2, 3), (1, 5, 3)], 1, False, ((0, 0, 0), (0, 1, 24))),
        ([(2, 3), (2, 1)], 1, False, ()),
        ([(1, 3, 2, 2), (2, 3, 2, 2)], 0, True, ((0, 0, 0), (0, 1, 48))),
        ([(1, 3, 2, 2), (1, 3, 2, 2)], 1, True, ()),
        ([(1, 3, 2, 2), (1, 3, 1, 2)], 2, True, ((0, 0, 0), (0, 1, 48))),
    ],
)
def test_parts_that_may_lie_in_their_places(
    shapes: list[tuple[int, ...]], axis: int, last: bool, wanted: tuple[tuple[int, int, int], ...]
) -> None:
    """Those are left as they are; the others are copied."""
    given, op = [tensor(shape, i) for i, shape in enumerate(shapes)], Concat(axis)
    types = [type_of(x) for x in given]
    results = op.infer(types)
    windows = as_images(*given) if last else dense(*given)
    whole = channels_last(results[0]) if last else Window.dense(results[0])
    kernel = concat(op, windows, [whole])
    assert kernel.parts == wanted
    y = laid_out(np.zeros(results[0].shape, np.float32), whole)
    arrays = [laid_out(x, window) for x, window in zip(given, windows)]
    memory = np.lib.stride_tricks.as_strided(y, (y.size,), (4,)).view(np.uint8)
    for _, i, byte in wanted:
        arrays[i] = np.ndarray(types[i].shape, np.float32, memory, byte, windows[i].strides)
        arrays[i][...] = given[i]
        arrays[i].flags.writeable = False
    kernel.bind(arrays, [y], scratch(0))()
    np.testing.assert_array_equal(y, np.concatenate(given, axis))
