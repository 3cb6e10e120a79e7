"""Views: what they show, how their windows lie, and their gradients; graphs with them as text."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foreplan.base.errors import ModelError, ShapeError
from foreplan.graph import Array, Fill, Graph, GraphBuilder, Kind, TensorType, as_dtype, parse_graph
from foreplan.ops.map import elementwise
from foreplan.ops.shape import (
    Broadcast,
    Reshape,
    Slice,
    Transpose,
    broadcast_to,
    reshape,
    slice_axis,
    transpose,
)
from tests.ops.check import check_vjp, evaluate, run_op, type_of


def _image() -> np.ndarray:
    return np.random.default_rng(0).standard_normal((2, 3, 4))


def _window(op: Reshape | Transpose | Slice | Broadcast, x: np.ndarray) -> np.ndarray | None:
    """What the view of a strided array shows."""
    view = op.view(type_of(x), x.strides)
    if view is None:
        return None
    (shape,) = (type.shape for type in op.infer([type_of(x)]))
    base = x.base if x.base is not None else x
    while base.base is not None:
        base = base.base
    start = x.__array_interface__["data"][0] - base.__array_interface__["data"][0]
    return np.ndarray(shape, x.dtype, base, start + view.offset, view.strides)


@pytest.mark.parametrize("shape", [(24,), (6, 4), (2, 12), (1, 2, 3, 1, 4), (4, 3, 2)])
def test_reshape(shape: tuple[int, ...]) -> None:
    x = _image()
    np.testing.assert_array_equal(run_op(Reshape(shape), x)[0], x.reshape(shape))
    np.testing.assert_array_equal(_window(Reshape(shape), x), x.reshape(shape))
    check_vjp(lambda b, v: reshape(b, v, shape), x)


def test_reshape_of_strided_inputs() -> None:
    x = np.arange(48.0).reshape(4, 12)[:, :6]
    split = _window(Reshape((4, 2, 3)), x)
    np.testing.assert_array_equal(split, x.reshape(4, 2, 3))
    assert _window(Reshape((24,)), x) is None
    across = np.arange(24.0).reshape(2, 3, 4).transpose(2, 0, 1)
    merged = _window(Reshape((4, 6)), across)
    np.testing.assert_array_equal(merged, across.reshape(4, 6))
    assert _window(Reshape((8, 3)), across) is None or across.reshape(8, 3).base is not None


@given(
    st.integers(1, 7).flatmap(
        lambda n: st.tuples(st.just(n), st.integers(0, n - 1), st.sampled_from([-3, -2, -1, 1, 2, 3]))
    ),
    st.integers(0, 7),
)
@settings(max_examples=80, deadline=None)
def test_slice(where: tuple[int, int, int], wish: int) -> None:
    n, start, step = where
    room = (n - 1 - start) // step + 1 if step > 0 else start // -step + 1
    count = min(wish, room)
    x = np.arange(3.0 * n).reshape(3, n)
    op = Slice((1, start), (2, count), (1, step))
    expected = x[1:3][:, [start + i * step for i in range(count)]]
    np.testing.assert_array_equal(run_op(op, x)[0], expected)
    if count:
        np.testing.assert_array_equal(_window(op, x), expected)
    else:  # a window onto nothing begins where its value does: any other place might lie behind it
        view = op.view(type_of(x), x.strides)
        assert view is not None and view.offset == 0


@pytest.mark.parametrize(("shape", "wide"), [((3, 1), (2, 3, 4)), ((4,), (3, 4)), ((), (2, 2)), ((1, 3), (5, 3))])
def test_broadcast(shape: tuple[int, ...], wide: tuple[int, ...]) -> None:
    x = np.random.default_rng(0).standard_normal(shape)
    np.testing.assert_array_equal(run_op(Broadcast(wide), x)[0], np.broadcast_to(x, wide))
    np.testing.assert_array_equal(_window(Broadcast(wide), x), np.broadcast_to(x, wide))
    check_vjp(lambda b, v: broadcast_to(b, v, wide), x)


def test_what_changes_nothing_builds_nothing() -> None:
    b = GraphBuilder()
    x = b.input("x", TensorType(as_dtype("float32"), (2, 3)))
    assert reshape(b, x, (2, -1)) is x
    assert transpose(b, x, (0, 1)) is x
    assert broadcast_to(b, x, (2, 3)) is x
    assert slice_axis(b, x, 1, 0, 3) is x
    assert not b.nodes


def test_what_does_not_fit_is_refused() -> None:
    x = TensorType(as_dtype("float32"), (2, 3))
    for op, match in (
        (Reshape((5,)), "6 elements"),
        (Reshape((-2, -3)), "less than no elements"),
        (Transpose((0, 0)), "permutation"),
        (Slice((0, 2), (2, 2), (1, 1)), "leave an axis"),
        (Slice((0, 0), (2, 2), (1, 0)), "need one entry for each axis"),
        (Slice((0,), (2,), (1,)), "need one entry for each axis"),
        (Broadcast((2, 4)), "broadcast"),
        (Broadcast((3,)), "broadcast"),
        (Broadcast((-4, 2, 3)), "less than no elements"),
    ):
        with pytest.raises(ShapeError, match=match):
            op.infer([x])


def _graph() -> Graph:
    b = GraphBuilder("a graph")
    x = b.input("x", TensorType(as_dtype("float32"), (2, 3)), default=Fill(1.5))
    w = b.store("layer 1/w%", TensorType(as_dtype("float32"), (3,)), Kind.PARAMETER, Fill(-0.5))
    c = b.store("c", TensorType(as_dtype("int64"), (2, 2)), Kind.CONSTANT, Array(np.arange(4).reshape(2, 2)))
    mean = b.store("mean", TensorType(as_dtype("float32"), (3,)), Kind.BUFFER, Fill(0.0))
    y = elementwise(b, lambda x, w: x * w + 1.0, transpose(b, x, (0, 1)), w, name="a node")
    z = transpose(b, slice_axis(b, y, 1, 2, 2, -1), (1, 0))
    n = elementwise(b, lambda c: c * 2, c)
    b.note("a 'note' with \"quotes\"")
    moved = elementwise(b, lambda m: m * 0.9, mean)
    return b.finish({"z": z, "counts": n}, updates={mean: moved})


def test_graph_text_reads_back() -> None:
    graph = _graph()
    text = graph.as_text()
    again = parse_graph(text)
    assert again.as_text() == text
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    for found, graph_ in ((evaluate(graph, {"x": x}), graph), (evaluate(again, {"x": x}), again)):
        np.testing.assert_array_equal(found[graph_.outputs["z"]], (x * -0.5 + 1)[:, [2, 1]].T)
        np.testing.assert_array_equal(found[graph_.outputs["counts"]], [[0, 2], [4, 6]])
    np.testing.assert_array_equal(evaluate(again, {})[again.outputs["z"]], np.full((2, 2), 0.25))


@pytest.mark.parametrize(
    ("line", "match"),
    [
        ("input %x float32[2]", "cannot read"),
        ("output %z = %nothing", "not defined"),
        ("%y: float32[2] = reshape(shape=(3,)) [%x] as %n", "does not fit"),
        ("%y: float32[3] = reshape(shape=(2,)) [%x] as %n", "its outputs are"),
        ("%y: float32[2] = nothing() [%x] as %n", "no op"),
        ("%y: float32[2] = reshape(size=2) [%x] as %n", "no attribute"),
        ("parameter %w: float32[2] = exec(1)", "does not describe"),
    ],
)
def test_broken_text_is_refused_with_its_line(line: str, match: str) -> None:
    with pytest.raises(ModelError, match=match):
        parse_graph(f"graph %g\ninput %x: float32[2]\n{line}\n")
