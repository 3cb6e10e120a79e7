"""Binding inputs to static shapes, and batches other than the one a model was exported with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
import pytest

from foreplan.base.errors import ShapeError, UsageError
from foreplan.frontend import from_onnx
from tests.frontend.onnx.models import by_onnxruntime, info, model, node, random, run


def add(**inputs: Sequence[Any] | None) -> onnx.ModelProto:
    return model([node("Sum", " ".join(inputs), "y", "total")], inputs, ["y"])


def test_symbols_are_bound_by_shape_and_by_batch() -> None:
    assert from_onnx(add(x=("n", 3)), shapes={"x": (4, 3)}).outputs["y"].shape == (4, 3)
    assert from_onnx(add(x=("n", 3)), batch=4).outputs["y"].shape == (4, 3)
    assert from_onnx(add(x=(None, 3)), batch=4).outputs["y"].shape == (4, 3)
    assert from_onnx(add(x=("n", "t")), shapes={"x": (2, 5)}, batch=2).outputs["y"].shape == (2, 5)
    assert from_onnx(add(x=None), shapes={"x": (2, 5)}).outputs["y"].shape == (2, 5)
    assert from_onnx(add(x=(-1, 3)), batch=2).outputs["y"].shape == (2, 3)


def test_a_symbol_is_the_same_number_everywhere() -> None:
    graph = from_onnx(add(x=("n", "t"), z=("n", "t")), shapes={"x": (2, 5)})
    assert [value.shape for value in graph.inputs] == [(2, 5), (2, 5)]
    with pytest.raises(ShapeError, match=r"axis 1 of input 'z' is 6, but its size 't' is 5 by .*axis 1 of input 'x'"):
        from_onnx(add(x=("n", "t"), z=("n", "t")), shapes={"x": (2, 5), "z": (2, 6)})


WORDS = ["none", "null", "nan", "unk", "unknown", "undefined", "any", "dyn", "dynamic", "", "", "", ""]
SIGNS = ["?", "-1", "__12", "*", " ", "0", "_3", "...", "-", "9"]


@pytest.mark.parametrize("seed", range(12))
def test_signs_for_an_unknown_size_are_no_symbols(seed: int) -> None:
    """Drawn signs stand on several axes of two inputs, beside a real symbol that both share."""
    draw = np.random.default_rng(seed)
    word = str(draw.choice(WORDS))
    sign = str(draw.choice([word, word.upper(), word.title()])) + str(draw.choice(SIGNS if not word else ["", *SIGNS]))
    real = str(draw.choice(["N", "batch", "seq", "any_length", "unknown_rows", "s77", "x_dim_0"]))
    first, second = [sign, real, 3, sign], [sign, sign, real]
    sizes = [int(n) for n in draw.permutation(np.arange(2, 7))]
    x, z = random(sizes[0], sizes[1], 3, sizes[2]), random(sizes[3], sizes[4], sizes[1])
    nodes = [node("GlobalAveragePool", "x", "a"), node("ReduceMean", "z", "b", keepdims=0), node("Add", "a b", "y")]
    proto = model(nodes, {"x": first, "z": second}, ["y"])
    graph = from_onnx(proto, shapes={"x": x.shape, "z": z.shape})
    np.testing.assert_allclose(run(graph, x=x, z=z)["y"], by_onnxruntime(proto, x=x, z=z)["y"], rtol=1e-5, atol=1e-6)
    assert not graph.notes
    with pytest.raises(ShapeError, match=f"but its size '{real}' is"):
        from_onnx(proto, shapes={"x": x.shape, "z": (*z.shape[:2], sizes[1] + 1)})


def test_one_shape_that_contradicts_a_symbol_counts_and_is_told() -> None:
    """ONNX Runtime computes with what it is given; the symbol then binds no other input."""
    pool = [node("GlobalAveragePool", "x", "p"), node("ReduceSum", "z", "s", keepdims=0), node("Add", "p s", "y")]
    proto = model(pool, {"x": ("n", 3, "n", "n"), "z": ("n",)}, ["y"])
    graph = from_onnx(proto, shapes={"x": (2, 3, 4, 6), "z": (5,)})
    (note,) = graph.notes
    assert "several axes of input 'x' 'n'" in note and "[2, 3, 4, 6]" in note
    x, z = random(2, 3, 4, 6), random(5)
    np.testing.assert_allclose(run(graph, x=x, z=z)["y"], by_onnxruntime(proto, x=x, z=z)["y"], rtol=1e-5, atol=1e-6)
    with pytest.raises(ShapeError, match=r"open: 'z' is float32\[\?\]"):
        from_onnx(proto, shapes={"x": (2, 3, 4, 6)})
    assert not from_onnx(proto, shapes={"x": (5, 3, 5, 5)}).notes


@pytest.mark.parametrize(
    ("shape", "shapes", "batch", "error", "message"),
    [
        ((2, 3), {"x": (2, 4)}, None, ShapeError, "axis 1 of input 'x' is 3 in the file, and shapes= gives 4"),
        ((2, 3), {"x": (4, 3)}, None, ShapeError, r"axis 0 of input 'x' is 2 .* batch=4 \(--batch 4\)"),
        ((2, 3), {"x": (2, 3, 1)}, None, ShapeError, "input 'x' has 2 axes"),
        (("n", 3), {"x": (4, 3)}, 5, ShapeError, "axis 0 of input 'x' is 4 in shapes= and 5 in batch="),
        ((2, 3), {"z": (2, 3)}, None, UsageError, "no input 'z' .* its inputs are x"),
        ((2, 3), {"x": (2, -3)}, None, UsageError, "an extent for input 'x' must be a whole number"),
        ((2, 3), {"x": (2, 1.5)}, None, UsageError, "an extent for input 'x' must be a whole number"),
        ((2, 3), None, 0, UsageError, "batch must be a whole number of at least 1"),
        (None, None, 2, ShapeError, "'x' is float32 without a shape, not even a number of axes"),
    ],
)
def test_contradictions_are_named(shape: Any, shapes: Any, batch: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        from_onnx(add(x=shape), shapes=shapes, batch=batch)


def test_initializers_listed_as_inputs_are_no_inputs() -> None:
    weight = random(3, 4)
    proto = model([node("MatMul", "x w", "y")], {"x": ("n", 3), "w": (3, 4)}, ["y"], {"w": weight})
    graph = from_onnx(proto, batch=2)
    assert [value.name for value in graph.inputs] == ["x"]
    x = random(2, 3)
    np.testing.assert_allclose(run(graph, x=x)["y"], x @ weight, rtol=1e-5, atol=1e-6)


def relu(declared: Sequence[Any] | None, dtype: int = onnx.TensorProto.FLOAT, x: Sequence[Any] = (2, 3)) -> Any:
    proto = model([node("Relu", "x", "y")], {"x": x}, ["y"])
    proto.graph.output[0].CopyFrom(info("y", declared, dtype))
    return proto


@pytest.mark.parametrize(
    ("declared", "note"),
    [
        ((2, 4), "output 'y' is declared with the shape [2, 4] and computed as [2, 3]; the computed shape counts"),
        (("n", 4), "output 'y' is declared with the shape [n, 4] and computed as [2, 3]; the computed shape counts"),
        ((None, 4), "output 'y' is declared with the shape [?, 4] and computed as [2, 3]; the computed shape counts"),
        (
            (2, 3, 1),
            "output 'y' is declared with the shape [2, 3, 1] and computed as [2, 3]; the computed shape counts",
        ),
        ((), "output 'y' is declared with the shape [] and computed as [2, 3]; the computed shape counts"),
    ],
)
def test_outputs_that_contradict_their_declared_shape_are_noted(declared: Any, note: str) -> None:
    """ONNX Runtime warns and gives what is computed; the shapes are those that it gives."""
    proto, x = relu(declared), random(2, 3)
    graph = from_onnx(proto)
    assert [text.partition(": ")[2] for text in graph.notes] == [note]
    assert graph.outputs["y"].shape == by_onnxruntime(proto, x=x)["y"].shape == (2, 3)


@pytest.mark.parametrize("declared", [None, (2, 3), ("n", 3), ("n", "m"), (None, None), (-1, 3), (0, 3)])
def test_outputs_with_their_shape_or_symbols_are_fine(declared: Any) -> None:
    assert not from_onnx(relu(declared)).notes
    assert not from_onnx(relu(declared, x=("n", "m")), shapes={"x": (2, 3)}).notes


def test_a_declared_shape_is_that_of_the_batch_exported() -> None:
    assert not from_onnx(relu((2, 3)), batch=5).notes
    (note,) = from_onnx(relu((5, 3)), batch=5).notes
    assert "is declared with the shape [5, 3] and computed as [2, 3]" in note


def test_an_output_of_another_element_type_is_refused() -> None:
    proto = relu((2, 3), onnx.TensorProto.INT64)
    with pytest.raises(ShapeError, match="output 'y' is declared as int64 and computed as float32"):
        from_onnx(proto)
    with pytest.raises(Exception, match="does not match expected type"):
        by_onnxruntime(proto, x=random(2, 3))


# Models exported with a fixed batch of 1 or 2: nodes, inputs, constants, and how many nodes are rewritten.
def attention_block(batch: int) -> onnx.ModelProto:
    nodes = [
        node("MatMul", "x w", "p"),
        node("Reshape", "p heads", "h"),
        node("Transpose", "h", "t", perm=[2, 0, 1, 3]),
        node("Reshape", "t merged", "m"),
        node("Reshape", "m apart", "a"),
        node("Transpose", "a", "b", perm=[1, 2, 0, 3]),
        node("Reshape", "b flat", "f"),
        node("Softmax", "f", "s"),
        node("Reshape", "s back", "y"),
    ]
    constants = {
        "w": random(6, 8),
        "heads": np.array([batch, 5, 2, 4]),
        "merged": np.array([2 * batch, 5, 4]),
        "apart": np.array([2, batch, 5, 4]),
        "flat": np.array([batch * 5, -1]),
        "back": np.array([batch, 5, 8]),
    }
    return model(nodes, {"x": (batch, 5, 6)}, ["y"], constants)


def class_token(batch: int) -> onnx.ModelProto:
    nodes = [
        node("Expand", "token shape", "e"),
        node("Concat", "e x", "c", axis=1),
        node("Gather", "c zero", "g", axis=1),
        node("Slice", "g starts ends axes", "y"),
    ]
    constants = {
        "token": random(1, 1, 4),
        "shape": np.array([batch, 1, 4]),
        "zero": np.array(0),
        "starts": np.array([0]),
        "ends": np.array([batch]),
        "axes": np.array([0]),
    }
    return model(nodes, {"x": (batch, 3, 4)}, ["y"], constants)


def image_classifier(batch: int) -> onnx.ModelProto:
    nodes = [
        node("Conv", "x w", "c", pads=[1, 1, 1, 1]),
        node("ReduceMean", "c", "m", keepdims=0, axes=[2, 3]),
        node("Unsqueeze", "m last", "u"),
        node("Squeeze", "u last", "q"),
        node("Reshape", "q flat", "f"),
        node("Gemm", "f v", "y"),
    ]
    constants = {"w": random(4, 3, 3, 3), "last": np.array([2]), "flat": np.array([batch, -1]), "v": random(4, 5)}
    return model(nodes, {"x": (batch, 3, 6, 6)}, ["y"], constants, opset=13)


def recurrent(batch: int) -> onnx.ModelProto:
    nodes = [
        node("Transpose", "x", "t", perm=[1, 0, 2]),
        node("LSTM", "t w r - - h c", "s", hidden_size=4),
        node("Squeeze", "s one", "q"),
        node("Transpose", "q", "b", perm=[1, 0, 2]),
        node("Reshape", "b flat", "y"),
    ]
    constants = {
        "w": random(1, 16, 3),
        "r": random(1, 16, 4),
        "h": np.zeros((1, batch, 4), np.float32),
        "c": random(1, 1, 4) if batch == 1 else np.zeros((1, batch, 4), np.float32),
        "one": np.array([1]),
        "flat": np.array([batch, 20]),
    }
    return model(nodes, {"x": (batch, 5, 3)}, ["y"], constants)


def upsampled(batch: int) -> onnx.ModelProto:
    nodes = [node("Resize", "x - - sizes", "r", mode="linear"), node("Reshape", "r flat", "y")]
    constants = {"sizes": np.array([batch, 2, 7, 4]), "flat": np.array([batch, -1])}
    return model(nodes, {"x": (batch, 2, 3, 4)}, ["y"], constants)


def within(batch: int) -> onnx.ModelProto:
    """One scale for all sizes, by that which needs the smallest: the batch's, which is 1."""
    resize = node("Resize", "x - - sizes", "y", mode="linear", axes=[0, 3], keep_aspect_ratio_policy="not_larger")
    return model([resize], {"x": (batch, 2, 3, 4)}, ["y"], {"sizes": np.array([batch, 7])})


