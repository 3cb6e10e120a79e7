"""Control flow that is decided at import: branches, loops and scans; what is malformed is refused by name."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

import foreplan as fp
from foreplan.base.errors import ModelError, ShapeError, UnsupportedError
from foreplan.frontend import from_onnx
from foreplan.graph.value import Kind
from tests.frontend.onnx.models import branch, info, kinds, model, node, random, same_as_onnxruntime
from tests.profile import pick


def test_a_known_condition_chooses_its_branch() -> None:
    then = branch("then", node("Mul", "x two", "t", "double"), outputs="t")
    other = branch("else", node("Neg", "x", "e"), outputs="e")
    nodes = [
        node("Shape", "x", "s"),
        node("ReduceProd", "s", "n", keepdims=0),
        node("Greater", "n five", "big"),
        node("If", "big", "y", "choice", then_branch=then, else_branch=other),
    ]
    constants = {"two": np.array(2.0, np.float32), "five": np.array(5)}
    graph = same_as_onnxruntime(model(nodes, {"x": (2, 3)}, ["y"], constants), x=random(2, 3))
    assert [found.name for found in graph.nodes] == ["choice/double"]
    assert graph.nodes[0].outputs[0].name == "y"
    same_as_onnxruntime(model(nodes, {"x": (1, 3)}, ["y"], constants), x=random(1, 3))


def loop_body() -> onnx.GraphProto:
    inputs = (info("i", (), TensorProto.INT64), info("go_in", (), TensorProto.BOOL), info("h", (2, 2)))
    nodes = [
        node("Identity", "go_in", "go"),
        node("MatMul", "h w", "hw", "step"),
        node("Tanh", "hw", "h_out"),
        node("ReduceSum", "h_out", "row", keepdims=0),
    ]
    return branch("body", *nodes, inputs=inputs, outputs="go h_out row")


def test_a_loop_of_known_length_is_written_out() -> None:
    nodes = [node("Loop", "three yes x", "last rows", "loop", body=loop_body())]
    constants = {"three": np.array(3), "yes": np.array(True), "w": random(2, 2)}
    proto = model(nodes, {"x": (2, 2)}, ["last", "rows"], constants)
    for output, shape in zip(proto.graph.output, ((2, 2), (3,))):
        output.CopyFrom(info(output.name, shape))
    graph = same_as_onnxruntime(proto, x=random(2, 2))
    assert kinds(graph) == {"w": Kind.PARAMETER}
    assert [found.name for found in graph.nodes if found.op.name == "matmul"] == [f"loop/{i}/step" for i in range(3)]


@pytest.mark.parametrize("how", ["initializer", "constant"])
def test_a_loop_holds_one_weight_for_all_its_steps(how: str) -> None:
    """It trains as the same loop does that reads a weight from outside."""
    weight = helper.make_tensor("inner", TensorProto.FLOAT, (2, 2), random(2, 2).reshape(-1).tolist())
    changes = []
    for within in (False, True):
        body = loop_body()
        if within and how == "initializer":
            body.initializer.append(weight)
            body.initializer[0].name = "w"
        elif within:
            body.node.insert(0, node("Constant", "", "w", value=weight))
        constants = {"three": np.array(3), "yes": np.array(True)} | ({} if within else {"w": random(2, 2)})
        nodes = [node("Loop", "three yes x", "last rows", "loop", body=body)]
        graph = from_onnx(model(nodes, {"x": (2, 2)}, ["last", "rows"], constants))
        session = fp.compile(graph, fp.losses.mse, fp.optim.SGD(0.5), target="numpy").bind()
        (name,) = session.parameters
        before = session.parameters[name].copy()
        session.step({"x": random(2, 2, seed=1), "target": np.ones((2, 2), np.float32)})
        changes.append(session.parameters[name] - before)
    assert np.abs(changes[0]).max() > 1e-3
    np.testing.assert_allclose(changes[1], changes[0], rtol=1e-6)


def test_a_loop_whose_length_depends_on_data_is_refused_by_name() -> None:
    nodes = [
        node("ReduceSum", "x", "s", keepdims=0),
        node("Cast", "s", "n", to=TensorProto.INT64),
        node("Loop", "n yes x", "last rows", "loop", body=loop_body()),
    ]
    with pytest.raises(UnsupportedError, match=r"node 'loop' \(Loop\).*its number of steps is computed from data"):
        from_onnx(model(nodes, {"x": (2, 2)}, ["last"], {"yes": np.array(True), "w": random(2, 2)}))


def test_a_scan_is_written_out() -> None:
    inputs = (info("h", (2,)), info("row", (2,)))
    body = branch("body", node("Add", "h row", "sum"), node("Identity", "sum", "out"), inputs=inputs, outputs="sum out")
    nodes = [node("Scan", "h0 x", "last rows", "scan", body=body, num_scan_inputs=1)]
    proto = model(nodes, {"h0": (2,), "x": (3, 2)}, ["last", "rows"])
    for output, shape in zip(proto.graph.output, ((2,), (3, 2))):
        output.CopyFrom(info(output.name, shape))
    same_as_onnxruntime(proto, h0=random(2), x=random(3, 2))


@pytest.mark.parametrize(
    ("attributes", "outputs", "told"),
    [
        ({"num_scan_inputs": 2147483648}, "sum out", "num_scan_inputs must be from 1 to 2"),
        ({"num_scan_inputs": 3}, "sum out", "num_scan_inputs must be from 1 to 2"),
        ({"num_scan_inputs": 0}, "sum out", "num_scan_inputs must be from 1 to 2"),
        ({"num_scan_inputs": -1}, "sum out", "num_scan_inputs must be from 1 to 2"),
        ({"num_scan_inputs": 1}, "", "its body 'body' must have 1 outputs or more"),
        ({"num_scan_inputs": 1, "scan_input_axes": [0, 0]}, "sum out", "scan_input_axes must have 1 numbers"),
        ({"num_scan_inputs": 1, "scan_input_directions": [0, 1]}, "sum out", "scan_input_directions must have 1"),
        ({"num_scan_inputs": 1, "scan_output_axes": [0, 0]}, "sum out", "scan_output_axes must have 1"),
        ({"num_scan_inputs": 1, "scan_output_directions": [0, 0]}, "sum out", "scan_output_directions must have 1"),
    ],
)
def test_a_scan_that_does_not_fit_its_body_is_refused(attributes: dict[str, Any], outputs: str, told: str) -> None:
    inputs = (info("h", (2,)), info("row", (2,)))
    nodes = (node("Add", "h row", "sum"), node("Identity", "sum", "out"))
    body = branch("body", *nodes, inputs=inputs, outputs=outputs)
    scan = node("Scan", "h0 x", "last rows", "scan", body=body, **attributes)
    with pytest.raises(ModelError, match=rf"node 'scan' \(Scan\).*{told}"):
        from_onnx(model([scan], {"h0": (2,), "x": (3, 2)}, ["last", "rows"]))


def test_a_loop_that_does_not_fit_its_body_is_refused() -> None:
    body = loop_body()
    del body.output[1:]
    nodes = [node("Loop", "three yes x", "last rows", "loop", body=body)]
    constants = {"three": np.array(3), "yes": np.array(True), "w": random(2, 2)}
    with pytest.raises(ModelError, match=r"node 'loop' \(Loop\).*its body 'body' must have 2 outputs or more"):
        from_onnx(model(nodes, {"x": (2, 2)}, ["last"], constants))
    constants["three"] = np.zeros(0, np.int64)
    nodes = [node("Loop", "three yes x", "last rows", "loop", body=loop_body())]
    with pytest.raises(ShapeError, match=r"node 'loop' \(Loop\).*its number of steps must be one number"):
        from_onnx(model(nodes, {"x": (2, 2)}, ["last"], constants))


@pytest.fixture
def few_nodes(monkeypatch: pytest.MonkeyPatch) -> str:
    """A lower limit of nodes that are written out, which is soon reached; and how it is said."""
    most = pick(1 << 13, 1 << 13, 1 << 15)
    monkeypatch.setattr("foreplan.frontend.onnx.importer._MOST_WRITTEN", most)
    return f"come to more than {most}"


def test_loops_within_loops_come_to_an_end(few_nodes: str) -> None:
    """What they come to is counted over all of them."""
    inner = node("Identity", "x", "h")
    for depth in range(4):
        inputs = (info(f"i{depth}", (), TensorProto.INT64), info(f"go_in{depth}", (), TensorProto.BOOL))
        body = branch("body", node("Identity", f"go_in{depth}", "go"), inner, inputs=inputs, outputs="go h")
        inner = node("Loop", "many yes", "h", "loop", body=body)
    constants = {"many": np.array(30), "yes": np.array(True)}
    with pytest.raises(UnsupportedError, match=rf"\(Loop\).*{few_nodes}"):
        from_onnx(model([inner], {"x": (2, 2)}, ["h"], constants))


@pytest.mark.parametrize("steps", [1, 1 << 40])
def test_functions_that_call_others_twice_come_to_an_end(steps: int, few_nodes: str) -> None:
    """What they come to is counted together with the loops around them."""
    opsets, name = [helper.make_opsetid("", 18), helper.make_opsetid("own", 1)], "f0"
    functions = [helper.make_function("own", name, ["x"], ["y"], [node("Identity", "x", "y")], opsets[:1])]
    for depth in range(1, 40 if steps == 1 else 4):
        calls = [helper.make_node(name, ["x"], ["h"], domain="own"), helper.make_node(name, ["h"], ["y"], domain="own")]
        name = f"f{depth}"
        functions.append(helper.make_function("own", name, ["x"], ["y"], calls, opsets))
    call = helper.make_node(name, ["h0"], ["h"], domain="own")
    inputs = (info("i", (), TensorProto.INT64), info("go_in", (), TensorProto.BOOL), info("h0", (2, 2)))
    body = branch("body", node("Identity", "go_in", "go"), call, inputs=inputs, outputs="go h")
    nodes = [node("Loop", "many yes x", "last", "loop", body=body)]
    proto = model(nodes, {"x": (2, 2)}, ["last"], {"many": np.array(steps), "yes": np.array(True)})
    proto.functions.extend(functions)
    proto.opset_import.append(opsets[1])
    with pytest.raises(UnsupportedError, match=few_nodes):
        from_onnx(proto)


@pytest.mark.parametrize("op", ["RNN", "GRU", "LSTM"])
@pytest.mark.parametrize("direction", ["forward", "bidirectional"])
def test_a_recurrent_layer_of_no_steps_gives_its_first_state(op: str, direction: str) -> None:
    ways, gates = 1 + (direction == "bidirectional"), {"RNN": 1, "GRU": 3, "LSTM": 4}[op]
    weights = {"w": random(ways, 2 * gates, 3), "r": random(ways, 2 * gates, 2), "s": random(ways, 4, 2)}
    layer = node(op, "x w r - - s", "y last", hidden_size=2, direction=direction)
    graph = from_onnx(model([layer], {"x": (0, 4, 3)}, ["y", "last"], weights))
    found = fp.compile(graph).bind().step({"x": np.zeros((0, 4, 3), np.float32)}).outputs
    assert found["y"].shape == (0, ways, 4, 2)
    np.testing.assert_array_equal(found["last"], weights["s"])


def test_recurrent_layers_of_many_steps_come_to_an_end() -> None:
    rows = [node("LSTM", "x w r", "y", hidden_size=2)]
    weights = {"w": random(1, 8, 2), "r": random(1, 8, 2)}
    with pytest.raises(ModelError, match=r"\(LSTM\).*1099511627776 steps"):
        from_onnx(model(rows, {"x": (1 << 40, 1, 2)}, ["y"], weights))
    assert len(from_onnx(model(rows, {"x": (10_000, 1, 2)}, ["y"], weights)).nodes) < 20


@pytest.mark.thorough
def test_loops_of_recurrent_layers_come_to_an_end() -> None:
    rows = [node("LSTM", "x w r", "y", hidden_size=2)]
    weights = {"w": random(1, 8, 2), "r": random(1, 8, 2)}
    inputs = (info("i", (), TensorProto.INT64), info("go_in", (), TensorProto.BOOL))
    body = branch("body", node("Identity", "go_in", "go"), *rows, inputs=inputs, outputs="go y")
    nodes = [node("Loop", "many yes", "all", "loop", body=body)]
    constants = {"many": np.array(1 << 40), "yes": np.array(True)} | weights
    with pytest.raises(UnsupportedError, match=r"\(LSTM\).*more than 65536 nodes.*use fewer steps"):
        from_onnx(model(nodes, {"x": (64, 1, 2)}, ["all"], constants))


def test_a_split_into_more_parts_than_it_has_outputs_is_refused() -> None:
    nodes = [node("Split", "x", "y z", axis=1, num_outputs=10**12)]
    with pytest.raises(ModelError, match=r"\(Split\).*num_outputs is 1000000000000, but it has 2 outputs"):
        from_onnx(model(nodes, {"x": (2, 6)}, ["y", "z"]))


@pytest.mark.parametrize("op", ["DepthToSpace", "SpaceToDepth"])
@pytest.mark.parametrize("size", [0, -2, 10**12])
def test_blocks_of_no_size_are_refused(op: str, size: int) -> None:
    with pytest.raises(ModelError, match=rf"\({op}\)"):
        from_onnx(model([node(op, "x", "y", blocksize=size)], {"x": (1, 8, 2, 2)}, ["y"]))
