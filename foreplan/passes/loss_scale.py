"""Dynamic loss scaling: small gradients of a type with few exponents are kept from becoming zero.

The cotangent of the loss is a scale, so that every gradient is larger by it; the update divides by it again. The scale
is halved, and the update left out, where a gradient is not finite; it is doubled after `GROWTH` steps without that
(Micikevicius et al., 2018, arXiv:1710.03740).
"""

from __future__ import annotations

from dataclasses import dataclass

from foreplan.graph import Builder, DType, Fill, Kind, TensorType, Value
from foreplan.graph.types import FLOAT32, INT64
from foreplan.ops.expr import Arg, Expr, call, maximum, minimum, where
from foreplan.ops.map import elementwise, elementwise_many

FIRST, LEAST, MOST = 2.0**16, 1.0, 2.0**24
GROWTH = 2000  # steps


def is_scaled(dtype: DType) -> bool:
    """Whether gradients of this type need a scale: float16, whose least number above zero is 2^-24."""
    return dtype.name == "float16"


@dataclass(frozen=True)
class LossScale:
    """What is stored for it.

    Attributes:
        scale: float32[], the cotangent of the loss.
    """

    scale: Value

    @classmethod
    def stored(cls, b: Builder) -> LossScale:
        """A new one."""
        return cls(b.store("loss_scale", TensorType(FLOAT32, ()), Kind.STATE, Fill(FIRST)))

    def updates(self, b: Builder, finite: Value) -> dict[Value, Value]:
        """The next scale, and how many steps it has been good for, from whether all gradients were finite."""
        good = b.store("loss_scale/good_steps", TensorType(INT64, ()), Kind.STATE, Fill(0))
        scale, steps, ok = Arg(0), Arg(1) + 1, Arg(2)
        grows = steps >= GROWTH
        halved, doubled = maximum(scale * 0.5, LEAST), minimum(scale * 2.0, MOST)
        exprs = (where(ok, where(grows, doubled, scale), halved), where(ok, where(grows, 0, steps), 0))
        next_scale, next_good = elementwise_many(b, exprs, self.scale, good, finite, name="loss_scale/next")
        return {self.scale: next_scale, good: next_good}


def is_finite(b: Builder, x: Value) -> Value:
    """Whether a number is neither infinite nor NaN."""

    def test(x: Expr) -> Expr:
        return call("not", call("or", call("isnan", x), call("isinf", x)))

    return elementwise(b, test, x, name="all_finite")
