"""Losses of distances between vectors, each of which is an output of the model."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from foreplan.base.arguments import flag, number_in
from foreplan.base.errors import ShapeError
from foreplan.frontend.losses.loss import Loss
from foreplan.frontend.tracing.elementwise import apply, convert
from foreplan.frontend.tracing.tensor import Tensor
from foreplan.graph import TensorType
from foreplan.ops import expr as ex
from foreplan.ops.expr import call

_LEAST = 1e-12  # is added to squares of norms, so that a vector of zeros has a gradient
_ROOT = 1e-30  # no root is taken of less


def _alike(name: str, *outputs: Any) -> None:
    shapes = [tuple(each.shape) for each in outputs]
    if len(set(shapes)) != 1 or not shapes[0]:
        raise ShapeError(
            f"{name} needs outputs of one shape, [batch, width], and they have {', '.join(map(str, shapes))}"
        )


@dataclass(frozen=True)
class CosineEmbedding(Loss):
    """Mean of 1 − cos(a, b) where the target is 1, and of max(0, cos(a, b) − margin) where it is −1.

    The model has two outputs a and b [batch, width]; `target` is [batch]. As PyTorch's CosineEmbeddingLoss.

    Attributes:
        margin: in [-1, 1].
    """

    name: ClassVar[str] = "cosine_embedding"
    reads: ClassVar[int] = 2
    margin: float = 0.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "margin", number_in("margin", self.margin, -1.0, math.nextafter(1.0, 2.0)))

    def inputs(self, *outputs: TensorType) -> dict[str, TensorType]:
        """`target`."""
        _alike(self.name, *outputs)
        return {"target": TensorType(outputs[0].dtype.wide, outputs[0].shape[:-1])}

    def __call__(self, *tensors: Tensor, **inputs: Tensor) -> Tensor:
        """Args: two outputs and target. Returns: a scalar."""
        a, b, target = self.arguments(tensors, inputs)
        _alike(self.name, a, b)
        a, b = (convert(x, x.value.dtype.wide) for x in (a, b))
        dot, aa, bb = (x.sum(-1) for x in (a * b, a * a, b * b))

        def term(dot: ex.Expr, aa: ex.Expr, bb: ex.Expr, target: ex.Expr) -> ex.Expr:
            cosine = dot * ex.rsqrt(aa + _LEAST) * ex.rsqrt(bb + _LEAST)
            apart = ex.where(call("eq", target, -1.0), ex.maximum(cosine - self.margin, 0.0), 0.0)
            return ex.where(call("eq", target, 1.0), 1.0 - cosine, apart)

        return apply(self.name, term, dot, aa, bb, target).mean()


@dataclass(frozen=True)
class TripletMargin(Loss):
    """Mean of max(0, d(a, p) − d(a, n) + margin) (Schroff et al. 2015, arXiv:1503.03832, with a norm for its square).

    The model has three outputs [batch, width]: an anchor a, p of its class and n of another one. d(x, y) is the norm of
    x − y + epsilon. As PyTorch's TripletMarginLoss.

    Attributes:
        margin: above 0.
        p: of the norm, at least 1.
        epsilon: keeps the gradient finite where two vectors are equal.
        swap: use d(p, n) where it is less than d(a, n) (Balntas et al. 2016).
    """

    name: ClassVar[str] = "triplet_margin"
    reads: ClassVar[int] = 3
    further: ClassVar[tuple[str, ...]] = ()
    margin: float = 1.0
    p: float = 2.0
    epsilon: float = 1e-6
    swap: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "margin", number_in("margin", self.margin, math.ulp(0.0), math.inf))
        object.__setattr__(self, "p", number_in("p", self.p, 1.0, math.inf))
        object.__setattr__(self, "epsilon", number_in("epsilon", self.epsilon, 0.0, math.inf))
        object.__setattr__(self, "swap", flag("swap", self.swap))

    def __call__(self, *tensors: Tensor, **inputs: Tensor) -> Tensor:
        """Args: three outputs. Returns: a scalar."""
        given = self.arguments(tensors, inputs)
        _alike(self.name, *given)
        anchor, positive, negative = (convert(x, x.value.dtype.wide) for x in given)
        apart = self._distance(anchor, negative)
        if self.swap:
            nearer: Any = np.minimum(apart, self._distance(positive, negative))
            apart = nearer
        together, margin = self._distance(anchor, positive), self.margin
        return apply(self.name, lambda t, a: ex.maximum(t - a + margin, 0.0), together, apart).mean()

    def _distance(self, x: Tensor, y: Tensor) -> Tensor:
        """Of each pair of vectors."""

        def power(x: ex.Expr, y: ex.Expr) -> ex.Expr:
            d = x - y + self.epsilon
            return call("square", d) if self.p == 2.0 else call("abs", d) ** self.p

        def root(s: ex.Expr) -> ex.Expr:
            s = ex.maximum(s, _ROOT)
            return ex.sqrt(s) if self.p == 2.0 else s ** (1.0 / self.p)

        return apply("distance", root, apply("power", power, x, y).sum(-1))
