"""Every function of scalar expressions in ONNX Runtime, of each kind of elements that it takes."""

from __future__ import annotations

import pytest

from foreplan.base.errors import ShapeError
from foreplan.graph import TensorType
from foreplan.graph.types import DTYPES
from foreplan.ops.expr import FUNCTIONS, Arg, Call
from foreplan.ops.map import Map
from tests.sweep.case import Case, Given
from tests.sweep.judges import JUDGES

# Functions of a type that have no standard op, or no kernel in ONNX Runtime.
WITHOUT = {("shiftleft", "int64"), ("shiftleft", "int32"), ("shiftright", "int64"), ("shiftright", "int32")}
WITHOUT |= {("pow", "uint64"), ("where", "uint64")}


@pytest.mark.parametrize("dtype", ["float32", "int64", "int32", "uint64", "bool"])
def test_functions_of_ordinary_numbers(dtype):
    judged = 0
    for name, function in FUNCTIONS.items():
        type, places = TensorType(DTYPES[dtype], (3, 50)), range(function.arity)
        condition = [Call("gt", (Arg(1), Arg(2)))] if name == "where" else [Arg(0)]
        expr = Call(name, (*condition, *(Arg(i) for i in places[1:])))
        values = "normal" if type.dtype.is_float else "0:2" if dtype == "bool" else "1:6"
        op = Map((str(expr),))
        try:
            op.infer([type] * function.arity)
        except ShapeError:
            continue
        found = JUDGES["onnx"].judge(Case(op, tuple(Given(type, values, seed) for seed in places)))
        assert found == ((name, dtype) not in WITHOUT), name
        judged += found
    assert judged >= 20
