"""A convolution with a map of its result: as both one after the other; which expressions are chains of steps."""

from __future__ import annotations

import numpy as np
import pytest

from foreplan.base.errors import ShapeError
from foreplan.ops.conv.mapped import ConvMap, Step, steps_of
from foreplan.ops.conv.ops import Conv
from foreplan.ops.expr import parse_expr
from tests.ops.check import run_op, type_of

RNG = np.random.default_rng(0)
GEOMETRY = ((1, 1), ((1, 1), (1, 1)), (1, 1))


@pytest.mark.parametrize("biased", [False, True])
def test_as_both_one_after_the_other(biased: bool) -> None:
    x, w, bias = RNG.normal(size=(2, 3, 6, 5)), RNG.normal(size=(4, 3, 3, 3)), RNG.normal(size=4)
    factor, other = RNG.normal(size=(4, 1, 1)), RNG.normal(size=(2, 4, 6, 5))
    own = [x, w, bias] if biased else [x, w]
    (plain,) = run_op(Conv(*GEOMETRY), *own)
    (found,) = run_op(ConvMap(*GEOMETRY, 1, "relu(((a0 * a1) + a2))", biased), *own, factor, other)
    np.testing.assert_allclose(found, np.maximum(plain * factor + other, 0), rtol=1e-12, atol=1e-12)


def test_inputs_that_do_not_fit_are_refused() -> None:
    x, w, vector = RNG.normal(size=(2, 3, 6, 5)), RNG.normal(size=(4, 3, 3, 3)), RNG.normal(size=(4, 1, 1))
    op = ConvMap(*GEOMETRY, 1, "(a0 + a1)")
    for inputs in ([x], [x, w], [x, w, vector, vector], [x, w, RNG.normal(size=(3, 1, 1))], [x, w, vector[None, None]]):
        with pytest.raises(ShapeError):
            op.infer([type_of(array) for array in inputs])


@pytest.mark.parametrize(
    ("text", "steps"),
    [
        ("a0", []),
        ("relu(a0)", [("relu", 0)]),
        ("relu(((((a0 - a1) * a2) + a3) + a4))", [("sub", 1), ("mul", 2), ("add", 3), ("add", 4), ("relu", 0)]),
        ("(a1 + (a2 * a0))", [("mul", 2), ("add", 1)]),
        ("(a1 - a0)", None),
        ("(a0 * a0)", None),
        ("(relu(a0) + a1)", None),
        ("((a0 * a1) + a1)", None),
        ("(a0 + 1.0)", None),
        ("(a0 / a1)", None),
        ("(a1 + a2)", None),
        ("exp(a0)", None),
    ],
)
def test_chains_of_steps(text: str, steps: list[tuple[str, int]] | None) -> None:
    found = steps_of(parse_expr(text))
    assert found == (None if steps is None else tuple(Step(*step) for step in steps))
