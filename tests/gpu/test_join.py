"""Tensors put into larger ones."""

from __future__ import annotations

import numpy as np

from foreplan.ops.join import Concat
from foreplan.runtime.cuda.launch import Copy
from tests.gpu.binder import Bound
from tests.gpu.check import laid_out, made, type_of
from tests.gpu.compiled import needs_gcc
from tests.kernels import normal

pytestmark = needs_gcc


def test_parts_that_lie_in_their_places_are_left_there() -> None:
    given = [normal(3, 5, 2), normal(4, 5, 2), normal(2, 5, 2)]
    kernel, wanted, (layout,) = made(Concat(0), [type_of(x) for x in given])
    assert kernel.parts == ((0, 0, 0), (0, 1, 120), (0, 2, 280))
    assert all(isinstance(each, Copy) for each in kernel.instructions)
    _, y = laid_out(layout)
    y[3:7] = given[1]
    places = [laid_out(window, x)[1] for window, x in zip(wanted, given)]
    Bound(kernel, [places[0], y[3:7], places[2]], [y], np.zeros(0, np.uint8))()
    np.testing.assert_array_equal(y, np.concatenate(given))
    kernel, _, _ = made(Concat(1), [type_of(x) for x in (normal(3, 5), normal(3, 2))])
    assert kernel.parts == ()
