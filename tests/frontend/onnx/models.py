"""Small ONNX models for tests, and ONNX Runtime's answers to them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from foreplan.frontend import from_onnx
from foreplan.graph import Graph
from foreplan.graph.value import Kind
from tests.ops.check import evaluate
from tests.oracle.peers import onnxruntime


def info(name: str, shape: Sequence[Any] | None, dtype: int = TensorProto.FLOAT) -> onnx.ValueInfoProto:
    """A graph input or output; strings in the shape are symbols."""
    return helper.make_tensor_value_info(name, dtype, shape)


def model(
    nodes: Sequence[onnx.NodeProto],
    inputs: dict[str, Sequence[Any] | None],
    outputs: Sequence[str],
    constants: dict[str, np.ndarray] | None = None,
    opset: int = 18,
    functions: Sequence[onnx.FunctionProto] = (),
    domains: Sequence[str] = (),
) -> onnx.ModelProto:
    """A model of float32 inputs."""
    graph = helper.make_graph(
        list(nodes),
        "small",
        [info(name, shape) for name, shape in inputs.items()],
        [onnx.ValueInfoProto(name=name) for name in outputs],
        [numpy_helper.from_array(array, name) for name, array in (constants or {}).items()],
    )
    imports = [helper.make_opsetid("", opset), *(helper.make_opsetid(domain, 1) for domain in domains)]
    return helper.make_model(graph, opset_imports=imports, functions=list(functions), ir_version=8)


def node(op: str, inputs: str, outputs: str, name: str = "", **attributes: Any) -> onnx.NodeProto:
    """A node whose inputs and outputs are written with spaces between; `-` is an input left out."""
    read = ["" if part == "-" else part for part in inputs.split()]
    return helper.make_node(op, read, outputs.split(), name=name, **attributes)


def run(graph: Graph, **inputs: np.ndarray) -> dict[str, np.ndarray]:
    """The outputs of an imported graph by the ops' kernels."""
    found = evaluate(graph, inputs)
    return {name: found[value] for name, value in graph.outputs.items()}


def by_onnxruntime(proto: onnx.ModelProto, **inputs: np.ndarray) -> dict[str, np.ndarray]:
    """The outputs by ONNX Runtime, which needs their types: they are inferred."""
    for output in proto.graph.output:
        if not output.type.HasField("tensor_type"):
            inferred = onnx.shape_inference.infer_shapes(proto)
            known = {value.name: value for value in (*inferred.graph.value_info, *inferred.graph.output)}
            output.CopyFrom(known[output.name])
    session = onnxruntime.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
    names = [output.name for output in proto.graph.output]
    return dict(zip(names, session.run(names, inputs)))


def of_one_node(
    op: str, x: np.ndarray, constants: dict[str, np.ndarray] | None = None, **attributes: Any
) -> np.ndarray:
    """What ONNX Runtime gives for one op of x and constants."""
    made = node(op, " ".join(["x", *(constants or {})]), "y", **attributes)
    return by_onnxruntime(model([made], {"x": x.shape}, ["y"], constants, opset=19), x=x)["y"]


def random(*shape: int, seed: int = 0) -> np.ndarray:
    """Standard normal float32 numbers."""
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(np.float32)


def branch(name: str, *nodes: onnx.NodeProto, inputs: tuple[onnx.ValueInfoProto, ...] = (), outputs: str) -> Any:
    values = [onnx.ValueInfoProto(name=output) for output in outputs.split()]
    for value in values:
        value.type.tensor_type.elem_type = TensorProto.BOOL if value.name.startswith("go") else TensorProto.FLOAT
    return helper.make_graph(list(nodes), name, list(inputs), values)


def kinds(graph: Graph) -> dict[str, Kind]:
    return {value.name: value.kind for value in graph.stored}


def same_as_onnxruntime(proto: onnx.ModelProto, **inputs: np.ndarray) -> Graph:
    graph = from_onnx(proto)
    got, expected = run(graph, **inputs), by_onnxruntime(proto, **inputs)
    assert list(got) == list(expected)
    for name, wanted in expected.items():
        np.testing.assert_allclose(got[name], wanted, rtol=1e-4, atol=1e-5, err_msg=name)
    return graph
