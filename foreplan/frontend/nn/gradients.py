"""What gradients do in a traced function: where none passes, where one takes another way, and one that is asked for."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from foreplan.base.arguments import shown
from foreplan.base.errors import UsageError
from foreplan.frontend.tracing.elementwise import convert
from foreplan.frontend.tracing.function import function_name
from foreplan.frontend.tracing.tensor import Tensor, as_tensor, wrap
from foreplan.frontend.tracing.tracer import current
from foreplan.graph import Value
from foreplan.ops.custom_gradient import with_gradient
from foreplan.ops.marks import Gradient, StopGradient, StraightThrough


def stop_gradient(x: Any) -> Tensor:
    """x as it is, for which no gradient comes back; x of any shape and type."""
    return _wrap(current().at().apply(StopGradient(), as_tensor(x).value))


def straight_through(value: Any, through: Any) -> Tensor:
    """`value` as it is, whose gradient goes to `through` instead; both of one shape and type.

    `straight_through(round(x), x)` is x rounded, with the gradient of x (Bengio et al., 2013, arXiv:1308.3432).

    Raises:
        ShapeError: the shapes or types differ.
    """
    return _wrap(current().at().apply(StraightThrough(), as_tensor(value).value, as_tensor(through).value))


def custom_gradient(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function whose gradient it gives itself, as `tf.custom_gradient` has it.

    The function takes tensors, and returns its result, or a tuple of results, and a function from their cotangents to
    the gradients of its arguments: one tensor of an argument's shape and type each, or None. What the results are
    computed from beside the arguments gets no gradient. A gradient that goes the other way (Ganin and Lempitsky 2015,
    arXiv:1409.7495):

        @foreplan.custom_gradient
        def reverse(x):
            return x, lambda g: -g

    Raises:
        UsageError: it is no function; or, where it is called, it returns no such pair, or another number of gradients
            than it has arguments.
        ShapeError: where it is called: a gradient has another shape than its argument.
    """

    if not callable(function):
        raise UsageError(f"custom_gradient takes a function, and was given {shown(function)}")

    @wraps(function)
    def applied(*args: Any) -> Any:
        name, b = function_name(function, "function"), current().at()
        tensors = [as_tensor(arg) for arg in args]
        made = function(*tensors)
        if not (isinstance(made, tuple) and len(made) == 2 and callable(made[1])):
            raise UsageError(f"{name} is to return its result and a function from cotangents to gradients: y, backward")
        results, backward = made
        ys = [as_tensor(y) for y in (results if isinstance(results, tuple | list) else [results])]
        stand_ins = [b.input("cotangent", y.value.type) for y in ys]
        found = backward(*map(_wrap, stand_ins))
        gradients = list(found) if isinstance(found, tuple | list) else [found]
        if len(gradients) != len(tensors):
            raise UsageError(f"{name} has {len(tensors)} arguments, and its backward gives {len(gradients)} gradients")
        values = [None if g is None else convert(as_tensor(g), x.value.dtype).value for g, x in zip(gradients, tensors)]
        xs = [x.value for x in tensors]
        found = [_wrap(y) for y in with_gradient(current().at(), [y.value for y in ys], xs, stand_ins, values)]
        return tuple(found) if isinstance(results, tuple | list) else found[0]

    return applied


def gradient(y: Any, *xs: Any) -> Any:
    """The gradient of y, one number, with respect to each x that it is computed from, as part of the model.

    A loss may hold it, such as the penalty of WGAN-GP (Gulrajani et al. 2017, arXiv:1704.00028): it is differentiated
    once more. Ops take their training form first, so in a training step it is the gradient of what that step computes.

    Returns:
        A tensor of x's shape and type; for several, a tuple of them. Zeros for an x that y does not depend on.

    Raises:
        ShapeError: y is more than one number, or an x holds integers.
    """
    found = current().at().node(Gradient(), as_tensor(y).value, *(as_tensor(x).value for x in xs))
    return _wrap(found[0]) if len(found) == 1 else tuple(map(_wrap, found))


def _wrap(value: Value) -> Tensor:
    return wrap(value)
