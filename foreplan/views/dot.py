"""Graphs in the DOT language (https://graphviz.org/doc/info/lang.html), for drawing by Graphviz."""

from __future__ import annotations

import os
from collections.abc import Iterator

from foreplan.base.files import write_atomically
from foreplan.graph.ir import Graph
from foreplan.graph.op import Node
from foreplan.graph.value import Kind, Value

# Fill colours on which black text reads well.
FILLS = {
    "forward": "#cfe3f7",
    "backward": "#ffd9bf",
    "update": "#d3efd0",
    "recompute": "#f6cfe6",
    "copy": "#e8dccb",
    "input": "#fff2b3",
}
STORED_FILL = "#9fc3e8"
HEAD = (
    '  graph [rankdir=TB, fontname="Helvetica", nodesep=0.25, ranksep=0.45];',
    '  node [fontname="Helvetica", fontsize=11, style=filled, color="#4a4a4a"];',
    '  edge [fontname="Helvetica", fontsize=9, color="#5a5a5a"];',
)
_STORED = {
    Kind.PARAMETER: STORED_FILL,
    Kind.FROZEN: "#bccbd8",
    Kind.STATE: "#d8c6ec",
    Kind.ACCUMULATOR: "#ffc9a3",
    Kind.BUFFER: "#e3e3c8",
    Kind.CONSTANT: "#e6e6e6",
}


def write_dot(path: str | os.PathLike[str], graph: Graph) -> None:
    """Write a graph as DOT text; `dot -Tsvg graph.dot` draws it.

    Raises:
        ForeplanError: the file cannot be written; see `write_atomically`.
    """
    write_atomically(path, dot_text(graph))


def dot_text(graph: Graph) -> str:
    """The graph as a `digraph`: boxes are nodes (blue forward, orange backward, green update), ellipses are inputs and
    stored values, edges carry types, dashed edges lead to the stored value that is replaced.
    """
    return "\n".join(_lines(graph)) + "\n"


def _lines(graph: Graph) -> Iterator[str]:
    yield f"digraph {quoted(graph.name)} {{"
    yield from HEAD
    source: dict[Value, str] = {}
    for i, value in enumerate((*graph.inputs, *graph.stored)):
        source[value] = f"v{i}"
        fill = _STORED.get(value.kind, FILLS["input"])
        label = quoted(f"{value.name}\n{value.type}")
        yield f'  v{i} [shape=ellipse, fillcolor="{fill}", label={label}];'
    new_content = set(graph.updates.values())
    for i, node in enumerate(graph.nodes):
        label = quoted(f"{node.name}\n{node.op.name}")
        tooltip = quoted(f"{node.op} {node.source}".strip())
        yield f'  n{i} [shape=box, fillcolor="{_fill(node, new_content)}", label={label}, tooltip={tooltip}];'
        for value in dict.fromkeys(node.inputs):
            yield f"  {source[value]} -> n{i} [label={quoted(str(value.type))}];"
        source |= dict.fromkeys(node.outputs, f"n{i}")
    for i, (name, value) in enumerate(_results(graph)):
        yield f'  r{i} [shape=box, peripheries=2, fillcolor="#ffffff", label={quoted(name)}];'
        yield f"  {source[value]} -> r{i} [label={quoted(str(value.type))}];"
    for old, new in graph.updates.items():
        yield f"  {source[new]} -> {source[old]} [style=dashed, constraint=false];"
    yield "}"


def _results(graph: Graph) -> Iterator[tuple[str, Value]]:
    if graph.loss is not None:
        yield "loss", graph.loss
    for name, value in graph.outputs.items():
        yield f"output {name}", value
    for name, value in graph.gradients.items():
        yield f"gradient of {name}", value


def _fill(node: Node, new_content: set[Value]) -> str:
    if any(value in new_content for value in node.outputs):
        return FILLS["update"]
    return FILLS["backward" if any(value.kind is Kind.GRADIENT for value in node.outputs) else "forward"]


def quoted(text: str) -> str:
    """A DOT string that shows `text` as it is: quotes and backslashes escaped, line breaks kept, controls dropped."""
    text = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return '"' + "".join(c for c in text if c.isprintable()) + '"'
