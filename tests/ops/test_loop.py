"""The op `loop`: its text, what it refuses, its cost, and its decomposition."""

from __future__ import annotations

import numpy as np
import pytest

import foreplan as fp
from foreplan.base.errors import ModelError, ShapeError
from foreplan.graph import Graph
from foreplan.graph.registry import parse_op
from foreplan.graph.text import parse_graph
from foreplan.graph.types import tensor_type
from foreplan.ops.loop import MOST_RUNS, Loop

BODY = """graph %body
input %c: float32[2]
input %x: float32[2]
input %w: float32[2]
%p: float32[2] = map(exprs=('(a0 * a1)',)) [%c, %w] as %p
%s: float32[2] = map(exprs=('(a0 + a1)',)) [%p, %x] as %s
output %c = %s
output %y = %p
"""
TYPES = [tensor_type(text) for text in ("float32[2]", "float32[5,2]", "float32[2]")]


def test_an_op_is_its_text_also_where_a_body_holds_a_loop() -> None:
    op = Loop(BODY, 5, 1, 1, reverse=True)
    assert parse_op(str(op)) == op and "\n" not in str(op)
    inner = "".join(f"input %{name}: {type}\n" for name, type in zip("cxw", TYPES))
    outer = f"graph %outer\n{inner}%d: float32[2], %ys: float32[5,2] = {op} [%c, %x, %w] as %in\n"
    outer += "output %d = %d\noutput %ys = %ys\n"
    nested = Loop(outer, 3, 1, 0)
    assert parse_op(str(nested)) == nested
    assert parse_graph(outer).as_text() == outer
    assert list(map(str, nested.infer(TYPES))) == ["float32[2]", "float32[3,5,2]"]


def test_types_and_cost() -> None:
    op = Loop(BODY, 5, 1, 1)
    outputs = op.infer(TYPES)
    assert list(map(str, outputs)) == ["float32[2]", "float32[5,2]"]
    with_history = Loop(BODY, 5, 1, 1, histories=(0,)).infer(TYPES)
    assert list(map(str, with_history)) == ["float32[2]", "float32[5,2]", "float32[6,2]"]
    cost = op.cost(TYPES, outputs)
    assert cost.flops == op.flops(TYPES, outputs) == 5 * (2 + 2)
    assert cost.nbytes == 5 * (3 * 8 + 3 * 8)


@pytest.mark.parametrize(
    "types, told",
    [
        (["float32[2]", "float32[5,2]"], "takes 3 inputs, and got 2"),
        (["float32[2]", "float32[4,2]", "float32[2]"], r"input 1 is float32\[4,2\], and the body of the loop takes"),
        (["float64[2]", "float32[5,2]", "float32[2]"], r"input 0 is float64\[2\]"),
    ],
)
def test_other_inputs_are_refused(types: list[str], told: str) -> None:
    with pytest.raises(ShapeError, match=told):
        Loop(BODY, 5, 1, 1).infer([tensor_type(text) for text in types])


def test_a_carry_that_changes_its_type_is_refused() -> None:
    body = BODY.replace("output %c = %s", "output %c = %n").replace(
        "output %y", "%n: float32[] = reduce(how='sum', axes=(0,)) [%s] as %n\noutput %y"
    )
    lines = body.splitlines()
    lines.insert(lines.index("output %c = %n"), lines.pop(next(i for i, x in enumerate(lines) if x.startswith("%n"))))
    with pytest.raises(ShapeError, match=r"changes from float32\[2\] to float32\[\]"):
        Loop("\n".join(lines) + "\n", 5, 1, 1).infer(TYPES)


@pytest.mark.parametrize(
    "text, told",
    [
        ("steps=0, carries=1, slices=1", "too many, or none"),
        (f"steps={MOST_RUNS}, carries=1, slices=1", "too many, or none"),
        ("steps=5, carries=3, slices=0", "does not fit"),
        ("steps=5, carries=-1, slices=0", "does not fit"),
        ("steps=5, carries=1, slices=3", "does not fit"),
        ("steps=5, carries=1, slices=1, kept=2", "does not fit"),
        ("steps=5, carries=1, slices=1, kept=-2", "does not fit"),
        ("steps=5, carries=1, slices=1, histories=(1,)", "does not fit"),
        ("steps=5, carries=1, slices=1, histories=(0, 0)", "does not fit"),
        ("steps=5.0, carries=1, slices=1", "is not of the type int"),
        ("carries=1, slices=1", "cannot be made"),
    ],
)
def test_hostile_attributes_are_refused(text: str, told: str) -> None:
    with pytest.raises(ModelError, match=told):
        parse_op(f"loop(body={BODY!r}, {text})")


@pytest.mark.parametrize(
    "body, told",
    [
        ("", "does not fit"),
        ("nonsense", "cannot read"),
        (BODY.replace("input %w: float32[2]", "parameter %w: float32[2] = fill(1.0)"), "no stored values"),
        (BODY + "loss %s\n", "must be a floating-point scalar"),
        (BODY.replace("[%c, %w]", "[%c, %s]"), "not defined above"),
        (BODY.replace("float32[2] = map(exprs=('(a0 + a1)'", "float32[3] = map(exprs=('(a0 + a1)'"), "but its outputs"),
    ],
)
def test_hostile_bodies_are_refused(body: str, told: str) -> None:
    with pytest.raises(ModelError, match=told):
        parse_op(f"loop(body={body!r}, steps=5, carries=1, slices=1)")


def test_the_graph_of_a_step_with_loops_is_its_text() -> None:
    graph = fp.trace(
        lambda xs, w: fp.scan(lambda c, x: (np.tanh(c * w + x), c), xs[0], xs)[1], fp.spec((6, 3)), fp.spec((3,))
    )
    step = fp.compile(graph, fp.losses.mean, None, gradients=["xs", "w"]).graph
    assert isinstance(step, Graph)
    assert [node.op.name for node in step.nodes].count("loop") == 2
    assert parse_graph(step.as_text()).as_text() == step.as_text()
