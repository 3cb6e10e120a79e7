"""Graphs as text: what cannot be meant is refused, with its line or node."""

from __future__ import annotations

import math
import re

import pytest

from foreplan.base.errors import ModelError
from foreplan.graph import Fill, GraphBuilder, Kind, parse_graph
from foreplan.graph.registry import parse_op
from foreplan.graph.text import parse_init
from foreplan.graph.types import tensor_type
from foreplan.ops.join import Pad
from foreplan.ops.map import Map

INTEGERS = """graph %integers
constant %c: int64[3] = {init}
%y: {dtype}[3] = map(exprs=({expr!r},)) [%c] as %compare
output %y = %y
"""


@pytest.mark.parametrize(
    ("init", "expr", "message"),
    [
        ("fill(nan)", "(a0 + 1)", "line 2: 'fill(nan)' does not describe content"),
        ("fill(0.5)", "(a0 + 1)", "line 2: 'fill(0.5)' does not describe content"),
        ("array([10000000000000000000000])", "(a0 + 1)", "does not describe content"),
        ("array([1, 2, 3])", "bitand(a0, nan)", "node 'compare' of graph 'integers': map: bitand"),
    ],
)
def test_text_with_numbers_that_are_no_integers(init: str, expr: str, message: str) -> None:
    with pytest.raises(ModelError, match=re.escape(message)):
        parse_graph(INTEGERS.format(init=init, dtype="int64", expr=expr))


def test_a_constant_of_integers_cannot_be_filled_with_nan() -> None:
    b = GraphBuilder("integers")
    c = b.store("c", tensor_type("int64[3]"), Kind.CONSTANT, Fill(math.nan))
    with pytest.raises(ModelError, match=r"the stored .*c.* cannot hold fill\(nan\)"):
        b.finish({"y": c})


@pytest.mark.parametrize("number", ["inf", "-inf", "nan"])
def test_numbers_without_literals_are_read_back(number: str) -> None:
    op = Pad(((1, 0),), float(number))
    assert str(parse_op(str(op))) == str(op) == f"pad(pads=((1, 0),), value={number})"
    init = Fill(float(number))
    assert str(parse_init(str(init), tensor_type("float32[3]"), "here")) == str(init)


@pytest.mark.parametrize(
    "text",
    [
        "softmax(axis='1')",
        "softmax(axis=1.0)",
        "softmax(axis=True)",
        "softmax(axis=(1,))",
        f"softmax(axis={1 << 70})",
        "reduce(how='sum', axes=[0], keepdims=False)",
        "reduce(how='sum', axes=0, keepdims=False)",
        "reduce(how='sum', axes=(0, None), keepdims=False)",
        "reduce(how=1, axes=(0,), keepdims=False)",
        "reduce(how='sum', axes=(0,), keepdims=1)",
        "pad(pads=((1,),), value=0.0)",
        "pad(pads=((1, 2, 3),), value=0.0)",
        "pad(pads=((1, 2),), value='0')",
        "map(exprs='a0')",
        "map(exprs=(b'a0',))",
        "random(distribution='uniform', shape=(3,), dtype='float33', stream=0)",
        "softmax(axis=0, axis=1)",
        "softmax(1)",
        "softmax(**{})",
        "softmax(axis=" + "(" * 500 + "1" + ")" * 500 + ")",
        "softmax(axis=" + "-" * 100_000 + "1)",
        "softmax(axis=1\0)",
    ],
)
def test_attributes_have_the_types_that_the_op_states(text: str) -> None:
    with pytest.raises(ModelError):
        parse_op(text)


@pytest.mark.parametrize(
    "text",
    [
        "fill('a')",
        "fill(None)",
        f"fill({10**400})",
        "normal(std='1')",
        "normal(std=nan)",
        "normal(std=1.0, mean=(1,))",
        "uniform(low=0.0, high=inf)",
        "random_seed('1')",
        "random_seed(alike=0)",
    ],
)
def test_first_contents_have_numbers(text: str) -> None:
    with pytest.raises(ModelError, match="does not describe content"):
        parse_init(text, tensor_type("float32[3]"), "here")


NAMES = [
    "two\nlines", "a\r\nb", "\x0b\x0c\x1c\x1d\x1e\x85\u2028\u2029", "\x00", "\x1b[31m", "\\n", "\\u000a", 'a"b\\"',
    "x: float32[2] = relu() [%x] as %y", '"] as %z', ", %y: float32[2]", " lead ", "#", "caf\u00e9 \U0001f600",
]  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_any_name_is_read_back(name: str) -> None:
    """Of the graph, an input, a stored value, a node and what it gives, and a result."""
    b = GraphBuilder(name)
    x = b.input(f"{name}x", tensor_type("float32[2]"))
    w = b.store(f"{name}w", tensor_type("float32[2]"), Kind.PARAMETER, Fill(0.5))
    (y,) = b.node(Map(("(a0 + a1)",)), x, w, name=name, outputs=[name])
    graph = b.finish({name: y}, {w: y})
    again = parse_graph(graph.as_text())
    assert again.as_text() == graph.as_text()
    assert (again.name, list(again.outputs), again.nodes[0].name) == (name, [name], name)
    assert [value.name for value in (*again.inputs, *again.stored)] == [f"{name}x", f"{name}w"]
