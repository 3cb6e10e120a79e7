"""Attaching a loss to a model: its further inputs, its nodes, and the scalar that training minimises."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

from foreplan.base.arguments import shown
from foreplan.base.errors import ShapeError, UsageError
from foreplan.base.units import listed
from foreplan.frontend.losses.loss import Loss
from foreplan.frontend.losses.named import named
from foreplan.frontend.tracing.function import function_name
from foreplan.frontend.tracing.specs import Spec
from foreplan.frontend.tracing.tensor import Tensor
from foreplan.frontend.tracing.tracer import Tracer, fail
from foreplan.graph import Graph, TensorType, Value


def attach_loss(graph: Graph, loss: Loss | Callable[..., Tensor] | str, outputs: Sequence[str] | None = None) -> Graph:
    """A model with a loss: its inputs and nodes added, and `Graph.loss` set.

    Args:
        graph: a model; its outputs stay.
        loss: one of this module, by itself or by name, or a traceable function whose parameters without default are
            the model's outputs in order and whose parameters with a Spec as default are further inputs.
        outputs: names of the outputs that the loss reads, in order. By default all of them; the first ones, and a note
            says so, where the loss is of this module and reads fewer.

    Raises:
        UsageError: the loss takes another number of outputs, or the graph has a loss already.
        ShapeError: the loss does not fit the outputs' types, or an input of that name has another type.
        TraceError: the function cannot be traced, or does not give a scalar.
    """
    if graph.loss is not None:
        raise UsageError(
            f"graph {graph.name!r} has the loss {graph.loss.name!r} already; attach one to the model itself"
        )
    fn = named(loss) if isinstance(loss, str) else loss
    if not callable(fn):
        raise UsageError(f"{shown(fn)} is no loss; give one of foreplan.losses or a function of the outputs")
    names, notes = list(outputs or graph.outputs), []
    values = [_output(graph, name) for name in names]
    if not outputs and isinstance(fn, Loss) and len(values) > fn.reads:
        values = values[: fn.reads]
        read, left = (listed(map(repr, each), 3) for each in (names[: fn.reads], names[fn.reads :]))
        notes = [f"losses.{fn.name} is of the output {read} alone; the others ({left}) count for nothing"]
    label = fn.name if isinstance(fn, Loss) else function_name(fn, "function")
    tracer = Tracer(graph.name, graph)
    with tracer.active() as b:
        b.scope = "loss/"
        b.notes += notes
        needed = _needed(fn, label, values, graph)
        given = {value.name: value for value in graph.inputs}
        further = {}
        for name, type in needed.items():
            value = given[name] if name in given else b.input(name, type)
            if value.type != type:
                raise ShapeError(
                    f"the loss {label} needs the input {name!r} as {type}, and the model's is {value.type}"
                )
            further[name] = Tensor(tracer, value)
        result = fn(*(Tensor(tracer, value) for value in values), **further)
        if not isinstance(result, Tensor) or result.shape or not result.value.dtype.is_float:
            raise fail(f"the loss {label} gives {result!r}; it must be a floating-point scalar, such as x.mean()")
        return b.finish(graph.outputs, {**graph.updates, **tracer.updates}, result.value, graph.gradients)


def _output(graph: Graph, name: str) -> Value:
    if name not in graph.outputs:
        raise UsageError(f"graph {graph.name!r} has no output {name!r}; it has {', '.join(graph.outputs)}")
    return graph.outputs[name]


def _needed(fn: Any, label: str, values: Sequence[Value], graph: Graph) -> dict[str, TensorType]:
    """Further inputs of a loss, after checking that it takes as many outputs as there are."""
    given = ", ".join(f"{name}: {value.type}" for name, value in graph.outputs.items())
    if isinstance(fn, Loss):
        if len(values) != fn.reads:
            reads = "one output" if fn.reads == 1 else f"{fn.reads} outputs"
            raise UsageError(
                f"the loss {label} reads {reads}, and graph {graph.name!r} has {len(values)} ({given}); write the "
                f"loss as a function of all of them, such as lambda a, b, target=spec(…): losses.{label}(a, target)"
            )
        return fn.inputs(*(value.type for value in values))
    try:
        parameters = inspect.signature(fn).parameters.values()
    except (TypeError, ValueError):
        raise UsageError(f"{fn!r} is no loss; give one of foreplan.losses or a function of the outputs") from None
    needed = {p.name: p.default.type for p in parameters if isinstance(p.default, Spec)}
    positional = [
        p for p in parameters if p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]
    takes_all = any(p.kind is p.VAR_POSITIONAL for p in parameters)
    if len(positional) != len(values) and not (takes_all and len(positional) < len(values)):
        raise UsageError(
            f"the loss {label} takes {len(positional)} outputs, and graph {graph.name!r} has {len(values)} ({given}); "
            "its further inputs need a foreplan.spec as default, such as target=spec((32,), 'int64')"
        )
    return needed
