"""What the walk makes of a model: names, roles of constants, known values, and functions."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from foreplan.base.errors import ForeplanError, ModelError, UnsupportedError
from foreplan.frontend import from_onnx
from foreplan.graph import Fill
from foreplan.graph.value import Kind
from tests.frontend.onnx.models import info, kinds, model, node, random, run, same_as_onnxruntime
from tests.profile import pick, values

# Names.


def test_nodes_tensors_and_weights_keep_their_names() -> None:
    nodes = [
        node("Conv", "x conv.weight conv.bias", "/conv/out", "/conv/Conv"),
        node("Relu", "/conv/out", "act"),
        node("Gelu", "act", "y", "gelu"),
    ]
    constants = {"conv.weight": random(4, 3, 1, 1), "conv.bias": random(4)}
    graph = from_onnx(model(nodes, {"x": (1, 3, 5, 5)}, ["y"], constants, opset=20))
    assert [found.name for found in graph.nodes] == ["/conv/Conv", "Relu_1", "gelu"]
    assert [found.outputs[0].name for found in graph.nodes] == ["/conv/out", "act", "y"]
    assert kinds(graph) == {"conv.weight": Kind.PARAMETER, "conv.bias": Kind.PARAMETER}
    assert graph.nodes[0].source == "model 'small': node '/conv/Conv' (Conv)"


def test_what_an_op_is_made_of_has_its_name_in_front() -> None:
    nodes = [node("LpNormalization", "x", "y", "unit", p=2), node("Relu", "y", "unit/map", "unit/reduce")]
    graph = from_onnx(model(nodes, {"x": (2, 3)}, ["unit/map"]))
    assert len({found.name for found in graph.nodes}) == len(graph.nodes)
    assert graph.nodes[-2].name == "unit" and graph.nodes[-2].outputs[0].name == "y"
    assert graph.outputs["unit/map"].name == "unit/map"
    assert all(found.name.startswith("unit") for found in graph.nodes)


def test_nodes_of_one_name_are_told_apart() -> None:
    nodes = [node("Relu", "x", "a", "same"), node("Neg", "a", "y", "same")]
    assert [found.name for found in from_onnx(model(nodes, {"x": (2,)}, ["y"])).nodes] == ["same", "same.1"]


def test_outputs_that_are_inputs_or_constants() -> None:
    graph = from_onnx(model([node("Identity", "x", "y")], {"x": (2,)}, ["y", "c"], {"c": random(3)}))
    assert graph.outputs["y"] is graph.inputs[0]
    assert graph.outputs["c"].kind is Kind.CONSTANT


# Roles.


def test_weights_are_parameters_and_statistics_buffers_wherever_they_come_from() -> None:
    filled = helper.make_node("ConstantOfShape", ["shape"], ["mean"], value=helper.make_tensor("v", 1, (1,), [0.5]))
    nodes = [
        helper.make_node("Constant", [], ["scale"], value=onnx.numpy_helper.from_array(random(4))),
        filled,
        node("BatchNormalization", "x scale bias mean var", "n"),
        node("Transpose", "w", "wt", perm=[1, 0]),
        node("MatMul", "n wt", "m"),
        node("Add", "m b", "a"),
        node("Mul", "a two", "s"),
        node("Sub", "s offset", "y"),
    ]
    constants = {
        "shape": np.array([4]),
        "bias": random(4),
        "var": np.ones(4, np.float32),
        "w": random(5, 4),
        "b": random(5),
        "two": np.array(2.0, np.float32),
        "offset": random(5),
    }
    graph = from_onnx(model(nodes, {"x": (3, 4)}, ["y"], constants))
    assert kinds(graph) == {
        "scale": Kind.PARAMETER,
        "bias": Kind.PARAMETER,
        "mean": Kind.BUFFER,
        "var": Kind.BUFFER,
        "w": Kind.PARAMETER,
        "b": Kind.PARAMETER,
        "offset": Kind.CONSTANT,
    }
    init = {value.name: value.init for value in graph.stored}["mean"]
    assert init == Fill(0.5)
    (scaled,) = (found for found in graph.nodes if found.outputs[0].name == "s")
    assert "2.0" in str(scaled.op)  # one number is part of the expression


@pytest.mark.parametrize(
    ("shape", "of_initializer", "of_node"),
    [
        ((2,), Kind.PARAMETER, Kind.PARAMETER),
        ((1, 4, 1), Kind.PARAMETER, Kind.PARAMETER),
        ((3, 4, 1), Kind.PARAMETER, Kind.PARAMETER),
        ((3, 4, 2), Kind.PARAMETER, Kind.PARAMETER),
        ((1, 1, 1), None, None),  # one number is part of the expression
    ],
)
def test_what_is_added_is_a_bias_if_it_is_a_vector_or_was_learned(
    shape: tuple[int, ...], of_initializer: Kind | None, of_node: Kind | None
) -> None:
    made = helper.make_node("Constant", [], ["b"], value=onnx.numpy_helper.from_array(random(*shape)))
    add = node("Add", "x b", "y")
    for nodes, constants, kind in (([made, add], {}, of_node), ([add], {"b": random(*shape)}, of_initializer)):
        found = kinds(from_onnx(model(nodes, {"x": (3, 4, 2)}, ["y"], constants)))
        assert found == ({} if kind is None else {"b": kind})


def test_a_matrix_that_a_node_holds_is_learned_where_its_numbers_are_as_training_leaves_them() -> None:
    """Old converters, such as Paddle's, hold all weights in Constants."""
    drawn = np.random.default_rng(0).normal(size=(3, 4, 2)).astype(np.float32)
    for numbers, kind in ((drawn, Kind.PARAMETER), (np.ones((3, 4, 2), np.float32), Kind.CONSTANT)):
        made = helper.make_node("Constant", [], ["b"], value=onnx.numpy_helper.from_array(numbers))
        graph = from_onnx(model([made, node("Add", "x b", "y")], {"x": (3, 4, 2)}, ["y"]))
        assert kinds(graph) == {"b": kind}


