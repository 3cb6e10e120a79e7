"""Segments by name: scopes, patterns and ranges, in traced models and in ONNX files of every manner of naming."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

import foreplan as fp
from foreplan.base.errors import UsageError
from foreplan.lower import Program
from foreplan.lower.segments import backward_actions, find_segments, forward_actions


def traced() -> Program:
    def model(x: fp.Tensor) -> fp.Tensor:
        for i in range(3):
            with fp.nn.scope(f"h.{i}"):
                x = fp.nn.sigmoid(fp.nn.linear(x, 8, name="up"))
                x = fp.nn.sigmoid(fp.nn.linear(x, 8, name="down"))
        return fp.nn.linear(x, 3, name="head")

    return lowered(fp.trace(model, fp.spec((4, 8))))


def lowered(graph: fp.Graph) -> Program:
    return fp.lower(fp.differentiate(graph, fp.losses.cross_entropy, fp.optim.SGD(0.1)))


def imported(node: str, value: str) -> Program:
    """Three convolutions and activations; `node` and `value` make the names from a layer's `{i}` and an op's `{op}`."""
    nodes, before = [], "x"
    for i in range(3):
        for op, extra in (("Conv", [f"w{i}"]), ("Sigmoid", [])):
            after = value.format(i=i, op=op)
            kernel = {"kernel_shape": [3, 3], "pads": [1] * 4} if extra else {}
            nodes.append(helper.make_node(op, [before, *extra], [after], name=node.format(i=i, op=op), **kernel))
            before = after
    nodes += [
        helper.make_node("GlobalAveragePool", [before], ["pooled"]),
        helper.make_node("Flatten", ["pooled"], ["y"]),
    ]
    weights = [numpy_helper.from_array(np.ones((3, 3, 3, 3), np.float32), f"w{i}") for i in range(3)]
    ends = [
        helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, shape)
        for name, shape in (("x", [2, 3, 8, 8]), ("y", [2, 3]))
    ]
    graph = helper.make_graph(nodes, "net", ends[:1], ends[1:], weights)
    return lowered(fp.from_onnx(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)))


def ops(program: Program, *entries: str) -> dict[str, list[str]]:
    """By segment, its matrix products and convolutions, by parameter."""
    found = {}
    for segment in find_segments(program, entries):
        reads = [program.values[v].name for index in segment.actions for v in program.actions[index].reads]
        found[segment.name] = [name for name in reads if name.endswith("weight") or name.startswith("w")]
    return found


def test_scopes_and_patterns() -> None:
    program = traced()
    blocks = {f"h.{i}": [f"h.{i}.up.weight", f"h.{i}.down.weight"] for i in range(3)}
    assert ops(program, "h.1") == {"h.1": blocks["h.1"]}
    assert ops(program, "h") == {"h": [weight for block in blocks.values() for weight in block]}
    assert ops(program, "h.*") == ops(program, "h.?") == ops(program, "h.0", "h.1", "h.2") == blocks
    assert ops(program, "h.[01]", "head") == {"h.0": blocks["h.0"], "h.1": blocks["h.1"], "head": ["head.weight"]}
    assert ops(program, "*.up") == {f"h.{i}.up": [f"h.{i}.up.weight"] for i in range(3)}
    assert ops(program, "h.0.down..h.1.up") == {"h.0.down..h.1.up": ["h.0.down.weight", "h.1.up.weight"]}
    assert [(s.name, s.entry) for s in find_segments(program, ["h.[01]", "head"])] == [
        ("h.0", "h.[01]"),
        ("h.1", "h.[01]"),
        ("head", "head"),
    ]
    names = {program.actions[index].name for s in find_segments(program, ["h"]) for index in s.actions}
    assert not any("grad" in name or "update" in name for name in names)


@pytest.mark.parametrize(
    ("node", "value", "entries"),
    [
        ("/layers/layers.{i}/{op}", "/layers/layers.{i}/{op}_output_0", ["/layers/layers.1", "layers/layers.2"]),
        ("{op}_{i}", "t{i}{op}", ["Conv_1..Sigmoid_1", "Conv_2..Sigmoid_2"]),
        ("", "block{i}/{op}", ["block1", "block2"]),
        ("", "block{i}/{op}", ["block[12]"]),
        ("", "{i}{op}", ["Conv_2..Sigmoid_3", "2Conv..2Sigmoid"]),
    ],
)
def test_onnx_names(node: str, value: str, entries: list[str]) -> None:
    assert list(ops(imported(node, value), *entries).values()) == [["w1"], ["w2"]]


def test_masks_are_of_the_segment_that_makes_what_they_ask() -> None:
    program = fp.compile(
        fp.models.build("resnet18:batch=2,size=64"), fp.losses.cross_entropy, fp.optim.SGD(0.1), remat="off"
    ).program
    forward = forward_actions(program)
    for entries in (["layer1", "layer2"], ["layer1..layer1", "layer2..layer2"]):
        found = find_segments(program, entries)
        assert all(list(segment.actions) == sorted(segment.actions) for segment in found)
        first, second = (set(segment.actions) for segment in found)
        assert not first & second
        masks = {i for i, action in enumerate(program.actions) if action.name.endswith("/mask")}
        assert masks & first and masks & second and not masks & forward
        for index in masks & (first | second):
            (made,) = program.producers[program.actions[index].reads[0]]
            assert {made, index} <= first or {made, index} <= second


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        (["h.7"], "'h.7'; there are 'h.2', 'h.1', 'h.0'"),
        (["hed"], "'hed'; there are 'head'"),
        (["0123456789"], "'0123456789'; there are 'h', 'h.0', 'h.0.up'"),
        (["h.0..hed"], "'hed', part of 'h.0..hed'; there are 'head'"),
        (["h.2..h.0"], "has 'h.0' before 'h.2'"),
        (["h", "h.1.up"], "'h.1.up/.*' is in two segments, 'h' and 'h.1.up'"),
        ([".."], "''"),
    ],
)
def test_names_that_cannot_be(entries: list[str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        find_segments(traced(), entries)


def test_there_must_be_a_loss() -> None:
    program = fp.lower(fp.inference(fp.models.build("mlp")))
    with pytest.raises(UsageError, match="this is inference"):
        find_segments(program, ["hidden0"])
    assert forward_actions(program) == set(range(len(program.actions))) and not backward_actions(program)
