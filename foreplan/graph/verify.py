"""The rules every graph obeys, checked whenever one is finished."""

from __future__ import annotations

from collections.abc import Collection

from foreplan.base.errors import ModelError, ShapeError
from foreplan.graph.init import Fill
from foreplan.graph.ir import Graph
from foreplan.graph.op import Node
from foreplan.graph.value import Kind, Value


def verify_graph(graph: Graph, inferred: Collection[Node] = ()) -> None:
    """Check names, order of nodes, types and results.

    Args:
        graph: what to check.
        inferred: nodes whose types have been inferred before, which is most of the work.

    Raises:
        ModelError: says which value or node breaks which rule.
    """
    names: set[str] = set()
    defined: set[Value] = set()

    def define(value: Value, where: str) -> None:
        _check_name(value.name, where)
        if value.name in names:
            raise ModelError(f"graph {graph.name!r}: two values are named {value.name!r} ({where})")
        names.add(value.name)
        defined.add(value)

    for value in graph.inputs:
        if value.kind is not Kind.INPUT:
            raise ModelError(f"graph {graph.name!r}: the input {value!r} has the kind {value.kind}")
        define(value, "an input")
    for value in graph.stored:
        if not value.kind.is_stored or value.init is None:
            raise ModelError(f"graph {graph.name!r}: the stored {value!r} has kind {value.kind}, init {value.init}")
        if isinstance(value.init, Fill) and not value.dtype.holds(value.init.value):
            raise ModelError(f"graph {graph.name!r}: the stored {value!r} cannot hold {value.init}")
        define(value, "stored")
    for node in graph.nodes:
        _check_name(node.name, "of a node")
        for value in node.inputs:
            if value not in defined:
                raise ModelError(f"node {node.name!r} of graph {graph.name!r} reads {value!r} before it is computed")
        if node not in inferred:
            _check_types(node, graph)
        for value in node.outputs:
            define(value, f"an output of node {node.name!r}")
    for name in (*graph.outputs, *graph.gradients):
        _check_name(name, "of a result")
    for value in graph.results:
        if value not in defined:
            raise ModelError(f"graph {graph.name!r} returns {value!r}, which nothing computes")
    for old, new in graph.updates.items():
        if old not in defined or not old.kind.is_stored or old.kind.is_fixed:
            raise ModelError(f"graph {graph.name!r} updates {old!r}, which is not stored, or a constant")
        if old.type != new.type:
            raise ModelError(f"graph {graph.name!r} updates {old!r} with {new!r}: the types differ")
    if graph.loss is not None and (graph.loss.shape or not graph.loss.dtype.is_float):
        raise ModelError(f"graph {graph.name!r}: the loss must be a floating-point scalar, and is {graph.loss!r}")


def _check_name(name: str, where: str) -> None:
    """Plans, checkpoints and maps are UTF-8; the name of a file that is not, as Python reads it, is no text."""
    if not name.isascii():
        try:
            name.encode()
        except UnicodeEncodeError:
            raise ModelError(f"the name {name!r} ({where}) cannot be written as UTF-8: give another one") from None


def _check_types(node: Node, graph: Graph) -> None:
    where = f"node {node.name!r} of graph {graph.name!r}: {node.op.name}"
    try:
        types = node.op.result_types([value.type for value in node.inputs])
    except ShapeError as error:
        raise ShapeError(f"{where}: {error}") from None
    if types != tuple(value.type for value in node.outputs):
        raise ModelError(
            f"{where} gives {', '.join(map(str, types))}, but its outputs are {', '.join(map(repr, node.outputs))}"
        )
