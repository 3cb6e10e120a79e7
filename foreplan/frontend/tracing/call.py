"""Calling a graph in a traced function: its nodes are added to the trace, on the tensors that are given."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np

from foreplan.base.arguments import shown
from foreplan.base.errors import ShapeError, UsageError
from foreplan.frontend.tracing.methods import for_tensors
from foreplan.frontend.tracing.tensor import Tensor
from foreplan.frontend.tracing.tracer import Tracer, fail
from foreplan.graph import Graph, Value


@for_tensors
def call(tracer: Tracer, graph: Graph, inputs: Sequence[Any], named: Mapping[str, Any], name: str) -> Any:
    """The outputs of a model for these inputs: see `Graph.__call__`.

    Raises:
        UsageError, ShapeError, TraceError: see `Graph.__call__`.
    """
    if graph.loss is not None or graph.gradients:
        raise fail(f"graph {graph.name!r} is a training step; call the model itself, which has no loss")
    with tracer.scope(name) if name else nullcontext():
        b = tracer.at()
        now = _arguments(tracer, graph, inputs, named)
        now |= {value: tracer.adopt(value) for value in graph.stored}
        for node in graph.nodes:
            now.update(zip(node.outputs, b.repeat(node, [now[value] for value in node.inputs])))
    tracer.updates |= {now[old]: now[new] for old, new in graph.updates.items()}
    for note in graph.notes:
        if note not in b.notes:
            b.note(note)
    outputs = {each: Tensor(tracer, now[value]) for each, value in graph.outputs.items()}
    return next(iter(outputs.values())) if len(outputs) == 1 else outputs


def _arguments(tracer: Tracer, graph: Graph, inputs: Sequence[Any], named: Mapping[str, Any]) -> dict[Value, Value]:
    """The value for each input of the graph."""
    listed = ", ".join(f"{value.name}: {value.type}" for value in graph.inputs)
    given = dict(zip((value.name for value in graph.inputs), inputs))
    if len(inputs) > len(graph.inputs) or (twice := given.keys() & named.keys()):
        what = f"{len(inputs)} inputs" if len(inputs) > len(graph.inputs) else f"{min(twice)!r} twice"
        raise UsageError(f"graph {graph.name!r} takes {listed or 'no inputs'}, and was given {what}")
    given |= named
    known = {value.name for value in graph.inputs}
    if wrong := [name for name in given if name not in known]:
        raise UsageError(f"graph {graph.name!r} has no input {wrong[0]!r}; it takes {listed}")
    if missing := [value.name for value in graph.inputs if value.name not in given]:
        raise UsageError(f"graph {graph.name!r} takes {listed}, and was given no {missing[0]!r}")
    return {value: _argument(tracer, graph, value, given[value.name]) for value in graph.inputs}


def _argument(tracer: Tracer, graph: Graph, wanted: Value, given: Any) -> Value:
    if isinstance(given, Tensor):
        if given.tracer is not tracer:
            raise fail(f"the input {wanted.name!r} of graph {graph.name!r} is a tensor of another trace")
        value = given.value
    elif isinstance(given, np.ndarray | np.generic | bool | int | float):
        value = tracer.constant(np.asarray(given, wanted.dtype.numpy))
    else:
        raise UsageError(f"the input {wanted.name!r} of graph {graph.name!r} is {shown(given)}; give a tensor or array")
    if value.type != wanted.type:
        raise ShapeError(
            f"graph {graph.name!r} takes its input {wanted.name!r} as {wanted.type}, and was given {value.type}: "
            "shapes are static; import or trace the model for this one, for example from_onnx(path, batch=32)"
        )
    return value
