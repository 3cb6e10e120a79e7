"""Reductions of a card: sums in parts, outputs that begin between vectors, what is refused."""

from __future__ import annotations

import numpy as np
import pytest

from foreplan.graph import TensorType, Window
from foreplan.graph.types import DTYPES
from foreplan.ops.reduce import Reduce
from foreplan.runtime.cuda.kernels.reduce import reduce
from foreplan.runtime.kernel import Refused
from tests.gpu.check import DEVICE, check, made, run, type_of
from tests.gpu.compiled import needs_gcc
from tests.kernels import normal

pytestmark = [needs_gcc, pytest.mark.usefixtures("compiled_ahead")]


def test_long_sums_are_taken_in_parts() -> None:
    for x, axes in ((normal(300_000), (0,)), (normal(20_000, 5), (0,)), (normal(3, 60_000), (1,))):
        kernel, _, _ = made(Reduce("mean", axes), [type_of(x)])
        assert len(kernel.instructions) == 2 and kernel.workspace > 0
        check(Reduce("sum", axes), x, rtol=1e-5, atol=1e-3)
        (mean,) = run(Reduce("mean", axes), [x])
        np.testing.assert_allclose(mean, x.astype(np.float64).mean(axes), atol=1e-7)


def test_outputs_that_begin_between_vectors() -> None:
    x, op = normal(500, 64), Reduce("sum", (0,))
    assert run(op, [x], behind=(1,))[0].tobytes() == run(op, [x])[0].tobytes()


def test_means_of_integers_are_refused() -> None:
    whole, mean = (Window.dense(TensorType(DTYPES["int32"], shape)) for shape in ((3, 4), (3,)))
    with pytest.raises(Refused, match="mean"):
        reduce(Reduce("mean", (1,)), [whole], [mean], DEVICE)
