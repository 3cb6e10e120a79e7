"""Reductions along axes: sum, mean, product, maximum, minimum."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from foreplan.base.errors import ShapeError
from foreplan.graph import Builder, Op, TensorType, Value, register
from foreplan.graph.axes import ONE, Axes, Factors
from foreplan.graph.op import Arrays, Cotangents, Types, Values, only
from foreplan.graph.types import Shape, types_of
from foreplan.ops.blocks import Piece, carve, carve_bytes
from foreplan.ops.expr import Expr, call, where
from foreplan.ops.map import convert, elementwise
from foreplan.ops.shape import broadcast_to, reshape

RUN = 256  # terms that are added one after the other before they join the total

_UFUNCS = {"sum": np.add, "mean": np.add, "prod": np.multiply, "max": np.maximum, "min": np.minimum}


@register
@dataclass(frozen=True)
class Reduce(Op):
    """y = reduction of x along `axes`, which are dropped or, with `keepdims`, kept with extent 1.

    Sums and products of narrow elements are taken in their wide type (see `DType.wide`).

    Attributes:
        how: sum, mean, prod, max or min.
        axes: ascending, none negative.
        keepdims: keep reduced axes with extent 1.
        wide: narrow elements give a wide result.
    """

    name: ClassVar[str] = "reduce"
    keeps_precision: ClassVar[bool] = True
    any_strides: ClassVar[bool] = True
    how: str
    axes: tuple[int, ...]
    keepdims: bool = False
    wide: bool = False

    def __post_init__(self) -> None:
        if self.how not in _UFUNCS:
            raise ValueError(f"how must be one of {', '.join(_UFUNCS)}, and is {self.how!r}")

    def infer(self, inputs: Types) -> tuple[TensorType, ...]:
        """The input's type with the reduced axes gone or of extent 1."""
        (x,) = inputs
        if list(self.axes) != sorted(set(self.axes)) or not all(0 <= axis < x.rank for axis in self.axes):
            raise ShapeError(f"the axes {self.axes} must be distinct axes of {x}, in ascending order")
        if self.how == "mean" and not x.dtype.is_float:
            raise ShapeError(f"a mean needs floating-point elements, and got {x}; convert it first")
        shape = [1 if i in self.axes else extent for i, extent in enumerate(x.shape)]
        if self.how in ("max", "min") and not x.size and all(shape):
            raise ShapeError(f"{x} has no elements along the axes {self.axes}, and so no {self.how}")
        if not self.keepdims:
            shape = [extent for i, extent in enumerate(shape) if i not in self.axes]
        return (TensorType(x.dtype.wide if self.wide else x.dtype, tuple(shape)),)

    def indexing(self, inputs: Types, outputs: Types) -> Axes:
        """What is reduced is put together as it is."""
        f = Factors()
        x = f.row("a", inputs[0].shape)
        y = tuple(ONE if i in self.axes else dim for i, dim in enumerate(x) if self.keepdims or i not in self.axes)
        return f.axes([x], [y], sums={f"a{i}": self.how for i in self.axes})

    def vjp(self, b: Builder, inputs: Values, outputs: Values, cotangents: Cotangents) -> Cotangents:
        """Sum and mean spread the cotangent; max and min send it to the extreme elements, shared on ties; a product
        sends it to each element times the product of the others.
        """
        (x,), (y,), g = inputs, outputs, only(cotangents)
        kept = tuple(1 if i in self.axes else extent for i, extent in enumerate(x.shape))
        g = reshape(b, g, kept)
        if self.how in ("sum", "mean"):
            if self.how == "mean":
                share = 1.0 / max(1, self._count(x.shape))  # without elements there is no gradient
                g = elementwise(b, lambda g: g * share, g)
            return [broadcast_to(b, convert(b, g, x.dtype), x.shape)]
        if self.how == "prod":
            return [self._others(b, x, g)]
        hits = elementwise(b, lambda x, y: where(call("eq", x, y), 1.0, 0.0), x, reshape(b, y, kept), dtype=x.dtype)
        ties = reduce(b, "sum", hits, self.axes, keepdims=True, wide=self.wide)
        return [elementwise(b, lambda h, t, g: h * (g / t), hits, ties, g, dtype=x.dtype)]

    def _others(self, b: Builder, x: Value, g: Value) -> Value:
        """g times the product of the other elements. It is one of those that are not zero, and 0 if two are zero."""
        rest = elementwise(b, lambda x: where(call("eq", x, 0.0), 1.0, x), x)
        product = reduce(b, "prod", rest, self.axes, keepdims=True, wide=True)
        zero = elementwise(b, lambda x: where(call("eq", x, 0.0), 1.0, 0.0), x, dtype=x.dtype)
        zeros = reduce(b, "sum", zero, self.axes, keepdims=True, wide=True)

        def others(x: Expr, product: Expr, zeros: Expr, g: Expr) -> Expr:
            is_zero = call("eq", x, 0.0)
            without = where(is_zero, call("eq", zeros, 1.0), call("eq", zeros, 0.0))
            return where(without, g * product / where(is_zero, 1.0, x), 0.0)

        return elementwise(b, others, x, product, zeros, g, dtype=x.dtype)

    def flops(self, inputs: Types, outputs: Types) -> int:
        """One operation an input element."""
        return inputs[0].size

    def workspace(self, inputs: Types, outputs: Types) -> int:
        """A partial sum, if there are several; the sum itself, if it is rounded at the end."""
        if self._rounds(outputs[0]):
            return carve_bytes(*self._pieces(inputs[0], outputs[0]))
        return outputs[0].nbytes if self._cut(inputs[0].shape)[1] else 0

    def _pieces(self, x: TensorType, y: TensorType) -> list[Piece]:
        wide = y.dtype.wide.numpy
        partial = y.size if self._cut(x.shape)[1] else 0
        return [((partial,), wide), ((y.size if self._rounds(y) else 0,), wide)]

    def _rounds(self, y: TensorType) -> bool:
        return y.dtype.is_narrow and self.how not in ("max", "min")

    def compute(self, inputs: Arrays, outputs: Arrays, workspace: np.ndarray) -> None:
        """One ufunc reduction; or one for each run of terms, if a single one would add up too many rounding errors."""
        (x,), (y,) = inputs, outputs
        if not y.size:  # NumPy refuses the largest of no elements, even for an empty result
            return
        ufunc, (from_, to) = _UFUNCS[self.how], types_of(x, y)
        axis, count = self._cut(x.shape)
        partial, sums = carve(workspace, *self._pieces(from_, to))
        total = sums.reshape(y.shape) if self._rounds(to) else y
        if not count:
            ufunc.reduce(x, axis=self.axes, keepdims=self.keepdims, out=total, dtype=total.dtype)
        else:
            partial = partial.reshape(y.shape)
            before = (slice(None),) * axis
            for start in range(0, x.shape[axis], count):
                part = x[(*before, slice(start, start + count))]
                target = partial if start else total
                ufunc.reduce(part, axis=self.axes, keepdims=self.keepdims, out=target, dtype=total.dtype)
                if start:
                    np.add(total, partial, out=total)
        if self.how == "mean":
            count = self._count(x.shape)
            total *= total.dtype.type(1.0 / count if count else math.nan)
        if total is not y:
            np.copyto(y, total, casting="unsafe")

    def _count(self, shape: Shape) -> int:
        """The number of elements that make one element of the result."""
        return math.prod(shape[axis] for axis in self.axes)

    def _cut(self, shape: Shape) -> tuple[int, int]:
        """The axis of a sum that is cut into runs, and the elements of a run; (0, 0) for no cut.

        NumPy adds in pairs along the last axes, where they are reduced, but one by one along those before them.
        """
        if self.how not in ("sum", "mean") or not self.axes:
            return 0, 0
        last = len(shape)
        while last and (last - 1 in self.axes or shape[last - 1] == 1):
            last -= 1
        terms = math.prod(shape[axis] for axis in self.axes if axis < last)
        if terms <= 2 * RUN:
            return 0, 0
        axis = max((axis for axis in self.axes if axis < last), key=lambda axis: shape[axis])
        return axis, max(1, RUN * shape[axis] // terms)


def normalize_axes(axes: Sequence[int] | int | None, rank: int) -> tuple[int, ...]:
    """Distinct ascending axes from what users write (negative ones, one number, None for all).

    Raises:
        ShapeError: an axis is out of range or given twice.
    """
    if axes is None:
        return tuple(range(rank))
    try:
        given = [operator.index(axis) for axis in ([axes] if isinstance(axes, int) else axes)]
    except TypeError:
        raise ShapeError(f"axes are whole numbers, and {axes!r:.80} was given") from None
    found = sorted(axis + rank if axis < 0 else axis for axis in given)
    if len(set(found)) != len(found) or not all(0 <= axis < rank for axis in found):
        raise ShapeError(f"axes {given} are not distinct axes of a tensor with {rank} axes")
    return tuple(found)


def reduce(
    b: Builder,
    how: str,
    x: Value,
    axes: Sequence[int] | int | None = None,
    keepdims: bool = False,
    wide: bool = False,
) -> Value:
    """Reduce `x` along axes (all of them by default); `x` itself where there is nothing to reduce.

    With `wide`, the result has the wide type of x's elements.
    """
    found = normalize_axes(axes, len(x.shape))
    if not found:
        return convert(b, x, x.dtype.wide) if wide else x
    return b.apply(Reduce(how, found, keepdims, wide and x.dtype.is_narrow), x)
