"""The common part of convolution and its gradients: attributes, windows, checks, and layouts that they read."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from foreplan.base.errors import ShapeError
from foreplan.graph import Op, TensorType
from foreplan.graph.axes import Dims, Factors, Part
from foreplan.graph.types import Shape
from foreplan.ops.conv.depthwise import is_depthwise
from foreplan.ops.window import Pads, Windows, count_positions, spatial_is_dense, window_dims


@dataclass(frozen=True)
class ConvOp(Op):
    """The common part of convolution and its gradients.

    Attributes:
        strides: elements from one window to the next, an entry a spatial axis.
        pads: (low, high) zeros around each spatial axis; negative ones crop.
        dilations: elements from one tap to the next.
        groups: number of independent groups that channels in and out fall into.
    """

    strides: Shape
    pads: Pads
    dilations: Shape
    groups: int = 1

    def accepts_strides(self, index: int, input: TensorType, strides: tuple[int, ...]) -> bool:
        """Images whose channels are dense: a range of channels or of items. Weights, where there is one group of
        channels, whose every output channel is dense: those of a range of input channels.
        """
        if self._is_weight(index):
            return self.groups == 1 and strides[1:] == input.strides[1:] and strides[0] >= input.strides[0]
        is_image = input.rank == len(self.strides) + 2
        return is_image and spatial_is_dense(input.shape, strides, input.dtype.itemsize)

    def walked(self, f: Factors, x: Shape, w: Shape) -> tuple[Dims, Dims, Dims]:
        """The axes of images [N, C, *S], of weights [K, C/groups, *R] and of results [N, K, *O]."""
        windows, positions = window_dims(f, self.windows(x[2:], w[2:]))
        n, channels, weights = f.dim(("n", x[0])), f.dim(("g", self.groups), ("c", w[1])), self.weights(f, w)
        return (n, channels, *windows), weights, (n, weights[0], *positions)

    def weights(self, f: Factors, w: Shape) -> Dims:
        """The axes of weights [K, C/groups, *R]."""
        return f.dim(("g", self.groups), ("k", w[0] // self.groups)), f.dim(("c", w[1])), *f.row("r", w[2:])

    def groups_left(self, part: Part) -> int:
        """The groups that a part has."""
        return part.places["g"][1] if "g" in part.places else self.groups

    def _is_weight(self, index: int) -> bool:
        return index == 1

    @property
    def geometry(self) -> tuple[Shape, Pads, Shape, int]:
        """The attributes that the op shares with its gradients."""
        return self.strides, self.pads, self.dilations, self.groups

    def windows(self, extent: Shape, kernel: Shape) -> Windows:
        """The windows over images of this extent."""
        positions = count_positions(extent, kernel, self.strides, self.pads, self.dilations)
        return Windows(extent, kernel, self.strides, self.pads, self.dilations, positions)

    def is_pointwise(self, kernel: Shape) -> bool:
        """Whether every window is one element and every element has one."""
        return set(kernel) == {1} == set(self.strides) and not any(map(any, self.pads))

    def is_depthwise(self, x: TensorType | np.ndarray, w: TensorType | np.ndarray) -> bool:
        """Whether a convolution of images x with weights w treats each channel by itself."""
        return is_depthwise(x.shape[1], w.shape, self.groups)

    def check(self, x: TensorType, w: TensorType) -> None:
        """Raise unless images [N, C, …] and weights [K, C/groups, …] fit each other."""
        if x.rank != w.rank or x.rank < 3 or x.dtype != w.dtype:
            raise ShapeError(
                "needs images [N, C, …] and weights [K, C/groups, …] with the same element type and number of axes, "
                f"and got {x} and {w}"
            )
        if not x.shape[1]:
            raise ShapeError(f"images need at least one channel, and got {x}")
        if not w.shape[0]:
            raise ShapeError(f"weights need at least one output channel, and got {w}")
        if self.groups < 1 or x.shape[1] != w.shape[1] * self.groups or w.shape[0] % self.groups:
            raise ShapeError(
                f"weights {w} in {self.groups} groups need {w.shape[1] * self.groups} image channels and a multiple of "
                f"{self.groups} output channels, and the images are {x}"
            )