def test_a_constant_without_a_name_is_refused() -> None:
    nameless = helper.make_node("Constant", [], [], value=onnx.numpy_helper.from_array(random(4)))
    with pytest.raises(ForeplanError):
        from_onnx(model([nameless, node("Relu", "x", "y")], {"x": (2,)}, ["y"]))


def test_embeddings_gains_and_tokens_are_parameters() -> None:
    nodes = [
        node("Gather", "table ids", "e"),
        node("Slice", "positions from to", "p"),
        node("Add", "e p", "h"),
        node("Expand", "token one", "t"),
        node("Concat", "t h", "c", axis=1),
        node("LayerNormalization", "c gain bias", "y"),
    ]
    constants = {
        "table": random(9, 4),
        "positions": random(1, 7, 4),
        "from": np.array([0, 0]),
        "to": np.array([1, 3]),
        "token": random(1, 1, 4),
        "one": np.array([1, 1, 4]),
        "gain": random(4),
        "bias": random(4),
    }
    proto = model(nodes, {"ids": (1, 3)}, ["y"], constants)
    proto.graph.input[0].CopyFrom(info("ids", (1, 3), TensorProto.INT64))
    graph = same_as_onnxruntime(proto, ids=np.array([[1, 2, 3]]))
    assert kinds(graph) == dict.fromkeys(("table", "positions", "token", "gain", "bias"), Kind.PARAMETER)


def test_weights_of_a_models_own_functions_are_parameters() -> None:
    body = helper.make_function(
        "my.domain",
        "Dense",
        ["x", "w", "scale"],
        ["y"],
        [node("Transpose", "w", "t", perm=[1, 0]), node("Mul", "x scale", "s"), node("MatMul", "s t", "y", "inner")],
        [helper.make_opsetid("", 18)],
    )
    call = helper.make_node("Dense", ["x", "weight", "scale"], ["y"], name="dense", domain="my.domain")
    constants = {"weight": random(4, 3), "scale": np.array(0.5, np.float32)}
    proto = model([call], {"x": (2, 3)}, ["y"], constants, functions=[body], domains=["my.domain"])
    graph = same_as_onnxruntime(proto, x=random(2, 3))
    assert kinds(graph) == {"weight": Kind.PARAMETER}
    assert graph.nodes[-1].name == "dense/inner" and graph.nodes[-1].outputs[0].name == "y"


# Known values.


