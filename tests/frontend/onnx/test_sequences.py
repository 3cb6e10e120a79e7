"""Sequences of tensors that are known at import, beside ONNX Runtime."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import helper

from foreplan.errors import ForeplanError
from foreplan.frontend.onnx import from_onnx
from tests.frontend.onnx.models import model, node, random, same_as_onnxruntime

NUMBERS = {"one": np.array(1), "last": np.array(-1), "two": np.array(2), "sizes": np.array([1, 3, 2])}


@pytest.mark.parametrize("axis", [0, 1, -1])
@pytest.mark.parametrize(
    "split, keepdims", [("two", 1), ("sizes", 1), ("", 1), ("", 0)], ids=["of 2", "of sizes", "of 1", "without axis"]
)
def test_parts_of_a_tensor(split: str, keepdims: int, axis: int) -> None:
    cut = helper.make_node("SplitToSequence", ["x", split] if split else ["x"], ["s"], axis=axis, keepdims=keepdims)
    nodes = [cut, node("SequenceAt", "s one", "a"), node("SequenceAt", "s last", "b"), node("SequenceLength", "s", "n")]
    nodes += [node("ReduceSum", "b", "c", keepdims=0), node("Add", "a c", "y")]
    same_as_onnxruntime(model(nodes, {"x": (6, 6, 6)}, ["y"], NUMBERS), x=random(6, 6, 6))


@pytest.mark.parametrize("new_axis", [0, 1])
@pytest.mark.parametrize("axis", [0, 1, -1])
@pytest.mark.parametrize("place", ["one", "two", "last"])
def test_a_sequence_is_made_changed_and_joined(new_axis: int, axis: int, place: str) -> None:
    nodes = [
        node("Relu", "x", "r"),
        node("SequenceConstruct", "x r", "s"),
        node("Neg", "x", "m"),
        node("SequenceInsert", f"s m {place}", "t"),
        node("SequenceInsert", "t x", "u"),
        node("SequenceErase", f"u {place}", "v"),
        node("Identity", "v", "w"),
        node("ConcatFromSequence", "w", "y", axis=axis, new_axis=new_axis),
    ]
    same_as_onnxruntime(model(nodes, {"x": (2, 3)}, ["y"], NUMBERS), x=random(2, 3))


def test_an_empty_sequence_is_filled() -> None:
    nodes = [
        helper.make_node("SequenceEmpty", [], ["e"]),
        node("SequenceInsert", "e x", "s"),
        node("SequenceInsert", "s x", "t"),
        node("SequenceErase", "t", "u"),
        node("SequenceAt", "u last", "y"),
    ]
    same_as_onnxruntime(model(nodes, {"x": (2, 3)}, ["y"], NUMBERS), x=random(2, 3))


def test_parts_of_a_shape_stay_known() -> None:
    nodes = [
        node("Shape", "x", "s"),
        node("SplitToSequence", "s", "p", axis=0),
        node("SequenceAt", "p one", "a"),
        node("SequenceAt", "p last", "b"),
        node("Concat", "a b zero", "t", axis=0),
        node("Reshape", "x t", "y"),
    ]
    constants = {**NUMBERS, "zero": np.array([-1])}
    graph = same_as_onnxruntime(model(nodes, {"x": (2, 3, 4)}, ["y"], constants), x=random(2, 3, 4))
    assert graph.outputs["y"].shape == (3, 4, 2)


@pytest.mark.parametrize(
    ("nodes", "message"),
    [
        (
            [node("SequenceConstruct", "x x", "s"), node("SequenceAt", "s two", "y")],
            "place 2 is outside of a sequence of 2",
        ),
        ([node("SplitToSequence", "x sizes", "s"), node("SequenceAt", "s one", "y")], r"\[1, 3, 2\] do not add up"),
        ([node("SequenceAt", "x one", "y")], "must be a sequence, and is a tensor"),
        ([node("SequenceConstruct", "x", "s"), node("Relu", "s", "y")], "reads a sequence of tensors"),
        (
            [
                node("SequenceConstruct", "x", "s"),
                node("SequenceConstruct", "s", "t"),
                node("SequenceAt", "t one", "y"),
            ],
            "is a sequence",
        ),
        ([node("SequenceConstruct", "x", "y")], "a sequence of tensors; foreplan gives tensors"),
        ([node("SplitToSequence", "x i", "s"), node("SequenceAt", "s one", "y")], "'i' must be known"),
    ],
)
def test_sequences_that_cannot_be_are_told(nodes: list, message: str) -> None:  # type: ignore[type-arg]
    proto = model(nodes, {"x": (2, 3), "i": ()}, ["y"], NUMBERS)
    proto.graph.input[1].type.tensor_type.elem_type = 7
    with pytest.raises(ForeplanError, match=message):
        from_onnx(proto)
