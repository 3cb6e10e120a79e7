"""The CPU's kernels of bfloat16 against the op's own NumPy kernel on the same numbers in float32."""

from __future__ import annotations

from collections.abc import Sequence

import ml_dtypes
import numpy as np

from foreplan.graph import Op, Window, as_dtype
from tests.cpu.check import expected, run, ways

BF16 = np.dtype(ml_dtypes.bfloat16)
ULP = 2.0**-7  # of bfloat16: numbers lie at most so far apart, beside their size; rounding errs by half as much

TINY = 1e-6


def narrow(array: np.ndarray) -> np.ndarray:
    """The nearest numbers of bfloat16."""
    return array.astype(BF16)


def widened(array: np.ndarray) -> np.ndarray:
    """The same numbers in float32; others as they are."""
    return array.astype(np.float32) if array.dtype == BF16 else array


def check_narrow(
    op: Op,
    *inputs: np.ndarray,
    ulps: float = 0.5,
    exact: float = 1e-5,
    windows: Sequence[Window] | None = None,
    over: tuple[int, int] | None = None,
) -> None:
    """Assert that every kernel's results are those of float32, rounded.

    Args:
        ulps: how far a result of bfloat16 may be, in units in its last place.
        exact: how far any result may be beside the largest, as where float32 sums are taken in another order.
    """
    wanted = expected(op, [widened(x) for x in inputs])
    for way in ways(op, inputs, windows):
        for ours, theirs in zip(run(op, inputs, windows, over, way=way), wanted, strict=True):
            if not as_dtype(theirs.dtype).is_float:
                np.testing.assert_array_equal(ours, theirs, err_msg=way)
                continue
            relative = ulps * ULP if ours.dtype == BF16 else 0.0
            found, exactly = (y.astype(np.float64) for y in (ours, theirs))
            slack = TINY + exact * np.abs(exactly[np.isfinite(exactly)]).max(initial=0.0)
            np.testing.assert_allclose(found, exactly, rtol=relative, atol=slack, err_msg=way)
