"""Inputs that decide shapes: refused with what to do, and bound by value."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto

import foreplan as fp
from foreplan.base.errors import ShapeError, UsageError, ValueNeededError
from foreplan.frontend import from_onnx
from tests.cli.shell import answer, foreplan
from tests.frontend.onnx.models import branch, info, model, node, random, run

INT64, FLOAT, BOOL = TensorProto.INT64, TensorProto.FLOAT, TensorProto.BOOL


def with_inputs(*nodes: onnx.NodeProto, outputs: str = "y", **inputs: tuple[int, object]) -> onnx.ModelProto:
    """A model of x, float32[2, 3], and of further inputs: type and shape by name."""
    proto = model(list(nodes), {"x": (2, 3)}, outputs.split())
    proto.graph.input.extend(info(name, shape, dtype) for name, (dtype, shape) in inputs.items())  # type: ignore[arg-type]
    return proto


def reshaped() -> onnx.ModelProto:
    """y = x in a shape that is `wanted` times one."""
    return with_inputs(node("Mul", "wanted one", "shape"), node("Reshape", "x shape", "y", "it"), wanted=(INT64, (2,)),
                       one=(INT64, ()))  # fmt: skip


def test_the_error_names_node_op_opset_inputs_and_remedy() -> None:
    with pytest.raises(ValueNeededError) as caught:
        from_onnx(reshaped())
    assert caught.value.inputs == ("wanted", "one")
    text = str(caught.value)
    for part in ("'it' (Reshape)", "opset 18", "'shape'", "'wanted', 'one'", "values={'wanted'", "--values wanted="):
        assert part in text


def test_an_input_bound_by_value_is_none() -> None:
    graph = from_onnx(reshaped(), values={"wanted": [3, 2], "one": 1})
    assert [value.name for value in graph.inputs] == ["x"]
    x = random(2, 3)
    np.testing.assert_array_equal(run(graph, x=x)["y"], x.reshape(3, 2))


def test_values_decide_branches_loops_and_floats() -> None:
    then, other = (branch(op, node(op, "x", "t"), outputs="t") for op in ("Neg", "Abs"))
    proto = with_inputs(node("If", "flag", "y", then_branch=then, else_branch=other), flag=(BOOL, ()))
    x = random(2, 3)
    for flag, expected in ((True, -x), (False, np.abs(x))):
        np.testing.assert_array_equal(run(from_onnx(proto, values={"flag": flag}), x=x)["y"], expected)
    sized = with_inputs(node("Resize", "x - scales", "y", mode="nearest"), scales=(FLOAT, (2,)))
    assert run(from_onnx(sized, values={"scales": [1.0, 2.0]}), x=x)["y"].shape == (2, 6)


def test_values_bind_symbols_and_leave_the_batch_alone() -> None:
    proto = model([node("Tile", "x times", "y")], {"x": ("n", 3)}, ["y"])
    proto.graph.input.append(info("times", ("k",), INT64))
    graph = from_onnx(proto, batch=4, values={"times": [1, 2]})
    assert graph.outputs["y"].shape == (4, 6)


def test_data_that_are_no_shape_get_no_such_remedy() -> None:
    proto = model([node("NonZero", "x", "at"), node("Shape", "at", "y")], {"x": (40, 40)}, ["y"])
    with pytest.raises(fp.UnsupportedError) as caught:
        from_onnx(proto)
    assert "values=" not in str(caught.value)


@pytest.mark.parametrize(
    ("values", "error", "message"),
    [
        ({"nobody": 1}, UsageError, "no input 'nobody'.*x, wanted, one"),
        ({"wanted": [1.5, 2]}, UsageError, "'wanted' holds int64"),
        ({"wanted": "six"}, UsageError, "'wanted' holds int64"),
        ({"wanted": [1, 2, 3]}, ShapeError, "axis 0 of input 'wanted'"),
        ([1, 2], UsageError, "values must be a mapping"),
    ],
)
def test_wrong_values_are_named(values: object, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        from_onnx(reshaped(), values=values)  # type: ignore[arg-type]


def test_the_command_line_binds_values(tmp_path: Path) -> None:
    file, axis = tmp_path / "m.onnx", tmp_path / "one.npy"
    onnx.save(reshaped(), file)
    np.save(axis, np.array(1))
    figures = answer("estimate", file, "--infer", "--values", "wanted=[6, 1]", "--values", f"one={axis}")
    assert figures["model"] == "small"
    assert "--values wanted=" in foreplan("estimate", file, "--infer", code=2).stderr
    for wrong, told in (("wanted", "name=[numbers]"), ("wanted=six", "no list of numbers"), ("one=gone.npy", "gone")):
        assert told in foreplan("estimate", file, "--infer", "--values", wrong, code=2).stderr
    assert "zoo" in foreplan("estimate", "mlp", "--values", "a=1", code=2).stderr
    np.savez(tmp_path / "x.npz", x=random(2, 3))
    shown = answer("run", file, "--data", tmp_path / "x.npz", "--values", "wanted=[6,1]", "--values", "one=1")
    assert shown["y"]["shape"] == [6, 1]
