"""What an op is in standard ONNX, as `foreplan.export` writes it: checked by ONNX and run by ONNX Runtime."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import numpy as np

from foreplan.base.errors import ForeplanError, UnsupportedError
from foreplan.export.graph import onnx_graph
from foreplan.export.save import serialized
from foreplan.graph import GraphBuilder
from foreplan.graph.init import generator_for
from tests.oracle.peers import onnx, onnxruntime
from tests.sweep.bounds import complaint, expectation
from tests.sweep.case import Case
from tests.sweep.draws import STRANGE
from tests.sweep.table import ENTRIES, Entry

REFUSED = {"random", "bitcast"}  # ops that standard ONNX of the written opset cannot say


def serves(entry: Entry, name: str) -> bool:
    """All ops but those that are refused."""
    return name not in REFUSED


def draw(entry: Entry, rng: Random) -> Case:
    """Ordinary numbers, dense, at least one: narrow ones would be rounded at other places, and ONNX leaves open what
    becomes of infinities, and of integers that overflow in a product.
    """
    while True:
        case = entry.full(rng)
        inputs = tuple(replace(x, type=x.type.with_dtype(x.type.dtype.wide), lies="dense") for x in case.inputs)
        inputs = tuple(replace(x, values="normal") if x.values in STRANGE else x for x in inputs)
        case = replace(case, inputs=inputs)
        overflows = case.op.name == "reduce" and case.op.how == "prod" and not case.types[0].dtype.is_float
        if all(type.size for type in case.types) and not overflows and _infers(case):
            return case


def _infers(case: Case) -> bool:
    """Whether the op takes the inputs widened, and computes nothing in bfloat16, which NumPy arrays cannot bring to
    ONNX Runtime.
    """
    try:
        results = case.op.infer(case.types)
    except ForeplanError:
        return False
    return "float16" not in str(case.op) and not any(type.dtype.is_narrow for type in results)


def judge(case: Case) -> int:
    """Raise AssertionError where ONNX Runtime gives something else than the op; 0 where it has no kernel."""
    b = GraphBuilder()
    inputs = [b.input(f"x{i}", type) for i, type in enumerate(case.types)]
    outputs = b.node(case.op, *inputs, name="the op")
    graph = b.finish({f"y{i}": value for i, value in enumerate(outputs)})
    try:
        proto, plain = onnx_graph(graph, graph.outputs)
    except UnsupportedError as error:
        assert "the op" in str(error), error
        return 0
    rng = generator_for(0, "")
    contents = {}
    for value in plain.stored:
        array = np.empty(value.shape, value.dtype.numpy)
        value.init.fill(array, rng)
        contents[value.name] = lambda array=array: array
    model = serialized(proto, contents)
    onnx.checker.check_model(model, full_check=True)
    arrays = [_valid(case, i, x) for i, x in enumerate(case.arrays())]
    found = _run(model, arrays)
    if found is None:
        return 0
    entry = ENTRIES[case.op.name]
    for i, (y, each) in enumerate(zip(found, expectation(case.op, entry.oracle, entry.rule, arrays, "numpy"))):
        wrong = complaint(y, each)
        assert wrong is None, f"output {i} in ONNX Runtime: {wrong}"
    return 1


def _valid(case: Case, index: int, x: np.ndarray) -> np.ndarray:
    """An input as a session would take it: others are refused before a step begins, and ONNX leaves them open."""
    found = case.op.valid_range(index, case.types)
    if found is None:
        return x
    low, high, *more = found
    inside = [low <= number <= high or number in more for number in x.reshape(-1).tolist()]
    return np.where(np.reshape(inside, x.shape), x, x.dtype.type(max(low, 0)))


def _run(model: bytes, arrays: list[np.ndarray]) -> list[np.ndarray] | None:
    """The outputs; None where ONNX Runtime has no kernel for an element type, or refuses numbers."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 3
    try:
        session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    except onnxruntime.capi.onnxruntime_pybind11_state.NotImplemented:
        return None
    names = [each.name for each in session.get_inputs()]
    try:
        found: list[np.ndarray] = session.run(None, {name: arrays[int(name[1:])] for name in names})
    except onnxruntime.capi.onnxruntime_pybind11_state.Fail as error:
        if "by zero" not in str(error):  # of integers, where NumPy gives 0
            raise
        return None
    return found