def test_shape_arithmetic_leaves_no_nodes() -> None:
    nodes = [
        node("Shape", "x", "s"),
        node("Gather", "s zero", "n", axis=0),
        node("Unsqueeze", "n axes", "u"),
        node("Cast", "u", "f", to=TensorProto.FLOAT),
        node("Mul", "f half", "g"),
        node("Floor", "g", "l"),
        node("Cast", "l", "i", to=TensorProto.INT64),
        node("Concat", "i minus", "t", axis=0),
        node("Reshape", "x t", "y"),
        node("Range", "zero six one", "r"),
        node("ConstantOfShape", "t2", "z"),
        node("NonZero", "r", "nz"),
    ]
    constants = {
        "zero": np.array(0),
        "axes": np.array([0]),
        "half": np.array(0.5, np.float32),
        "minus": np.array([-1]),
        "six": np.array(6),
        "one": np.array(1),
        "t2": np.array([2, 2]),
    }
    graph = from_onnx(model(nodes, {"x": ("n", 3)}, ["y", "nz"], constants), batch=4)
    assert [found.op.name for found in graph.nodes] == ["reshape"]
    assert graph.outputs["y"].shape == (2, 6)
    np.testing.assert_array_equal(run(graph, x=random(4, 3))["nz"], [[1, 2, 3, 4, 5]])


def test_shapes_that_depend_on_data_are_refused_by_name() -> None:
    for nodes, culprit in (
        ([node("NonZero", "x", "y", "find")], r"find.*NonZero"),
        ([node("Cast", "x", "i", to=TensorProto.INT64), node("Reshape", "x i", "y", "fold")], r"fold.*'i'"),
        ([node("Cast", "x", "i", to=TensorProto.INT64), node("ConstantOfShape", "i", "y", "fill")], r"fill.*'i'"),
    ):
        with pytest.raises(UnsupportedError, match=culprit):
            from_onnx(model(nodes, {"x": (2,)}, ["y"]))


def test_huge_constants_are_described_and_not_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("foreplan.frontend.onnx.importer._MOST_WRITTEN", pick(1 << 11, 1 << 11, 1 << 15))
    nodes = [node("ConstantOfShape", "s", "z"), node("Gather", "z i", "y", axis=0)]
    constants = {"s": np.array([1 << 40, 64]), "i": np.array([3, 5])}
    graph = from_onnx(model(nodes, {}, ["y"], constants))
    (table,) = (value for value in graph.stored if value.name == "z")
    assert table.init == Fill(0.0) and table.type.nbytes == 1 << 48
    with pytest.raises(ModelError):
        from_onnx(model([node("Range", "a b c", "y")], {}, ["y"], dict(zip("abc", map(np.array, (0, 1 << 60, 1))))))


# Functions of ONNX.


@pytest.mark.parametrize(
    ("op", "inputs", "attributes"),
    [("HardSwish", 1, {}), ("CenterCropPad", 1, {}), ("ReduceLogSumExp", 1, {}), ("MeanVarianceNormalization", 1, {})],
)
def test_composite_ops(op: str, inputs: int, attributes: dict[str, Any]) -> None:
    extra = {"shape": np.array([2, 3, 5, 4])} if op == "CenterCropPad" else {}
    proto = model([node(op, " ".join(["x", *extra]), "y", "it", **attributes)], {"x": (2, 3, 4, 6)}, ["y"], extra)
    same_as_onnxruntime(proto, x=random(2, 3, 4, 6))


# Ops whose meaning changed between opsets.


@pytest.mark.parametrize("op", ["Softmax", "LogSoftmax", "Hardmax"])
@pytest.mark.parametrize("opset", [7, 9, 11, 13, 18])
def test_softmax_of_before_and_after_opset_13(opset: int, op: str) -> None:
    x = random(2, 3, 4)
    for attributes in ({}, *({"axis": axis} for axis in (-3, -2, -1, 0, 1, 2))):
        proto = model([node(op, "x", "y", **attributes)], {"x": x.shape}, ["y"], opset=opset)
        same_as_onnxruntime(proto, x=x)
        known = model(
            [node(op, "c", "k", **attributes), node("Sub", "x k", "y")], {"x": x.shape}, ["y"], {"c": x}, opset
        )
        same_as_onnxruntime(known, x=x)


