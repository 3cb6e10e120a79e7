"""Marks for differentiation: where no gradient passes, where it takes another way, and where one is asked for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from foreplan.base.errors import ShapeError
from foreplan.graph import Builder, Op, TensorType, View, register
from foreplan.graph.axes import Axes, Factors
from foreplan.graph.op import Arrays, Cotangents, Types, Values, only
from foreplan.ops.shape import ViewOp


@dataclass(frozen=True)
class Mark(ViewOp):
    """An op whose output is its first input, as it is."""

    def view(self, input: TensorType, strides: tuple[int, ...]) -> View | None:
        """Always."""
        return View(0, strides)

    def indexing(self, inputs: Types, outputs: Types) -> Axes:
        """Element by element."""
        f, y = Factors(), outputs[0]
        return f.axes([f.spread("a", x.shape, y.rank) for x in inputs], [f.row("a", y.shape)])

    def compute(self, inputs: Arrays, outputs: Arrays, workspace: np.ndarray) -> None:
        """Copy."""
        np.copyto(outputs[0], inputs[0])


@register
@dataclass(frozen=True)
class StopGradient(Mark):
    """x as it is, of which no gradient comes back (`jax.lax.stop_gradient`, `torch.Tensor.detach`)."""

    name: ClassVar[str] = "stop_gradient"

    def infer(self, inputs: Types) -> tuple[TensorType, ...]:
        """The type of x."""
        (x,) = inputs
        return (x,)

    def dependencies(self, inputs: Values) -> Values:
        """None."""
        return ()

    def vjp(self, b: Builder, inputs: Values, outputs: Values, cotangents: Cotangents) -> Sequence[None]:
        """Nothing."""
        return [None]


@register
@dataclass(frozen=True)
class StraightThrough(Mark):
    """y as it is, whose gradient is taken for that of x (Bengio, Léonard and Courville, 2013, arXiv:1308.3432).

    Inputs: y and x, of one type. Output: y.
    """

    name: ClassVar[str] = "straight_through"

    def infer(self, inputs: Types) -> tuple[TensorType, ...]:
        """The type of both."""
        y, x = inputs
        if x != y:
            raise ShapeError(f"the result, {y}, and what stands for its gradient, {x}, must have one type")
        return (y,)

    def dependencies(self, inputs: Values) -> Values:
        """What stands for the gradient of y."""
        return inputs[1:]

    def vjp(self, b: Builder, inputs: Values, outputs: Values, cotangents: Cotangents) -> Cotangents:
        """The cotangent of y for x."""
        return [None, only(cotangents)]


@register
@dataclass(frozen=True)
class ByMode(Mark):
    """What a model gives that computes one thing in inference and another in training, as `if self.training` does.

    Inputs: the result of inference and that of training, of one type. Output: the one that the mode asks for.
    """

    name: ClassVar[str] = "by_mode"

    def infer(self, inputs: Types) -> tuple[TensorType, ...]:
        """The type of both."""
        inference, training = inputs
        if inference != training:
            raise ShapeError(f"what inference gives, {inference}, and training, {training}, must have one type")
        return (inference,)

    def reached(self, inputs: Values) -> Values:
        """The result of inference."""
        return inputs[:1]

    def vjp(self, b: Builder, inputs: Values, outputs: Values, cotangents: Cotangents) -> Cotangents:
        """That of inference: the training form is the other input."""
        return [only(cotangents), None]


@register
@dataclass(frozen=True)
class Quantised(Mark):
    """y as it is, restored from stored integers: weights that a step may train in float32 (see `quantised_weights`).

    Inputs: y, the integers, their scale, and perhaps their zero point, which broadcast to y. Output: y.
    """

    name: ClassVar[str] = "quantised"
    moves: ClassVar[bool] = False  # what a weight is restored from is computed with

    def infer(self, inputs: Types) -> tuple[TensorType, ...]:
        """The type of y."""
        y, codes, *_ = inputs
        kinds = [each.dtype.category in ("int", "uint") for each in inputs]
        if codes.shape != y.shape or kinds not in ([False, True, False], [False, True, False, True]):
            raise ShapeError(f"{y} is restored from integers of its shape, a scale and a zero point, not from {inputs}")
        return (y,)

    def reached(self, inputs: Values) -> Values:
        """None."""
        return ()

    def vjp(self, b: Builder, inputs: Values, outputs: Values, cotangents: Cotangents) -> Sequence[None]:
        """Nothing: what is trained has a float32 weight in the place of the integers."""
        return [None] * len(inputs)


@register
@dataclass(frozen=True)
class Gradient(Op):
    """The gradient of y with respect to each x, in the form that y is computed in: a pass puts its nodes here.

    Inputs: y, one number, and tensors that it is computed from. Outputs: one for each x, of its type.
    """

    name: ClassVar[str] = "gradient"

    def infer(self, inputs: Types) -> tuple[TensorType, ...]:
        """The types of all but the first."""
        y, *xs = inputs
        if y.shape or not y.dtype.is_float or not xs:
            raise ShapeError(f"a gradient is that of one floating-point number, and was asked of {y}; sum it up first")
        if wrong := [x for x in xs if not x.dtype.is_float]:
            raise ShapeError(f"there is no gradient with respect to {wrong[0]}; only floating-point tensors have one")
        return tuple(xs)

    def flops(self, inputs: Types, outputs: Types) -> int:
        """Nothing of its own."""
        return 0
