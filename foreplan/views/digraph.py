"""Plans and graphs for tools that read graphs: GraphML by networkx, and a plan's instructions in the DOT language."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from foreplan.graph.walk import networkx_here
from foreplan.planner.problem import Role
from foreplan.units import format_bytes
from foreplan.views.dot import FILLS, HEAD, STORED_FILL, quoted
from foreplan.views.flow import Flow
from foreplan.views.memory import Memory, printable

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


def graphml_text(digraph: networkx.DiGraph) -> str:
    """A DiGraph whose attributes are numbers and texts as GraphML, http://graphml.graphdrawing.org."""
    return "\n".join(networkx_here().generate_graphml(digraph)) + "\n"


def plan_dot_text(memory: Memory) -> str:
    """The instructions of a plan as a `digraph`: boxes are instructions in the colours of their phase, ellipses what is
    there when the step begins, edges say the bytes and where they lie.
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
    yield "}"
