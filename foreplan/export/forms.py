"""What of a model is written: the model itself, or the step that trains it, with their inputs and outputs by name."""

from __future__ import annotations

from typing import TYPE_CHECKING

from foreplan.base.errors import UnsupportedError
from foreplan.export.graph import onnx_graph
from foreplan.graph import Graph, Kind, Value
from foreplan.graph.names import Names
from foreplan.passes.training import without_marks

if TYPE_CHECKING:
    import onnx


def model_form(graph: Graph) -> tuple[onnx.ModelProto, Graph]:
    """A model in inference form: its outputs from its inputs, without the loss where it has one beside them. An output
    whose name an input or a weight has gets a number.

    Returns:
        See `onnx_graph`.

    Raises:
        UnsupportedError: a value changes from step to step, or standard ONNX cannot say a node.
    """
    graph = without_marks(graph)
    if graph.updates:
        name = next(iter(graph.updates)).name
        raise UnsupportedError(
            f"the model changes {name!r} from step to step, and an ONNX model keeps nothing: import or trace it in "
            "inference form, or export the step"
        )
    names = _names_of(graph)
    results = {names.claim(name): value for name, value in graph.outputs.items()}
    if not results and graph.loss is not None:
        results[names.claim("loss")] = graph.loss
    return onnx_graph(graph, results, inputs=None if graph.loss is None else ())


def step_form(graph: Graph) -> tuple[onnx.ModelProto, Graph]:
    """A training step: inputs are the step's own, and everything that it changes, whose content is the default.

    Outputs are `loss`, the step's outputs, `x/next` for everything x that it changes, and `x/gradient` for gradients
    that it returns. A name that is taken gets a number.

    Returns:
        See `onnx_graph`.

    Raises:
        UnsupportedError: standard ONNX cannot say a node.
    """
    names = _names_of(graph)
    results: dict[str, Value] = {}
    if graph.loss is not None:
        results[names.claim("loss")] = graph.loss
    results |= {names.claim(name): value for name, value in graph.outputs.items()}
    results |= {names.claim(f"{old.name}/next"): new for old, new in graph.updates.items()}
    results |= {names.claim(f"{name}/gradient"): value for name, value in graph.gradients.items()}
    changed = [value for value in graph.stored if value in graph.updates or value.kind is Kind.PARAMETER]
    return onnx_graph(graph, results, changed)


def _names_of(graph: Graph) -> Names:
    """What is taken before outputs are named."""
    return Names(value.name for value in (*graph.inputs, *graph.stored))
