"""Graphs as text: one line a value or node."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from foreplan.graph.op import Node
from foreplan.graph.value import Kind, Value

# A name is written bare where it can be and quoted where it holds anything else.
_BARE = re.compile(r"[A-Za-z0-9_./:\-]+")
_UNPRINTED = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")  # control characters, and all that end a line


def _quote(name: str) -> str:
    if _BARE.fullmatch(name):
        return f"%{name}"
    escaped = name.replace("\\", "\\\\").replace('"', '\\"')
    return '%"' + _UNPRINTED.sub(lambda found: f"\\u{ord(found[0]):04x}", escaped) + '"'


def printed(
    name: str,
    given: Iterable[Value],
    nodes: Iterable[Node],
    loss: Value | None,
    results: Mapping[str, Mapping[str, Value]],
    updates: Mapping[Value, Value],
    notes: Iterable[str],
) -> str:
    """A whole graph as text, ending in a newline.

    Args:
        given: inputs and stored values.
        results: outputs and gradients, by what they are and by name.
    """
    lines = [f"graph {_quote(name)}"]
    for value in given:
        init = f" = {value.init}" if value.init is not None else ""
        lines.append(f"{value.kind} {_quote(value.name)}: {value.type}{init}")
    for node in nodes:
        mark = "~" if node.outputs and node.outputs[0].kind is Kind.GRADIENT else ""
        left = ", ".join(f"{_quote(value.name)}: {value.type}" for value in node.outputs)
        right = ", ".join(_quote(value.name) for value in node.inputs)
        lines.append(f"{mark}{left} = {node.op} [{right}] as {_quote(node.name)}")
    if loss is not None:
        lines.append(f"loss {_quote(loss.name)}")
    for kind, found in results.items():
        lines += [f"{kind} {_quote(name)} = {_quote(value.name)}" for name, value in found.items()]
    lines += [f"update {_quote(old.name)} = {_quote(new.name)}" for old, new in updates.items()]
    lines += [f"note {note!r}" for note in notes]
    return "\n".join(lines) + "\n"