@pytest.mark.parametrize("exported", [1, 2])
@pytest.mark.parametrize("make", [attention_block, class_token, image_classifier, recurrent, upsampled, within])
@pytest.mark.parametrize("batch", [4, 6])
def test_a_fixed_batch_is_replaced(make: Any, exported: int, batch: int) -> None:
    proto = make(exported)
    graph = from_onnx(proto, batch=batch)
    x = random(*[batch, *(dim.dim_value for dim in proto.graph.input[0].type.tensor_type.shape.dim[1:])])
    got = run(graph, x=x)["y"]
    # The model as exported, by ONNX Runtime, on one exported batch after the other.
    parts = [by_onnxruntime(proto, x=x[i : i + exported])["y"] for i in range(0, batch, exported)]
    np.testing.assert_allclose(got, np.concatenate(parts), rtol=1e-4, atol=1e-5)
    assert graph.notes and all(f"batch {exported} → {batch}" in note for note in graph.notes)


def test_the_exported_batch_needs_no_change() -> None:
    graph = from_onnx(attention_block(2), batch=2)
    assert graph.outputs["y"].shape == (2, 5, 8) and not graph.notes


@pytest.mark.parametrize(
    ("nodes", "constants", "culprit"),
    [
        ([node("Add", "x c", "y", "bias")], {"c": random(2, 3)}, "bias"),
        ([node("Slice", "x one two", "y", "part")], {"one": np.array([1]), "two": np.array([2])}, "part"),
        ([node("Gather", "x one", "y", "pick", axis=0)], {"one": np.array(1)}, "pick"),
        ([node("Split", "x s", "y z", "halves", axis=0)], {"s": np.array([1, 1])}, "halves"),
        ([node("Concat", "x c", "y", "more", axis=0)], {"c": random(1, 3)}, "more"),
        ([node("Resize", "x - - s", "y", "twice")], {"s": np.array([4, 3])}, "twice"),
        ([node("Squeeze", "x", "y", "drop")], {}, ""),
        ([node("Reshape", "x s", "y", "odd")], {"s": np.array([3, 2])}, "odd"),
    ],
)
def test_a_node_that_fixes_the_batch_is_named(nodes: Any, constants: Any, culprit: str) -> None:
    proto = model(nodes, {"x": (2, 3)}, ["y"], constants)
    if not culprit:
        assert from_onnx(proto, batch=4).outputs["y"].shape == (4, 3)
        return
    with pytest.raises(ShapeError, match=f"node '{culprit}'.*fixes the batch"):
        from_onnx(proto, batch=4)


