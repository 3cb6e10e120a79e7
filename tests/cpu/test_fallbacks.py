"""What a program for the target cpu runs by NumPy's kernels: listed, noted, and told by the command line."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest

from foreplan.graph import Graph, Op, TensorType, parse_graph
from foreplan.graph.types import DTYPES
from foreplan.lower import lower
from foreplan.lower.fallbacks import Fallback, fallbacks
from foreplan.ops.index import ScatterAdd
from foreplan.ops.pool import AvgPool, MaxPool
from foreplan.ops.random import Random
from foreplan.ops.softmax import Softmax
from foreplan.runtime.cpu.table import family_of
from tests.cli.shell import answer, foreplan
from tests.cpu.check import needs_onednn, notes_of

pytestmark = needs_onednn()


def products(dtype: str) -> Graph:
    """Two products; oneDNN has none of float64."""
    return parse_graph(
        f"""graph %g
input %x: {dtype}[3,3]
%a: {dtype}[3,3] = matmul() [%x, %x] as %a
%b: {dtype}[3,3] = matmul() [%a, %x] as %b
output %y = %b
"""
    )


def test_ops_without_a_kernel_are_listed_and_noted() -> None:
    program = lower(products("float64"), "cpu:threads=1")
    assert fallbacks(program) == (Fallback("matmul", 2, ("a", "b")),)
    (note,) = notes_of(program)
    assert "2 matmul" in note and "cpu:threads=1" in note


def test_the_most_frequent_op_comes_first() -> None:
    graph = parse_graph(
        """graph %g
input %x: float64[3,3]
%s: float64[3,3] = softmax(axis=1) [%x] as %s
%c: float64[3,3] = cumsum(axis=1, exclusive=False, reverse=False) [%s] as %c
%a: float64[3,3] = matmul() [%c, %x] as %a
%b: float64[3,3] = matmul() [%a, %x] as %b
output %y = %b
"""
    )
    found = fallbacks(lower(graph, "cpu:threads=1"))
    assert [(each.op, each.count) for each in found] == [("matmul", 2), ("cumsum", 1), ("softmax", 1)]


@pytest.mark.parametrize(("dtype", "target"), [("float32", "cpu:threads=1"), ("float64", "numpy")])
def test_nothing_is_noted_where_nothing_falls_back(dtype: str, target: str) -> None:
    program = lower(products(dtype), target)
    assert not fallbacks(program) and not notes_of(program)


def test_the_command_line_lists_them(tmp_path: Path) -> None:
    x, y = (onnx.helper.make_tensor_value_info(name, onnx.TensorProto.DOUBLE, [3, 3]) for name in "xy")
    nodes = [onnx.helper.make_node("MatMul", ["x", "x"], ["y"], name="product")]
    model = onnx.helper.make_model(onnx.helper.make_graph(nodes, "g", [x], [y]))
    path = str(tmp_path / "double.onnx")
    onnx.save(model, path)
    arguments = ("explain", path, "--infer", "--target", "cpu:threads=1")
    told = answer(*arguments)["fallbacks"]
    assert [(each["op"], each["count"], len(each["nodes"])) for each in told] == [("matmul", 1, 1)]
    table = foreplan(*arguments).stdout
    assert any(line.split()[:2] == ["matmul", "1"] for line in table.splitlines())


@pytest.mark.parametrize(
    ("op", "types"),
    [
        (MaxPool((17, 17), (1, 1), ((0, 0), (0, 0)), (1, 1), True), [("float32", (1, 4, 17, 17))]),
        (ScatterAdd(0, (3, 2)), [("int64", (4,)), ("int64", (4, 2))]),
        (Softmax(0), [("float32", (2, 3, 4))]),
        (AvgPool((2, 2), (1, 1), ((0, 0), (0, 0)), (1, 1)), [("float64", (1, 1, 5, 5))]),
        (Random("normal", (8,)), [("uint64", (2,))]),
        (Random("uniform", (8,), DTYPES["float64"]), [("uint64", (2,))]),
    ],
    ids=["an index of two bytes", "sums of integers", "rows", "means of float64", "normal numbers", "wide numbers"],
)
def test_what_no_kernel_here_does(op: Op, types: list[tuple[str, tuple[int, ...]]]) -> None:
    given = [TensorType(DTYPES[dtype], shape) for dtype, shape in types]
    assert family_of(op, given, op.infer(given), 1) is None
