"""Losses that are an output of the model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from foreplan.frontend.losses.loss import Loss
from foreplan.frontend.tracing.tensor import Tensor


@dataclass(frozen=True)
class Mean(Loss):
    """Mean of the output itself."""

    name: ClassVar[str] = "mean"
    further: ClassVar[tuple[str, ...]] = ()

    def __call__(self, *tensors: Tensor, **inputs: Tensor) -> Tensor:
        """Args: one output. Returns: a scalar."""
        (output,) = self.arguments(tensors, inputs)
        return output.mean()


@dataclass(frozen=True)
class Sum(Loss):
    """Sum of the output itself."""

    name: ClassVar[str] = "sum"
    further: ClassVar[tuple[str, ...]] = ()

    def __call__(self, *tensors: Tensor, **inputs: Tensor) -> Tensor:
        """Args: one output. Returns: a scalar."""
        (output,) = self.arguments(tensors, inputs)
        return output.sum()