def test_a_reshape_without_room_for_the_batch_is_named() -> None:
    proto = model([node("Reshape", "x s", "y", "mix")], {"x": (6, 4)}, ["y"], {"s": np.array([4, 6])})
    with pytest.raises(ShapeError, match=r"node 'mix'.*fixes the batch"):
        from_onnx(proto, batch=5)


def test_inputs_with_different_fixed_batches_are_refused() -> None:
    with pytest.raises(ShapeError, match="'x' at 2, 'z' at 1"):
        from_onnx(add(x=(2, 3), z=(1, 3)), batch=4)


def test_a_batch_that_no_reshape_can_follow_is_named() -> None:
    """A tensor within a branch has the name of an input, and another rank; an axis of no elements holds no item."""
    body = onnx.helper.make_graph([node("Relu", "k", "z")], "body", [], [onnx.ValueInfoProto(name="z")])
    chosen = node("If", "yes", "w", "choice", then_branch=body, else_branch=body)
    for shape, name in (((2, 3), "choice/z"), ((2, 0), "x")):
        constants = {"to": np.array([-1, 3]), "k": random(5), "yes": np.array(True)}
        proto = model([node("Reshape", f"{name} to", "y", "mix"), chosen], {name: shape}, ["y", "w"], constants)
        with pytest.raises(ShapeError, match=r"node 'mix'.*fixes the batch"):
            from_onnx(proto, batch=4)
