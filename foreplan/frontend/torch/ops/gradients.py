"""The ops that tie a result to its gradient, and those that ask for one: see `functions.py` and `transforms.py`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from foreplan.base.errors import UnsupportedError
from foreplan.frontend.torch.call import Call
from foreplan.frontend.torch.functions import COTANGENT, TIED
from foreplan.frontend.torch.table import aten
from foreplan.frontend.torch.transforms import ARGUMENT, GRADIENT
from foreplan.frontend.tracing.elementwise import convert
from foreplan.frontend.tracing.tensor import Tensor
from foreplan.graph import Value
from foreplan.ops.custom_gradient import with_gradient
from foreplan.ops.marks import Gradient, StraightThrough


@aten(COTANGENT)
def _cotangent(c: Call, y: Any) -> Tensor:
    return c.wrap(c.b.input("cotangent", c.tensor(y).value.type))


@aten(TIED)
def _tied(
    c: Call, ys: Sequence[Any], xs: Sequence[Any], cotangents: Sequence[Tensor], gradients: Sequence[Any]
) -> list[Tensor]:
    results, tensors = [c.value(y) for y in ys], [c.value(x) for x in xs]
    found = [fitting(c, g, x) for g, x in zip(gradients, tensors)]
    return [c.wrap(y) for y in with_gradient(c.b, results, tensors, [g.value for g in cotangents], found)]


def hooked(c: Call, x: Any, cotangent: Tensor, gradient: Any) -> Tensor:
    """A tensor as it is, whose gradient is what a hook made of it: see `export_gaps.py`."""
    tensor = c.value(x)
    (y,) = with_gradient(c.b, [tensor], [tensor], [cotangent.value], [fitting(c, gradient, tensor)])
    return c.wrap(y)


def fitting(c: Call, gradient: Any, x: Value) -> Value | None:
    """A gradient in its tensor's shape and type: PyTorch adds up what a tensor was broadcast to."""
    if gradient is None or not x.dtype.is_float:
        return None
    g: Any = convert(c.tensor(gradient), x.dtype)
    extra = g.ndim - len(x.shape)
    axes = tuple(i for i, n in enumerate(g.shape) if i < extra or (x.shape[i - extra] == 1 and n != 1))
    total = np.sum(g, axis=axes, keepdims=True) if axes else g
    return c.value(total.reshape(x.shape) if total.shape != x.shape else total)


@aten(ARGUMENT, draws=True)  # in so far as it is never computed while importing
def _argument(c: Call, x: Any) -> Tensor:
    """x, as a value that nothing else reads: what a function is differentiated by."""
    value = c.value(x)
    return c.wrap(c.b.apply(StraightThrough(), value, value))


@aten(GRADIENT, draws=True)
def _gradient(c: Call, y: Any, xs: Sequence[Any]) -> list[Tensor]:
    if not all(isinstance(x, Tensor) for x in xs):
        raise UnsupportedError(
            "a gradient with respect to a tensor that is known while importing; make it an input or a parameter"
        )
    return [c.wrap(g) for g in c.b.node(Gradient(), c.value(y), *(x.value for x in xs))]
