"""A product with a map of it: as both one after the other, and what does not fit."""

from __future__ import annotations

import numpy as np
import pytest

from foreplan.base.errors import ShapeError
from foreplan.ops.matmul_map import MatMulMap
from tests.ops.check import run_op, type_of

RNG = np.random.default_rng(0)


@pytest.mark.parametrize("turned", [(False, False), (True, False), (False, True), (True, True)])
def test_as_both_one_after_the_other(turned: tuple[bool, bool]) -> None:
    a, b, c, row = RNG.normal(size=(5, 7)), RNG.normal(size=(7, 6)), RNG.normal(size=(5, 6)), RNG.normal(size=6)
    given = [np.ascontiguousarray(x.T) if flag else x for x, flag in zip((a, b), turned)]
    op = MatMulMap(("relu((a0 + a2))", "((a1 * a0) - a1)"), *turned)
    found = run_op(op, *given, c, row)
    np.testing.assert_allclose(found[0], np.maximum(a @ b + row, 0), rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(found[1], c * (a @ b) - c, rtol=1e-12, atol=1e-12)


def test_what_a_map_may_overwrite() -> None:
    """A further input of the product's type, if no later output reads it; never a factor."""
    types = [type_of(RNG.normal(size=shape)) for shape in ((4, 4), (4, 4), (4, 4), (4, 4), ())]
    op = MatMulMap(("((a1 - a0) * a3)", "((a2 * a1) + a0)"))
    outputs = op.infer(types)
    assert {i for _, i in op.overwrites(types, outputs)} == {2, 3}


@pytest.mark.parametrize(
    ("exprs", "shapes"),
    [
        (("a0",), [(2, 3)]),
        (("(a0 + a1)",), [(2, 3), (3, 4)]),
        (("a0",), [(2, 3), (3, 4), (2, 4)]),
        (("(a0 + a1)",), [(2, 3), (3, 4), (7, 2, 4)]),
        (("a0",), [(2, 3), (4, 4)]),
    ],
)
def test_inputs_that_do_not_fit_are_refused(exprs: tuple[str, ...], shapes: list[tuple[int, ...]]) -> None:
    with pytest.raises(ShapeError):
        MatMulMap(exprs).infer([type_of(RNG.normal(size=shape)) for shape in shapes])
