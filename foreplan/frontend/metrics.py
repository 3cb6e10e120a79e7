"""Metrics: what a model is measured by beside its loss. They are losses that nobody minimises."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from foreplan.base.arguments import choice, whole
from foreplan.frontend import nn
from foreplan.frontend.losses.classes import OfClasses
from foreplan.frontend.losses.final import before_sigmoid
from foreplan.frontend.losses.loss import Loss
from foreplan.frontend.losses.named import LOSSES
from foreplan.frontend.tracing.elementwise import convert
from foreplan.frontend.tracing.tensor import Tensor
from foreplan.graph import TensorType

__all__ = ["Accuracy", "BinaryAccuracy", "accuracy", "binary_accuracy", "named", "top5"]


@dataclass(frozen=True)
class Accuracy(OfClasses):
    """The share of items whose target is among the k classes with the greatest scores.

    Scores, targets, items that do not count and weights of classes are as those of `CrossEntropy`. Of equal scores the
    first is greater.

    Attributes:
        ignore_index, axis, weight: see `CrossEntropy`.
        k: how many classes count.
    """

    name: ClassVar[str] = "accuracy"
    k: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "k", whole("k", self.k, 1))

    def __call__(self, *tensors: Tensor, **inputs: Tensor) -> Tensor:
        """Args: scores and target (by position or name). Returns: a scalar in [0, 1]."""
        scores, target = self.arguments(tensors, inputs)
        axis = self.class_axis(scores.ndim)
        classes = scores.shape[axis]
        if self.k == 1:
            right = np.argmax(scores, axis) == target
        else:
            _, best = nn.topk(scores, min(self.k, classes), axis)
            right = (best == np.expand_dims(target, axis)).any(axis)
        hits = convert(right & (target != self.ignore_index), scores.value.dtype)
        return self.mean(hits, target, self.class_weights(classes))


@dataclass(frozen=True)
class BinaryAccuracy(Loss):
    """The share of elements whose score is above 0 where their target is above 1/2, and not above it elsewhere.

    The scores are logits; of a model that ends in a sigmoid, they are what the sigmoid takes. Targets are as those of
    `BinaryCrossEntropy`.
    """

    name: ClassVar[str] = "binary_accuracy"

    def inputs(self, *outputs: TensorType) -> dict[str, TensorType]:
        """`target`."""
        (output,) = outputs
        return {"target": output}

    def __call__(self, *tensors: Tensor, **inputs: Tensor) -> Tensor:
        """Args: logits and target (by position or name). Returns: a scalar in [0, 1]."""
        logits, target = self.arguments(tensors, inputs)
        scores = before_sigmoid(logits, self.name)
        return convert((scores > 0.0) == (target > 0.5), logits.value.dtype).mean()


accuracy = Accuracy()
binary_accuracy = BinaryAccuracy()
top5 = Accuracy(k=5)

METRICS: dict[str, Loss] = {"accuracy": accuracy, "binary_accuracy": binary_accuracy, "top5": top5, **LOSSES}


def named(name: str) -> Loss:
    """The metric or loss of that name, with its defaults.

    Raises:
        UsageError: there is none; lists those there are.
    """
    return METRICS[choice("metric", name, METRICS)]


def __dir__() -> list[str]:
    return sorted(__all__)
