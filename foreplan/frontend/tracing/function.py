"""`trace`: a plain function over NumPy-style arrays, run once with tensors that record what it does."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from foreplan.base.arguments import shown
from foreplan.base.errors import UsageError
from foreplan.frontend.tracing.specs import Spec
from foreplan.frontend.tracing.tensor import Tensor
from foreplan.frontend.tracing.tracer import Tracer, fail
from foreplan.graph import Builder, Graph, Value


def trace(fn: Callable[..., Any], *specs: Any, name: str | None = None, **named_specs: Any) -> Graph:
    """The graph of a function: `trace(model, spec((32, 784)))`.

    Each argument that is a Spec becomes an input of the graph, named after the function's parameter; so does each
    parameter left out that has a Spec as its default. Other arguments reach the function as they are.

    Args:
        fn: takes tensors and returns a tensor, a tuple or list of them, or a dict; `foreplan.nn` in it makes
            parameters. It runs once; Python's `if` and `for` in it are decided then.
        specs: for the function's parameters in order.
        name: of the graph; the function's own by default.
        named_specs: for parameters by name.

    Returns:
        The forward graph. Outputs are named by a dict's keys, or `output`, or `output_0`, `output_1`, …

    Raises:
        TraceError: the function needs the value of a tensor, or does something that cannot be traced; names the line.
        ShapeError: shapes or element types do not fit each other; names the line.
        UsageError: the specs do not fit the function's parameters.
    """
    if not callable(fn) or not isinstance(name, str | None):
        raise UsageError(f"trace takes a function and a name, and was given {shown(fn)} and {shown(name)}")
    tracer = Tracer(name or function_name(fn))
    bound = _bind(fn, specs, named_specs)
    with tracer.active() as b:
        args = _inputs(tracer, b, bound)
        before = _global_generators()
        outputs = named_outputs(tracer, fn(*args.args, **args.kwargs))
        if _global_generators() != before:
            b.note(
                "the function draws random numbers from NumPy or Python: they are drawn once, while it is traced, and "
                "are the same in every step; draw new ones with nn.dropout, or give them to each step as an input"
            )
        return b.finish(outputs, tracer.updates)


def _global_generators() -> list[object]:
    """The states of the generators that `np.random` and `random` draw from, where these are loaded."""
    states: list[object] = []
    if (python := sys.modules.get("random")) is not None:
        states.append(python.getstate())
    if (numpy := sys.modules.get("numpy.random")) is not None:
        kind, keys, *others = numpy.get_state()
        states.append((kind, keys.tobytes(), *others))
    return states


def function_name(fn: Callable[..., Any], nameless: str = "graph") -> str:
    """The name of a function: its own, that of the function in a partial, or that of an object's class."""
    inner = getattr(fn, "func", fn)
    found = getattr(inner, "__name__", type(inner).__name__)
    return nameless if found == "<lambda>" else found


def _bind(fn: Callable[..., Any], specs: tuple[Any, ...], named: dict[str, Any]) -> inspect.BoundArguments:
    try:
        bound = inspect.signature(fn).bind(*specs, **named)
    except (TypeError, ValueError) as error:
        raise UsageError(
            f"trace({function_name(fn)}): {error}; give a spec for each parameter without default"
        ) from None
    for parameter in bound.signature.parameters.values():
        if parameter.name not in bound.arguments and isinstance(parameter.default, Spec):
            bound.arguments[parameter.name] = parameter.default
    return bound


def _inputs(tracer: Tracer, b: Builder, bound: inspect.BoundArguments) -> inspect.BoundArguments:
    """The arguments with each Spec replaced by the input it describes."""

    def replace(name: str, argument: Any) -> Any:
        if isinstance(argument, Spec):
            return Tensor(tracer, b.input(name, argument.type))
        if isinstance(argument, np.ndarray):
            raise UsageError(
                f"the argument {name!r} is an array; describe the input with "
                f"spec({argument.shape}, {argument.dtype.name!r}), or hold the array in the function itself"
            )
        return argument

    for name, argument in bound.arguments.items():
        kind = bound.signature.parameters[name].kind
        if kind is inspect.Parameter.VAR_POSITIONAL:
            bound.arguments[name] = tuple(replace(f"{name}_{i}", item) for i, item in enumerate(argument))
        elif kind is inspect.Parameter.VAR_KEYWORD:
            bound.arguments[name] = {key: replace(key, item) for key, item in argument.items()}
        else:
            bound.arguments[name] = replace(name, argument)
    return bound


def named_outputs(tracer: Tracer, result: Any) -> dict[str, Value]:
    """The results of a traced function, as the outputs of its graph.

    Raises:
        TraceError: it returned something else than tensors, or nothing.
    """
    if isinstance(result, Mapping):
        named = {str(key): item for key, item in result.items()}
    elif isinstance(result, tuple | list):
        named = {f"output_{i}": item for i, item in enumerate(result)}
    else:
        named = {"output": result}
    for key, item in named.items():
        if not isinstance(item, Tensor):
            raise fail(f"the function returns {type(item).__name__} as {key!r}; return tensors, in a tuple or a dict")
        if item.tracer is not tracer:
            raise fail(f"the function returns a tensor of another trace as {key!r}")
    if not named:
        raise fail("the function returns no tensor, so there is nothing to compute")
    return {key: item.value for key, item in named.items()}
