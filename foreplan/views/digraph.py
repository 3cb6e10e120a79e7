"""Plans and graphs for tools that read graphs: GraphML by networkx, and a plan's instructions in the DOT language."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

from foreplan.base.errors import UsageError
from foreplan.base.files import write_atomically
from foreplan.base.units import format_bytes
from foreplan.graph import Graph, Node, Value
from foreplan.graph.digraph import networkx_here
from foreplan.planner.problem import Role
from foreplan.report.memory import Memory, printable
from foreplan.views.dot import FILLS, HEAD, STORED_FILL, quoted, write_dot
from foreplan.views.flow import Flow

if TYPE_CHECKING:
    import networkx


def plan_digraph(memory: Memory) -> networkx.DiGraph:
    """A plan as a DiGraph: contents of bytes → instructions that read them, instructions → contents that they write.

    Vertices are `i0`, `i1`, … for instructions and `c0`, `c1`, … for contents. Attributes, all numbers or texts: `kind`
    ("instruction" or "content"), `name`, and those of `Flow.facts_of` and `Flow.facts`.

    Raises:
        UsageError: networkx is not installed.
    """
    flow = Flow.of(memory)
    digraph: networkx.DiGraph = networkx_here().DiGraph(arena_bytes=memory.arena, peak_step=memory.peak_step)
    for i, content in enumerate(flow.contents):
        digraph.add_node(f"c{i}", kind="content", name=content.name, **flow.facts(content))
    for i, name in enumerate(flow.line.names):
        digraph.add_node(f"i{i}", kind="instruction", name=printable(name), **flow.facts_of(i))
        digraph.add_edges_from((f"c{c}", f"i{i}") for c in flow.reads[i])
        digraph.add_edges_from((f"i{i}", f"c{c}") for c in flow.writes[i])
    return digraph


def graph_digraph(graph: Graph) -> networkx.DiGraph:
    """A graph of ops as a DiGraph that files can hold: `Graph.to_networkx` with texts for its vertices.

    Vertices are `v0`, `v1`, … for values and `n0`, `n1`, … for nodes, with the attributes `kind` (of a value, or
    "node"), `name`, `type` or `op`, and `source`.

    Raises:
        UsageError: networkx is not installed.
    """
    digraph = graph.to_networkx()
    ids: dict[Value | Node, str] = {}
    ids |= {value: f"v{i}" for i, value in enumerate(graph.values())}
    ids |= {node: f"n{i}" for i, node in enumerate(graph.nodes)}
    for vertex, data in digraph.nodes(data=True):
        data.clear()
        data["name"] = printable(vertex.name)
        if isinstance(vertex, Value):
            data |= {"kind": str(vertex.kind), "type": str(vertex.type)}
        else:
            data |= {"kind": "node", "op": printable(str(vertex.op)), "source": printable(vertex.source)}
    digraph.graph["name"] = printable(graph.name)
    relabelled: networkx.DiGraph = networkx_here().relabel_nodes(digraph, ids)
    return relabelled


def write_graph(path: str | os.PathLike[str], graph: Graph) -> None:
    """Write a graph of ops for other tools: as DOT text, or as GraphML, as the ending of the name says.

    Raises:
        UsageError: the name ends in neither; or the file cannot be written; or networkx is not installed.
    """
    name = os.fspath(path).lower()
    if name.endswith(".dot"):
        write_dot(path, graph)
    elif name.endswith(".graphml"):
        write_atomically(path, graphml_text(graph_digraph(graph)))
    else:
        raise UsageError(
            f"a graph is written as .dot or as .graphml, which the name {os.fspath(path)!r} does not end in"
        )


def graphml_text(digraph: networkx.DiGraph) -> str:
    """A DiGraph whose attributes are numbers and texts as GraphML, http://graphml.graphdrawing.org."""
    return "\n".join(networkx_here().generate_graphml(digraph)) + "\n"


def plan_dot_text(memory: Memory) -> str:
    """The instructions of a plan as a `digraph`: boxes are instructions in the colours of their phase, ellipses what is
    there when the step begins, edges say the bytes and where they lie, dashed edges lead to the stored value that an
    instruction replaces.
    """
    return "\n".join(_lines(Flow.of(memory))) + "\n"


def _lines(flow: Flow) -> Iterator[str]:
    yield f"digraph {quoted('plan')} {{"
    yield from HEAD
    problem = flow.memory.problem
    for i, content in enumerate(flow.contents):
        if content.written < 0:
            value = problem.values[content.value]
            fill = STORED_FILL if value.role is Role.STORED else FILLS["input"]
            label = quoted(f"{content.name}\n{content.type or format_bytes(value.nbytes)}")
            yield f'  c{i} [shape=ellipse, fillcolor="{fill}", label={label}];'
    for i, name in enumerate(flow.line.names):
        facts = flow.facts_of(i)
        label = quoted(f"{i} {printable(name)}")
        tooltip = quoted(", ".join(f"{key} {value}" for key, value in facts.items()))
        yield f'  i{i} [shape=box, fillcolor="{FILLS[str(facts["phase"])]}", label={label}, tooltip={tooltip}];'
        for c in flow.reads[i]:
            content = flow.contents[c]
            source = f"c{c}" if content.written < 0 else f"i{content.written}"
            label = quoted(f"{format_bytes(problem.values[content.value].nbytes)} at {content.offset}")
            yield f"  {source} -> i{i} [label={label}, tooltip={quoted(content.name)}];"
    first = {content.value: c for c, content in enumerate(flow.contents) if content.written < 0}
    for content in flow.contents:
        if content.last and content.written >= 0 and (home := problem.values[content.value].home) >= 0:
            yield f"  i{content.written} -> c{first[home]} [style=dashed, constraint=false];"
    yield "}"
