"""float32 master weights of parameters that a model has in a narrow type."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest

import foreplan as fp
from foreplan.frontend.onnx import from_onnx
from foreplan.graph import Graph, Kind
from tests.frontend.onnx.models import model, node, random

DTYPES = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16}


def file(folder: Path, dtype: Any, rows: int) -> Path:
    """y = x w + b, all narrow; of many rows, w stays in the file."""
    weight = (0.25 + 0.25 * np.abs(random(rows, 4))).astype(dtype)
    proto = model(
        [node("MatMul", "x fc.weight", "h"), node("Add", "h fc.bias", "y")],
        {"x": (2, rows)},
        ["y"],
        {"fc.weight": weight, "fc.bias": random(4).astype(dtype)},
    )
    for info in (*proto.graph.input, *proto.graph.output):
        info.type.tensor_type.elem_type = onnx.helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    onnx.save(proto, folder / "m.onnx")
    return folder / "m.onnx"


def trained(graph: Graph, steps: int, rows: int, **options: Any) -> tuple[Any, Any]:
    step = fp.compile(graph, fp.losses.mean, fp.optim.SGD(1e-3), **options)
    session = step.bind()
    x = np.ones((2, rows), step.program.inputs[0].operand.type.dtype.numpy)
    for _ in range(steps):
        session.step({"x": x})
    return step, session


@pytest.mark.parametrize("rows", [8, 300])
@pytest.mark.parametrize("dtype", DTYPES)
def test_narrow_weights_move_by_less_than_their_own_type_can_tell(dtype: str, rows: int, tmp_path: Path) -> None:
    """The gradient of the mean over 2 x 4 outputs is a quarter for each weight, whatever the weights are."""
    path = file(tmp_path, DTYPES[dtype], rows)
    first = {value.name: value for value in from_onnx(path).stored}
    step, session = trained(from_onnx(path), 20, rows)
    for name, moved in (("fc.weight", 20 * 1e-3 / 4), ("fc.bias", 20 * 1e-3 / 4)):
        before = np.empty(first[name].shape, DTYPES[dtype])
        first[name].init.fill(before, np.random.default_rng(0))  # type: ignore[union-attr]
        assert session.parameters[name].dtype == np.float32
        np.testing.assert_allclose(before.astype(np.float32) - session.parameters[name], moved, rtol=2e-2)
    assert any(f"2 parameters of {dtype} are trained in float32" in note for note in step.program.notes)
    _, as_they_are = trained(from_onnx(path), 20, rows, narrow_weights=True)
    assert as_they_are.parameters["fc.weight"].dtype == DTYPES[dtype]
    if dtype == "bfloat16":
        assert (as_they_are.parameters["fc.weight"].astype(np.float32) >= 0.25).all()


def test_frozen_weights_and_inference_stay_narrow(tmp_path: Path) -> None:
    path = file(tmp_path, np.float16, 8)
    step = fp.compile(from_onnx(path), fp.losses.mean, fp.optim.SGD(0.1), freeze=["fc.weight"])
    types = {value.name: str(value.dtype) for value in step.graph.stored if value.kind is not Kind.STATE}  # type: ignore[union-attr]
    assert types["fc.weight"] == "float16" and types["fc.bias"] == "float32"
    assert {str(slot.operand.type.dtype) for slot in fp.compile(from_onnx(path)).program.stored} == {"float16"}


def test_a_plan_keeps_where_narrow_weights_are(tmp_path: Path) -> None:
    path = file(tmp_path, np.float16, 300)
    step, session = trained(from_onnx(path), 3, 300)
    step.save(tmp_path / "m.plan")
    again = fp.load_plan(tmp_path / "m.plan").bind()
    x = np.ones((2, 300), np.float16)
    for _ in range(3):
        again.step({"x": x})
    np.testing.assert_array_equal(again.parameters["fc.weight"], session.parameters["fc.weight"])
