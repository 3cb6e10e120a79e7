"""Sequences of tensors that are known at import, beside ONNX Runtime."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from foreplan.base.errors import ForeplanError
from foreplan.frontend.onnx import from_onnx
from tests.frontend.onnx.models import branch, info, model, node, random, same_as_onnxruntime

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


def a_loop(*nodes: onnx.NodeProto, outputs: str, first: str = "s") -> list[onnx.NodeProto]:
    """Three steps that carry a sequence `s` and a tensor `h`."""
    inputs = [info("i", (), TensorProto.INT64), info("go_in", (), TensorProto.BOOL)]
    inputs += [helper.make_value_info("carried", SEQUENCE), info("h", (2, 3))]
    body = branch("body", node("Identity", "go_in", "go"), *nodes, inputs=tuple(inputs), outputs=outputs)
    body.output[1].type.CopyFrom(SEQUENCE)
    return [node("Loop", f"three yes {first} x", "t end", "loop", body=body)]


SEQUENCE = helper.make_sequence_type_proto(helper.make_tensor_type_proto(TensorProto.FLOAT, None))
STEP = node("Tanh", "h", "h_out"), node("SequenceInsert", "carried h_out", "longer")
STEPS = {**NUMBERS, "three": np.array(3), "yes": np.array(True)}


@pytest.mark.parametrize("first", ["empty", "of two"])
def test_a_loop_carries_a_sequence(first: str) -> None:
    """As EmbeddingBag is exported: a row is added in each step, and all are joined behind the loop."""
    made = helper.make_node("SequenceEmpty", [], ["s"])
    nodes = [
        made if first == "empty" else node("SequenceConstruct", "x x", "s"),
        *a_loop(*STEP, outputs="go longer h_out"),
    ]
    nodes.append(node("ConcatFromSequence", "t", "y", axis=0))
    graph = same_as_onnxruntime(model(nodes, {"x": (2, 3)}, ["y", "end"], STEPS), x=random(2, 3))
    assert graph.outputs["y"].shape == (6 if first == "empty" else 10, 3)


def test_a_loop_takes_out_of_a_sequence_what_it_reads() -> None:
    read = node("SequenceAt", "carried zero", "a"), node("SequenceErase", "carried zero", "shorter")
    nodes = [node("SplitToSequence", "z two", "s"), *a_loop(*read, node("Add", "h a", "sum"), outputs="go shorter sum")]
    nodes.append(node("SequenceAt", "t zero", "rest"))
    proto = model(nodes, {"x": (2, 3), "z": (8, 3)}, ["end", "rest"], {**STEPS, "zero": np.array(0)})
    same_as_onnxruntime(proto, x=random(2, 3), z=random(8, 3))


def test_a_branch_gives_a_sequence() -> None:
    branches = {}
    for name, made in (("then_branch", "SequenceConstruct"), ("else_branch", "SequenceInsert")):
        read = "x x" if name == "then_branch" else "s x"
        branches[name] = branch(name, node(made, read, "t"), outputs="t")
        branches[name].output[0].type.CopyFrom(SEQUENCE)
    for yes in (True, False):
        nodes = [node("SequenceConstruct", "x x x", "s"), node("If", "yes", "u", **branches)]
        nodes.append(node("ConcatFromSequence", "u", "y", axis=0))
        proto = model(nodes, {"x": (2, 3)}, ["y"], {"yes": np.array(yes)})
        assert same_as_onnxruntime(proto, x=random(2, 3)).outputs["y"].shape == (4 if yes else 8, 3)


def test_a_map_over_a_sequence() -> None:
    inputs = (info("row", (2, 3)), info("shift", (2, 3)))
    body = branch("body", node("Add", "row shift", "z"), inputs=inputs, outputs="z")
    nodes = [node("SequenceConstruct", "x r x", "s"), node("SequenceMap", "s x", "t", body=body)]
    nodes = [node("Relu", "x", "r"), *nodes, node("ConcatFromSequence", "t", "y", axis=0)]
    same_as_onnxruntime(model(nodes, {"x": (2, 3)}, ["y"], {}), x=random(2, 3))


@pytest.mark.parametrize(
    ("read", "outputs", "message"),
    [
        ("three yes s x", "go longer h_out carried", "what its body gives for each step must be a tensor"),
        ("s yes s x", "go longer h_out", "its number of steps must be a tensor"),
        ("three s s x", "go longer h_out", "its condition must be a tensor"),
        ("three yes s x", "carried longer h_out", "the condition that its body gives must be a tensor"),
    ],
)
def test_sequences_where_loops_take_tensors_are_told(read: str, outputs: str, message: str) -> None:
    (loop,) = a_loop(*STEP, outputs=outputs)
    loop.input[:] = read.split()
    loop.output[:] = ["t", "end", "rows"][: len(outputs.split()) - 1]
    nodes = [node("SequenceConstruct", "x x", "s"), loop, node("ConcatFromSequence", "t", "y", axis=0)]
    with pytest.raises(ForeplanError, match=rf"node 'loop' \(Loop\).*{message}"):
        from_onnx(model(nodes, {"x": (2, 3)}, ["y"], STEPS))
