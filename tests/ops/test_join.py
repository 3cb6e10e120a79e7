"""Concat, pad and unslice against NumPy, gradients against differences."""

from __future__ import annotations

import numpy as np
import pytest

from foreplan.base.errors import ShapeError
from foreplan.graph import Builder, GraphBuilder, Value
from foreplan.ops.join import Pad, concat, pad, split, sum_of_unslices
from foreplan.ops.map import elementwise
from foreplan.ops.shape import slice_axis, unslice
from tests.ops.check import built, check_vjp, evaluate, run_op, type_of

RNG = np.random.default_rng(0)
MODES = ("constant", "edge", "reflect", "wrap")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("pads", [((2, 1), (0, 0)), ((0, 2), (3, 0)), ((1, 2), (2, 3)), ((2, 2), (1, 0))])
def test_pad(pads: tuple[tuple[int, int], ...], mode: str) -> None:
    x = RNG.standard_normal((3, 5))
    value = {"constant_values": -2.5} if mode == "constant" else {}
    (y,) = run_op(Pad(pads, -2.5 if mode == "constant" else 0.0, mode), x)
    np.testing.assert_array_equal(y, np.pad(x, pads, mode, **value))
    check_vjp(lambda b, x: pad(b, x, pads, mode=mode), x)


def test_pad_takes_away_where_negative() -> None:
    x = RNG.integers(0, 9, (4, 6))
    b = GraphBuilder()
    given = b.input("x", type_of(x))
    y = pad(b, given, [(-1, 2), (0, -3)], 7)
    found = evaluate(b.finish({"y": y}), {"x": x})[y]
    np.testing.assert_array_equal(found, np.pad(x[1:, :3], ((0, 2), (0, 0)), constant_values=7))
    assert pad(b, given, [(0, 0), (0, 0)]) is given


def test_slices_pull_back_through_unslice() -> None:
    def build(b: Builder, x: Value) -> Value:
        return elementwise(b, lambda a, c: a * c, slice_axis(b, x, 1, 1, 3), slice_axis(b, x, 1, 4, 3, -1))

    check_vjp(build, RNG.standard_normal((2, 6)))


def test_split_is_the_inverse_of_concat() -> None:
    def build(b: Builder, x: Value) -> Value:
        parts = split(b, x, [1, 3, 2], -1)
        assert [part.shape for part in parts] == [(2, 1), (2, 3), (2, 2)]
        return concat(b, parts, 1)

    x = RNG.standard_normal((2, 6))
    np.testing.assert_array_equal(built(build, x)[0], x)
    check_vjp(build, x)


@pytest.mark.parametrize("axis", [0, 1])
def test_sum_of_unslices(axis: int) -> None:
    sizes = [2, 1, 4]
    pieces = [RNG.standard_normal((n, 3) if axis == 0 else (3, n)) for n in sizes]
    for chosen in ([0, 1, 2], [2, 0, 1], [1, 2], [0]):
        b = GraphBuilder()
        xs = [b.input(f"x{i}", type_of(x)) for i, x in enumerate(pieces)]
        values = [unslice(b, xs[i], *place(axis, sum(sizes[:i]))) for i in chosen]
        y = sum_of_unslices(b, list(b.nodes))
        assert y is not None
        found = evaluate(b.finish({"y": y}), {f"x{i}": x for i, x in enumerate(pieces)})
        np.testing.assert_array_equal(found[y], sum(found[value] for value in values))
        assert sum(node.op.name == "unslice" for node in b.nodes) == len(chosen) + (len(chosen) < 3)


def place(axis: int, start: int) -> tuple[tuple[int, int], tuple[int, int], tuple[int, int]]:
    """Whole shape, starts and steps of a piece that begins at `start`."""
    return ((7, 3), (start, 0), (1, 1)) if axis == 0 else ((3, 7), (0, start), (1, 1))


def test_sum_of_unslices_that_do_not_join() -> None:
    b = GraphBuilder()
    x = b.input("x", type_of(np.zeros((3, 2))))
    for other in (
        ((3, 7), (0, 1), (1, 1)),
        ((3, 7), (0, 3), (1, 1)),
        ((3, 7), (0, 2), (1, 2)),
        ((4, 7), (0, 2), (1, 1)),
    ):
        start = len(b.nodes)
        unslice(b, x, (3, 7), (0, 0), (1, 1))
        unslice(b, x, *other)
        assert sum_of_unslices(b, b.nodes[start:]) is None
    elementwise(b, lambda a: a * 2, x)
    assert sum_of_unslices(b, b.nodes[-1:]) is None


def test_refusals() -> None:
    b = GraphBuilder()
    x, y = b.input("x", type_of(np.zeros((2, 3)))), b.input("y", type_of(np.zeros((2, 4))))
    with pytest.raises(ShapeError, match="differ in more than axis 0"):
        concat(b, [x, y], 0)
    with pytest.raises(ShapeError, match="cannot add 3 elements"):
        pad(b, x, [(0, 0), (3, 0)], mode="reflect")
    with pytest.raises(ShapeError, match="take away more"):
        pad(b, x, [(0, 0), (-2, -2)])
    with pytest.raises(ShapeError, match="leave an axis"):
        unslice(b, x, (2, 5), (0, 3), (1, 1))
    with pytest.raises(ShapeError, match="and add up to axis"):
        split(b, x, [1, 1], 1)
    with pytest.raises(ValueError, match="mode must be one of"):
        Pad(((0, 0),), 0.0, "mirror")