CHANGED = [
    (10, node("Clip", "x", "y", min=-0.5, max=0.25), {}),
    (11, node("Clip", "x low", "y"), {"low": np.array(-0.5, np.float32)}),
    (13, node("Clip", "x - high", "y"), {"high": np.array(0.5, np.float32)}),
    (9, node("Slice", "x", "y", axes=[-1, 1], starts=[-3, 1], ends=[9, -1]), {}),
    (13, node("Slice", "x s e a t", "y"), dict(zip("seat", map(np.array, ([3], [-(2**31)], [2], [-2]))))),
    (13, node("Slice", "x s e a t", "y"), dict(zip("seat", map(np.array, ([-9], [-9], [2], [-1]))))),
    (10, node("Pad", "x", "y", pads=[0, 1, 0, 0, 0, 2], mode="reflect"), {}),
    (13, node("Pad", "x p v", "y"), {"p": np.array([0, 1, -1, 0, 0, 2]), "v": np.array(7.0, np.float32)}),
    (11, node("Squeeze", "one", "y", axes=[0, -1]), {"one": random(1, 3, 1)}),
    (13, node("Unsqueeze", "x a", "y"), {"a": np.array([0, -1])}),
    (11, node("Split", "x", "y z", axis=-1, split=[1, 3]), {}),
    (13, node("Split", "x s", "y z", axis=2), {"s": np.array([3, 1])}),
    (18, node("Split", "x", "y z", axis=2, num_outputs=2), {}),
    (11, node("ReduceSum", "x", "y", axes=[0, -1]), {}),
    (13, node("ReduceSum", "x a", "y", keepdims=0), {"a": np.array([1])}),
    (13, node("ReduceSum", "x e", "y", noop_with_empty_axes=1), {"e": np.array([], np.int64)}),
    (17, node("ReduceMax", "x", "y", axes=[1]), {}),
    (18, node("ReduceMax", "x a", "y"), {"a": np.array([-1])}),
    (11, node("Dropout", "x", "y", ratio=0.5), {}),
    (13, node("Dropout", "x r", "y"), {"r": np.array(0.5, np.float32)}),
    (14, node("Reshape", "x s", "y"), {"s": np.array([0, -1])}),
    (9, node("BatchNormalization", "x s b m v", "y", epsilon=0.1), {k: np.abs(random(3, seed=ord(k))) for k in "sbmv"}),
    (7, node("PRelu", "x s", "y"), {"s": random(3, 1)}),
    (8, node("Sum", "x x c", "y"), {"c": random(4)}),
    (8, node("Mean", "x c", "y"), {"c": random(4)}),
    (12, node("ArgMax", "x", "y", axis=1, select_last_index=1), {}),
    (11, node("TopK", "x k", "y z", axis=1), {"k": np.array([2])}),
    (9, node("TopK", "x", "y z", axis=2, k=2), {}),
    (11, node("CumSum", "x a", "y", reverse=1, exclusive=1), {"a": np.array(1)}),
    (11, node("Flatten", "x", "y", axis=-1), {}),
    (9, node("Where", "c x o", "y"), {"c": random(3, 4) > 0, "o": np.array(1.0, np.float32)}),
    (12, node("Einsum", "x w", "y", equation="bij,kj->bki"), {"w": random(5, 4)}),
    (11, node("OneHot", "i d v", "y", axis=0), {"i": np.array([1, -1]), "d": np.array(3), "v": random(2)}),
    (13, node("Mod", "x d", "y", fmod=1), {"d": np.array(0.7, np.float32)}),
    (13, node("Pow", "x t", "y"), {"t": np.array(2)}),
    (
        11,
        node("Gemm", "w v b", "y", transA=1, alpha=0.5, beta=2.0),
        {"w": random(4, 3), "v": random(4, 5), "b": random(3, 1)},
    ),
    (13, node("Tile", "x r", "y"), {"r": np.array([1, 2, 3])}),
    (14, node("Trilu", "x k", "y", upper=0), {"k": np.array(1)}),
    (16, node("ScatterND", "x i u", "y"), {"i": np.array([[0, 1], [1, 0]]), "u": random(2, 4)}),
    (13, node("GatherND", "x i", "y", batch_dims=1), {"i": np.array([[1], [-1]])}),
]


@pytest.mark.parametrize(("opset", "tested", "constants"), CHANGED, ids=lambda item: getattr(item, "op_type", None))
def test_ops_as_their_opset_has_them(opset: int, tested: onnx.NodeProto, constants: dict[str, np.ndarray]) -> None:
    proto = model([tested], {"x": (2, 3, 4)}, list(tested.output), constants, opset=opset)
    same_as_onnxruntime(proto, x=random(2, 3, 4))


@pytest.mark.parametrize(("count", "op"), values([400, 17, 16, 1], ["Sum", "Mean", "Max", "Min"]))
def test_ops_of_any_number_of_inputs(op: str, count: int) -> None:
    constants = {"c": random(4, seed=1), "d": random(3, 1, seed=2)}
    inputs = ["c", *("xd"[i % 2] for i in range(count - 1))]
    proto = model([node(op, " ".join(inputs), "z"), node("Add", "x z", "y")], {"x": (3, 4)}, ["y"], constants)
    same_as_onnxruntime(proto, x=random(3, 4))


