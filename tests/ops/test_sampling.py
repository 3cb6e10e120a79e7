"""What sampling ops hold for backward: their inputs alone, however many elements they read."""

from __future__ import annotations

from collections.abc import Callable

import pytest

import foreplan as fp
from foreplan.graph import Builder, Fill, Graph, GraphBuilder, Kind, TensorType, Value, as_dtype
from foreplan.ops.deform_conv import deform_conv
from foreplan.ops.grid_sample import grid_sample
from foreplan.ops.map import elementwise
from foreplan.ops.reduce import reduce
from foreplan.ops.roi_align import roi_align

SIDE, CHANNELS = 24, 16
X = (2, CHANNELS, SIDE, SIDE)


def _graph(build: Callable[..., Value], *shapes: tuple[int, ...]) -> tuple[Graph, Value]:
    b = GraphBuilder("sampling")
    given = [
        b.store(f"p{i}", TensorType(as_dtype("float32"), s), Kind.PARAMETER, Fill(0.5)) for i, s in enumerate(shapes)
    ]
    y = build(b, *given)
    loss = reduce(b, "sum", elementwise(b, lambda y: y * y, y))
    return b.finish({"loss": loss}, {}, loss), y


def _with_images(b: Builder, x: Value, regions: Value) -> Value:
    images = b.store("images", TensorType(as_dtype("int64"), (64,)), Kind.CONSTANT, Fill(1))
    return roi_align(b, x, regions, images, (7, 7), 2)


@pytest.mark.parametrize(
    ("build", "shapes", "most"),
    [
        (lambda b, x, g: grid_sample(b, x, g, "linear"), [X, (2, SIDE, SIDE, 2)], 8),
        (lambda b, x, g: grid_sample(b, x, g, "cubic"), [X, (2, SIDE, SIDE, 2)], 8),
        (lambda b, x, w, o: deform_conv(b, x, w, o, pads=1), [X, (16, 16, 3, 3), (2, 18, SIDE, SIDE)], 10),
        (_with_images, [X, (64, 4)], 7),
    ],
    ids=["linear", "cubic", "deformed", "regions"],
)
def test_a_step_holds_few_tensors_of_the_size_of_the_result(
    build: Callable[..., Value], shapes: list[tuple[int, ...]], most: int
) -> None:
    """Sixteen rows of a cubic, nine taps of a convolution and sixteen of a region are not all held at once."""
    graph, y = _graph(build, *shapes)
    program = fp.lower(fp.differentiate(graph), "numpy")
    plan = fp.plan(program)
    stored = sum(value.type.nbytes for value in graph.parameters)
    assert plan.arena_bytes - 2 * stored < most * max(y.type.nbytes, graph.parameters[0].type.nbytes)
