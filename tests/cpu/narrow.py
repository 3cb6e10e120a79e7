"""A CPU kernel of bfloat16 against the op's own NumPy kernel on the same numbers in float32."""

from __future__ import annotations

from collections.abc import Sequence

import ml_dtypes
import numpy as np

from foreplan.graph import Op, Window
from tests.cpu.check import expected, run

BF16 = np.dtype(ml_dtypes.bfloat16)
ULP = 2.0**-7  # of bfloat16: numbers lie at most so far apart, beside their size; rounding errs by half as much


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
    """Assert that results are those of float32, rounded.

    Args:
        ulps: how far a result of bfloat16 may be, in units in its last place.
        exact: how far any result may be beside the largest, as where float32 sums are taken in another order.
    """
    for ours, theirs in zip(run(op, inputs, windows, over), expected(op, [widened(x) for x in inputs]), strict=True):
        if theirs.dtype.kind != "f":
            np.testing.assert_array_equal(ours, theirs)
            continue
        finite = theirs[np.isfinite(theirs)].astype(np.float64)
        slack = exact * (np.abs(finite).max() if finite.size else 0.0)
        relative = ulps * ULP if ours.dtype == BF16 else 0.0
        np.testing.assert_allclose(ours.astype(np.float64), theirs.astype(np.float64), rtol=relative, atol=slack)