WINDOWS = [
    (11, "Conv", {"auto_pad": "SAME_LOWER", "strides": [2, 2]}),
    (11, "Conv", {"auto_pad": "SAME_UPPER", "strides": [3, 2]}),
    (11, "Conv", {"auto_pad": "VALID"}),
    (11, "Conv", {"pads": [0, 1, 2, 1], "strides": [1, 2]}),
    (10, "MaxPool", {"kernel_shape": [3, 2], "strides": [2, 2], "ceil_mode": 1}),
    (12, "MaxPool", {"kernel_shape": [2, 2], "dilations": [2, 2], "pads": [1, 0, 1, 0]}),
    (10, "AveragePool", {"kernel_shape": [3, 3], "strides": [2, 2], "ceil_mode": 1, "pads": [1, 1, 1, 1]}),
    (10, "AveragePool", {"kernel_shape": [3, 3], "pads": [1, 0, 1, 1], "count_include_pad": 1}),
    (11, "AveragePool", {"kernel_shape": [2, 2], "auto_pad": "SAME_UPPER"}),
    (11, "LpPool", {"kernel_shape": [2, 2], "p": 3, "strides": [2, 1]}),
    (11, "ConvTranspose", {"strides": [2, 2], "pads": [0, 1, 1, 0], "output_padding": [1, 0]}),
    (11, "ConvTranspose", {"strides": [3, 2], "output_shape": [15, 9]}),
    (11, "ConvTranspose", {"strides": [2, 2], "auto_pad": "SAME_UPPER"}),
    (1, "GlobalMaxPool", {}),
    (2, "GlobalLpPool", {"p": 1}),
]


@pytest.mark.parametrize(("opset", "op", "attributes"), WINDOWS)
def test_windows(opset: int, op: str, attributes: dict[str, Any]) -> None:
    inputs = "x w b" if op.startswith("Conv") else "x"
    weight = random(4, 3, 3, 2) if op == "Conv" else random(3, 4, 3, 2)
    constants = {"w": weight, "b": random(4)} if op.startswith("Conv") else {}
    proto = model([node(op, inputs, "y", **attributes)], {"x": (2, 3, 5, 6)}, ["y"], constants, opset=max(opset, 7))
    same_as_onnxruntime(proto, x=random(2, 3, 5, 6))


def test_batch_norm_in_training_mode_updates_its_statistics() -> None:
    constants = {"s": random(3), "b": random(3), "m": random(3), "v": np.abs(random(3, seed=1))}
    nodes = [node("BatchNormalization", "x s b m v", "y m2 v2", "bn", training_mode=1, momentum=0.75)]
    proto = model(nodes, {"x": (2, 3, 4)}, ["y", "m2", "v2"], constants, opset=15)
    graph = from_onnx(proto)
    x = random(2, 3, 4)
    got = run(graph, x=x)
    mean, variance = x.mean((0, 2)), x.var((0, 2))
    np.testing.assert_allclose(got["m2"], 0.75 * constants["m"] + 0.25 * mean, rtol=1e-5)
    np.testing.assert_allclose(got["v2"], 0.75 * constants["v"] + 0.25 * variance, rtol=1e-5)
    centred = (x - mean[:, None]) / np.sqrt(variance[:, None] + 1e-5)
    np.testing.assert_allclose(
        got["y"], centred * constants["s"][:, None] + constants["b"][:, None], rtol=1e-4, atol=1e-5
    )
    assert {old.name: new.name for old, new in graph.updates.items()} == {"m": "m2", "v": "v2"}


@pytest.mark.parametrize("wrap", [False, True])
def test_sequences_are_refused_by_name(wrap: bool) -> None:
    made = [node("SequenceConstruct", "c c", "s", "both"), *([node("Optional", "s", "o", "maybe")] if wrap else [])]
    proto = model(made, {}, [made[-1].output[0]], {"c": random(3)})
    told = r"node 'maybe' \(Optional\).*reads a sequence" if wrap else r"the graph gives 's', a sequence of tensors"
    with pytest.raises(UnsupportedError, match=told):
        from_onnx(proto)


def test_an_output_declared_as_no_tensor_is_refused() -> None:
    proto = model([node("Neg", "x", "y")], {"x": (3,)}, ["y"])
    tensor = helper.make_tensor_type_proto(TensorProto.FLOAT, [3])
    proto.graph.output[0].type.CopyFrom(helper.make_optional_type_proto(tensor))
    with pytest.raises(UnsupportedError, match="output 'y' is declared as optional"):
        from_onnx(proto)
