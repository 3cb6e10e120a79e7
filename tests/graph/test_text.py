"""Graphs as text: what cannot be meant is refused, with its line or node."""

from __future__ import annotations

import math
import re

import pytest

from foreplan.errors import ModelError
from foreplan.graph import Builder, Fill, Kind, parse_graph
from foreplan.graph.types import tensor_type

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
    b = Builder("integers")
    c = b.store("c", tensor_type("int64[3]"), Kind.CONSTANT, Fill(math.nan))
    with pytest.raises(ModelError, match=r"the stored .*c.* cannot hold fill\(nan\)"):
        b.finish({"y": c})
