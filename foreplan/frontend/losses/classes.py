"""Losses of scores for classes, with the index of the right class as target."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from foreplan.base.arguments import listed, number_in, whole
from foreplan.base.errors import ShapeError
from foreplan.frontend.losses.final import before_softmax
from foreplan.frontend.losses.loss import Loss
from foreplan.frontend.nn import functions as nn
from foreplan.frontend.tracing.elementwise import apply, convert, select
from foreplan.frontend.tracing.tensor import Tensor, as_tensor, wrap
from foreplan.frontend.tracing.tracer import current
from foreplan.graph import TensorType
from foreplan.graph.types import INT64
from foreplan.ops import loss as ops
from foreplan.ops.expr import call
from foreplan.ops.reduce import normalize_axes

_numpy: Any = np  # on tensors, which its type stubs do not know


@dataclass(frozen=True)
class OfClasses(Loss):
    """Weighted mean, over the items that count, of a number for each item.

    Attributes:
        ignore_index: the target of items that do not count.
        axis: of the classes; by the rule of `CrossEntropy` where it is None.
        weight: of each class, a number; an item's weight is that of its target. None: all are 1.
    """

    ignore_index: int = -100
    axis: int | None = None
    weight: Sequence[float] | None = None

    def __post_init__(self) -> None:
        least, most = -(1 << 63), (1 << 63) - 1
        object.__setattr__(self, "ignore_index", whole("ignore_index", self.ignore_index, least, most))
        object.__setattr__(self, "axis", None if self.axis is None else whole("axis", self.axis, least, most))
        if self.weight is not None:
            given = listed("weight", self.weight)
            weights = tuple(number_in("the weight of a class", each, 0.0, math.inf) for each in given)
            object.__setattr__(self, "weight", weights)

    def class_axis(self, rank: int) -> int:
        """The axis of the classes among `rank` axes."""
        if rank < 2 and self.axis is None:
            raise ShapeError(f"{self.name} needs outputs with at least two axes, [batch, classes]")
        if self.axis is not None:
            return normalize_axes(self.axis, rank)[0]
        return rank - 1 if rank < 4 else 1

    def inputs(self, *outputs: TensorType) -> dict[str, TensorType]:
        """`target`."""
        (logits,) = outputs
        axis = self.class_axis(logits.rank)
        return {"target": TensorType(INT64, logits.shape[:axis] + logits.shape[axis + 1 :])}

    def class_weights(self, classes: int) -> Tensor | None:
        """Of the classes."""
        if self.weight is None:
            return None
        if len(self.weight) != classes:
            raise ShapeError(f"{self.name} has {len(self.weight)} weights, and there are {classes} classes")
        return as_tensor(np.array(self.weight, np.float32))

    def mean(self, losses: Tensor, target: Tensor, weights: Tensor | None, further: Tensor | None = None) -> Tensor:
        """The weighted mean of losses, which are 0 where they do not count; `further` is added to their sum."""
        counts = apply("counted", lambda t: call("ne", t, self.ignore_index), target)
        if weights is None:
            share, least = convert(counts, losses.dtype), 1.0
        else:
            known: Tensor = _numpy.take(weights, select(counts, target, 0), axis=0)
            share, least = convert(select(counts, known, 0.0), losses.dtype), 0.0
            losses = losses * share
        total = losses.sum() if further is None else losses.sum() + further
        size = share.sum()
        if least:
            return total / np.maximum(size, least)
        return total / apply("size", lambda s: call("where", call("eq", s, 0.0), 1.0, s), size)


@dataclass(frozen=True)
class CrossEntropy(OfClasses):
    """Mean of −log softmax(logits)[target] over the items whose target is not `ignore_index`.

    The logits are [batch, classes] or [batch, tokens, classes], or maps [batch, classes, *S] (four axes and more);
    `target` is int64 of that shape without the classes. A softmax or log-softmax that ends the model is taken into the
    loss, and a note says so. Parameters and their meaning are those of PyTorch's CrossEntropyLoss with the reduction
    "mean", but for `axis`; if nothing counts, the loss is 0.

    Attributes:
        ignore_index: the target of items that do not count.
        axis: of the classes; by the rule above where it is None.
        weight: of each class, a number; the loss is the mean weighted by that of each item's target. None: all are 1.
        label_smoothing: the share of the target that is spread over all classes (Szegedy et al. 2016,
            arXiv:1512.00567, section 7), in [0, 1).
    """

    name: ClassVar[str] = "cross_entropy"
    label_smoothing: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "label_smoothing", number_in("label_smoothing", self.label_smoothing, 0.0, 1.0))

    def __call__(self, *tensors: Tensor, **inputs: Tensor) -> Tensor:
        """Args: logits and target (by position or name). Returns: a scalar."""
        logits, target = self.arguments(tensors, inputs)
        axis = self.class_axis(logits.ndim)
        logits = before_softmax(logits, axis, self.name)
        weights, smoothing = self.class_weights(logits.shape[axis]), self.label_smoothing
        if not smoothing:
            return self.mean(nn.cross_entropy(logits, target, axis, self.ignore_index), target, weights)
        op = ops.CrossEntropy(axis, self.ignore_index)
        losses, lse = map(wrap, current().at().node(op, logits.value, target.value))
        spread = self._spread(logits, lse, target, axis, weights) * (smoothing / max(1, logits.shape[axis]))
        return self.mean(losses * (1.0 - smoothing), target, weights, spread)

    def _spread(self, logits: Tensor, lse: Tensor, target: Tensor, axis: int, weights: Tensor | None) -> Tensor:
        """Σ −log softmax(logits), weighted, over all classes of the items that count: no softmax is kept for it."""
        along = (*lse.shape[:axis], 1, *lse.shape[axis:])
        terms = lse.reshape(along) - logits
        if weights is not None:
            terms = terms * weights.reshape([-1 if i == axis else 1 for i in range(logits.ndim)])
        counts = apply("counted", lambda t: call("ne", t, self.ignore_index), target)
        return select(counts, terms.sum(axis), 0.0).sum()


@dataclass(frozen=True)
class NegativeLogLikelihood(OfClasses):
    """Mean of −x[target] over the items whose target is not `ignore_index`; x are logarithms of probabilities.

    Shapes are those of `CrossEntropy`, parameters those of PyTorch's NLLLoss. A log-softmax that ends the model is
    taken into the loss, and a note says so.
    """

    name: ClassVar[str] = "nll"

    def __call__(self, *tensors: Tensor, **inputs: Tensor) -> Tensor:
        """Args: logarithms of probabilities, and target (by position or name). Returns: a scalar."""
        x, target = self.arguments(tensors, inputs)
        axis = self.class_axis(x.ndim)
        logits, weights = before_softmax(x, axis, self.name, ("log_softmax",)), self.class_weights(x.shape[axis])
        if logits is not x:
            return self.mean(nn.cross_entropy(logits, target, axis, self.ignore_index), target, weights)
        counts = apply("counted", lambda t: call("ne", t, self.ignore_index), target)
        at = select(counts, target, 0).reshape((*target.shape[:axis], 1, *target.shape[axis:]))
        picked: Tensor = _numpy.take_along_axis(x, at, axis)
        picked = convert(picked, picked.value.dtype.wide).reshape(target.shape)
        return self.mean(select(counts, -picked, 0.0), target, weights)
