"""Reductions along any axes of tensors however they lie."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest

from foreplan.graph import Window
from foreplan.ops.reduce import Reduce
from foreplan.runtime.cpu.threads import set_threads
from tests.cpu.check import kernel_for, needs_onednn, run, type_of

pytestmark = needs_onednn()
RNG = np.random.default_rng(0)


def f32(*shape: int) -> np.ndarray:
    """The same numbers whichever tests ran before."""
    return np.random.default_rng(shape).standard_normal(shape).astype(np.float32)


def exact_sum(numbers: np.ndarray) -> float:
    return float(sum((Fraction(float(x)) for x in numbers.reshape(-1)), Fraction(0)))


@pytest.mark.parametrize("axes", [(0,), (2,), (0, 2)])
def test_sums_of_halves_are_rounded_once(axes: tuple[int, ...]) -> None:
    x = (RNG.standard_normal((6, 5, 40)) * 3).astype(np.float16)
    (found,) = run(Reduce("sum", axes), [x])
    np.testing.assert_array_equal(found, x.astype(np.float64).sum(axes).astype(np.float16))


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("axis", [0, 1])
def test_sums_are_exact_to_half_a_unit_or_so(axis: int, dtype: str) -> None:
    x = (RNG.standard_normal((3000, 3000)) * 10.0 ** RNG.integers(-6, 6, (3000, 3000))).astype(dtype)
    x = np.moveaxis(x[:, :5], 0, axis).copy()
    (found,) = run(Reduce("sum", (axis,)), [x])
    for line, total in zip(np.moveaxis(x, axis, 1), found):
        assert abs(float(total) - exact_sum(line)) <= 0.51 * np.spacing(abs(total))


def test_sums_that_cancel_and_sums_of_a_million() -> None:
    x = np.tile(np.array([1e16, 1.0, -1e16], np.float64), 1000)
    assert run(Reduce("sum", (0,)), [x])[0] == 1000.0
    ones = np.full(1 << 20, 0.1, np.float32)
    assert run(Reduce("sum", (0,)), [ones])[0] == np.float32((1 << 20) * float(np.float32(0.1)))
    assert run(Reduce("mean", (0,)), [ones])[0] == np.float32(0.1)


def test_results_do_not_depend_on_the_number_of_threads() -> None:
    x = f32(300, 4000)
    windows = [Window.dense(type_of(x))]
    try:
        for axes in ((0,), (1,)):
            results = []
            for threads in (1, 3):
                op = Reduce("sum", axes)
                layout = [Window.dense(y) for y in op.infer([type_of(x)])]
                kernel = kernel_for(op, windows, layout, threads)
                assert kernel is not None
                out = np.zeros(layout[0].shape, np.float32)
                kernel.bind([x], [out], np.zeros(0, np.uint8))()
                results.append(out.tobytes())
            assert results[0] == results[1]
    finally:
        set_threads(1)
