"""Convolution over one, two or three spatial axes, its data gradient (transposed convolution) and weight gradient."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar, Unpack

import numpy as np

from foreplan.base.errors import ShapeError
from foreplan.graph import Builder, Op, TensorType, Value, as_dtype, register
from foreplan.graph.axes import Axes, Factors, Part, named
from foreplan.graph.op import Arrays, Cotangents, Types, Values, only
from foreplan.graph.types import Shape
from foreplan.ops.blocks import carve_bytes
from foreplan.ops.conv.common import ConvOp
from foreplan.ops.conv.depthwise import (
    conv_bytes,
    data_grad_bytes,
    depthwise_conv,
    depthwise_data_grad,
    depthwise_weight_grad,
    weight_grad_bytes,
)
from foreplan.ops.conv.kernels import (
    add_images,
    add_product,
    added_bytes,
    blocking,
    column_conv,
    column_data_grad,
    column_weight_grad,
    grouped,
    grouped_weights,
    product_bytes,
)
from foreplan.ops.conv.narrow import (
    conv_pieces,
    data_grad_pieces,
    narrow_conv,
    narrow_data_grad,
    narrow_weight_grad,
    weight_grad_pieces,
)
from foreplan.ops.map import convert, elementwise
from foreplan.ops.reduce import reduce
from foreplan.ops.shape import reshape
from foreplan.ops.window import (
    Geometry,
    Padding,
    Pads,
    PerAxis,
    Windows,
    count_positions,
    pads_left,
    per_axis,
    symmetric,
)


@register
@dataclass(frozen=True)
class Conv(ConvOp):
    """y[n, k, o] = Σ_{c, r} w[k, c, r] · x[n, c, o·stride − low + r·dilation] (+ bias[k]), a cross-correlation.

    Inputs: x [N, C, *S], w [K, C/groups, *R], optionally bias [K], which may be wide beside narrow images, or a summand
    as large as the output. Output: [N, K, *O].
    """

    name: ClassVar[str] = "conv"
    narrow: ClassVar[int] = 2
    accumulates: ClassVar[int] = 2

    def infer(self, inputs: Types) -> tuple[TensorType, ...]:
        """Positions along each axis as `count_positions` gives them."""
        x, w, *added = inputs
        self.check(x, w)
        positions = count_positions(x.shape[2:], w.shape[2:], self.strides, self.pads, self.dilations)
        y = x.with_shape((x.shape[0], w.shape[0], *positions))
        bias = x.with_shape(w.shape[:1])
        if len(added) > 1 or any(type not in (y, bias, bias.with_dtype(x.dtype.wide)) for type in added):
            raise ShapeError(
                f"the third input must be a bias {x.dtype}[{w.shape[0]}], or {y} to add to it, and is {added[0]}"
            )
        return (y,)

    def indexing(self, inputs: Types, outputs: Types) -> Axes:
        """A sum over a group's channels, of windows that are whole."""
        f, (x, w, *added) = Factors(), inputs
        images, weights, y = self.walked(f, x.shape, w.shape)
        more = [y if value.rank == len(y) else y[1:2] for value in added]
        return f.axes([images, weights, *more], [y], named(images[2:]) - named(y[2:]), {"c": "sum"})

    def part(self, part: Part) -> Op | None:
        """Of some groups, with the padding that is left."""
        if 0 in part.inputs[0]:
            return None  # nothing but padding
        return replace(self, pads=pads_left(self.pads, part), groups=self.groups_left(part))

    def vjp(self, b: Builder, inputs: Values, outputs: Values, cotangents: Cotangents) -> Cotangents:
        """The weights' gradient first: then x's bytes may be free for the data's."""
        (x, w, *added), g = inputs, only(cotangents)
        dw = b.apply(ConvWeightGrad(*self.geometry, kernel=w.shape[2:]), x, g) if b.wants(w) else None
        gradients: list[Value | None] = [None, dw]
        for value in added:
            axes = (0, *range(2, len(g.shape)))
            if value.type == g.type:
                gradients.append(g)
            else:
                wide = value.dtype != g.dtype
                gradients.append(reduce(b, "sum", g, axes, wide=wide) if b.wants(value) else None)
        if b.wants(x):
            gradients[0] = b.apply(ConvDataGrad(*self.geometry, spatial=x.shape[2:]), g, w)
        return gradients

    def overwrites(self, inputs: Types, outputs: Types) -> tuple[tuple[int, int], ...]:
        """What is added to may be changed in place, but for depth-wise convolutions, which add it at the end."""
        depthwise = self.is_depthwise(inputs[0], inputs[1])
        return ((0, 2),) if self._is_added_to(inputs, outputs) and not depthwise else ()

    def flops(self, inputs: Types, outputs: Types) -> int:
        """2·C/groups·taps an output element, and one more for a summand."""
        taps = math.prod(inputs[1].shape[1:])
        return outputs[0].size * (2 * taps + (len(inputs) > 2))

    def workspace(self, inputs: Types, outputs: Types) -> int:
        """Columns of a block of positions, and their product where it is not the output's own bytes."""
        (x, w), (y,) = inputs[:2], outputs
        if x.dtype.is_narrow:
            return carve_bytes(*conv_pieces(x, w, y))
        adds = self._is_added_to(inputs, outputs)
        if self.is_pointwise(w.shape[2:]):
            return added_bytes(y, self.groups) if adds else 0
        if self.is_depthwise(x, w):
            return conv_bytes(self.windows(x.shape[2:], w.shape[2:]), y)
        plan = blocking(x, w, y)
        return plan.column_bytes + (plan.row_bytes if adds else plan.joined_bytes)

    def compute(self, inputs: Arrays, outputs: Arrays, workspace: np.ndarray) -> None:
        """Columns of a block times the weights."""
        (x, w, *added), (y,) = inputs, outputs
        windows = self.windows(x.shape[2:], w.shape[2:])
        base = added if added and added[0].shape == y.shape else []
        if as_dtype(x.dtype).is_narrow:
            for product, items, positions in self.products(x, w, y, workspace):
                for array in added:
                    product += added_part(array, items, positions)
            return
        if self.is_depthwise(x, w) and not self.is_pointwise(w.shape[2:]):
            depthwise_conv(windows, x, w, y, workspace)
            for array in base:
                y += array
        else:
            for array in base:
                np.copyto(y, array)
            self._multiply(windows, x, w, y, workspace, clear=not base)
        if added and not base:
            y += added[0].reshape(-1, *(1 for _ in self.strides))

    def products(
        self, x: np.ndarray, w: np.ndarray, y: np.ndarray, workspace: np.ndarray
    ) -> Iterator[tuple[np.ndarray, slice, slice]]:
        """Of narrow elements, the sums that y is rounded from, block by block: see `narrow_conv`."""
        windows = self.windows(x.shape[2:], w.shape[2:])
        return narrow_conv(windows, self.groups, x, w, y, workspace)

    def _multiply(
        self, windows: Windows, x: np.ndarray, w: np.ndarray, y: np.ndarray, workspace: np.ndarray, clear: bool
    ) -> None:
        if not self.is_pointwise(w.shape[2:]):
            column_conv(windows, self.groups, x, w, y, workspace, clear)
        elif clear:
            np.matmul(grouped_weights(w, self.groups), grouped(x, self.groups), out=grouped(y, self.groups))
        else:
            weights = grouped_weights(w, self.groups)
            add_images(weights, grouped(x, self.groups), grouped(y, self.groups), workspace)

    def _is_added_to(self, inputs: Types, outputs: Types) -> bool:
        return len(inputs) > 2 and inputs[2] == outputs[0]


@register
@dataclass(frozen=True)
class ConvDataGrad(ConvOp):
    """dx[n, c, i] = Σ w[k, c, r] · g[n, k, o] over all (k, o, r) whose tap lies at i; also transposed convolution.

    Inputs: g [N, K, *O], w [K, C/groups, *R], optionally what is added to, as the output. Output: [N, C, *spatial].

    Attributes:
        spatial: spatial shape of the output; its windows must number g's.
    """

    name: ClassVar[str] = "conv_data_grad"
    narrow: ClassVar[int] = 2
    accumulates: ClassVar[int] = 2
    spatial: Shape = ()

    def infer(self, inputs: Types) -> tuple[TensorType, ...]:
        """Images of the spatial shape, if convolving them gives g's."""
        g, w, *base = inputs
        if g.rank != w.rank or g.rank < 3 or g.shape[1] != w.shape[0]:
            raise ShapeError(f"needs gradients [N, K, …] and weights [K, C/groups, …], and got {g} and {w}")
        dx = g.with_shape((g.shape[0], w.shape[1] * self.groups, *self.spatial))
        self.check(dx, w)
        positions = count_positions(self.spatial, w.shape[2:], self.strides, self.pads, self.dilations)
        if positions != g.shape[2:]:
            raise ShapeError(
                f"images of {list(self.spatial)} have {list(positions)} windows of {w}, and the gradient is {g}"
            )
        if len(base) > 1 or any(type != dx for type in base):
            raise ShapeError(f"the tensor that dx is added to must be {dx}, and is {base[0]}")
        return (dx,)

    def indexing(self, inputs: Types, outputs: Types) -> Axes:
        """A sum over a group's channels of results; images are whole."""
        f, (g, w, *base), dx = Factors(), inputs, outputs[0].shape
        n, weights = f.dim(("n", dx[0])), self.weights(f, w.shape)
        images, positions = f.row("s", dx[2:]), f.row("o", g.shape[2:])
        made = (n, f.dim(("g", self.groups), ("c", w.shape[1])), *images)
        whole = named((*images, *positions, *weights[2:]))
        return f.axes([(n, weights[0], *positions), weights, *[made] * len(base)], [made], whole, {"k": "sum"})

    def part(self, part: Part) -> Op | None:
        """Of some groups."""
        return replace(self, groups=self.groups_left(part))

    def vjp(self, b: Builder, inputs: Values, outputs: Values, cotangents: Cotangents) -> Cotangents:
        """It is linear in g (whose cotangent is a convolution) and in w; a summand gets the cotangent itself."""
        (g, w), t = inputs[:2], only(cotangents)
        dw = b.apply(ConvWeightGrad(*self.geometry, kernel=w.shape[2:]), t, g) if b.wants(w) else None
        dg = b.apply(Conv(*self.geometry), t, w) if b.wants(g) else None
        return [dg, dw, *[t] * (len(inputs) - 2)]

    def overwrites(self, inputs: Types, outputs: Types) -> tuple[tuple[int, int], ...]:
        """What is added to may be changed in place, but for depth-wise convolutions, which add it at the end."""
        in_place = len(inputs) == 3 and not self.is_depthwise(outputs[0], inputs[1])
        return ((0, 2),) if in_place else ()

    def flops(self, inputs: Types, outputs: Types) -> int:
        """As the convolution's, and an addition an element of what is added to."""
        return 2 * inputs[0].size * math.prod(inputs[1].shape[1:]) + (len(inputs) - 2) * outputs[0].size

    def workspace(self, inputs: Types, outputs: Types) -> int:
        """Columns of a block of positions, and gradients of several images side by side; or some channels of an image
        that is added to another.
        """
        (g, w), (dx,) = inputs[:2], outputs
        if g.dtype.is_narrow:
            return carve_bytes(*data_grad_pieces(dx, w, g, self.groups))
        if self.is_pointwise(w.shape[2:]):
            return added_bytes(dx, self.groups) if len(inputs) == 3 else 0
        if self.is_depthwise(dx, w):
            return data_grad_bytes(self.windows(self.spatial, w.shape[2:]), g)
        return blocking(dx, w, g).column_bytes + blocking(dx, w, g).joined_bytes

    def compute(self, inputs: Arrays, outputs: Arrays, workspace: np.ndarray) -> None:
        """Columns = transposed weights times gradients, added into the image tap by tap."""
        (g, w, *base), (dx,) = inputs, outputs
        windows = self.windows(self.spatial, w.shape[2:])
        if as_dtype(g.dtype).is_narrow:
            narrow_data_grad(windows, self.groups, dx, w, g, base[0] if base else None, workspace)
            return
        if self.is_depthwise(dx, w) and not self.is_pointwise(w.shape[2:]):
            depthwise_data_grad(windows, g, w, dx, workspace)
            for array in base:
                dx += array
            return
        for array in base:
            np.copyto(dx, array)
        if not self.is_pointwise(w.shape[2:]):
            column_data_grad(windows, self.groups, g, w, dx, workspace, clear=not base)
            return
        weights = grouped_weights(w, self.groups).swapaxes(-1, -2)
        if base:
            add_images(weights, grouped(g, self.groups), grouped(dx, self.groups), workspace)
        else:
            np.matmul(weights, grouped(g, self.groups), out=grouped(dx, self.groups))


@register
@dataclass(frozen=True)
class ConvWeightGrad(ConvOp):
    """dw[k, c, r] = Σ_{n, o} g[n, k, o] · x[n, c, o·stride − low + r·dilation].

    Inputs: x [N, C, *S], g [N, K, *O], optionally what is added to, as the output. Output: [K, C/groups, *kernel].

    Attributes:
        kernel: taps along each spatial axis.
        wide: narrow images give a wide result (see `DType.wide`).
    """

    name: ClassVar[str] = "conv_weight_grad"
    accumulates: ClassVar[int] = 2
    kernel: Shape = ()
    wide: bool = False

    def _is_weight(self, index: int) -> bool:
        return False

    def infer(self, inputs: Types) -> tuple[TensorType, ...]:
        """Weights of the kernel's shape, if convolving x with them gives g's shape."""
        x, g, *base = inputs
        if x.rank != g.rank or x.rank < 3 or x.shape[0] != g.shape[0]:
            raise ShapeError(f"needs images [N, C, …] and gradients [N, K, …], and got {x} and {g}")
        dw = x.with_shape((g.shape[1], x.shape[1] // max(1, self.groups), *self.kernel))
        self.check(x, dw)
        positions = count_positions(x.shape[2:], self.kernel, self.strides, self.pads, self.dilations)
        if positions != g.shape[2:] or x.dtype != g.dtype:
            raise ShapeError(f"{x} has {list(positions)} windows of {list(self.kernel)}, and the gradient is {g}")
        dw = dw.with_dtype(x.dtype.wide) if self.wide else dw
        if len(base) > 1 or any(type != dw for type in base):
            raise ShapeError(f"the tensor that dw is added to must be {dw}, and is {base[0]}")
        return (dw,)

    def indexing(self, inputs: Types, outputs: Types) -> Axes:
        """A sum over items and positions."""
        f, base = Factors(), inputs[2:]
        x, w, g = self.walked(f, inputs[0].shape, outputs[0].shape)
        inner = named(x[2:]) - named(g[2:]) - named(w[2:])
        return f.axes([x, g, *[w] * len(base)], [w], inner, dict.fromkeys({"n", *named(g[2:])}, "sum"))

    def part(self, part: Part) -> Op | None:
        """Of some groups and taps, with the padding that is left."""
        if 0 in part.inputs[0]:
            return None
        pads, groups = pads_left(self.pads, part), self.groups_left(part)
        return replace(self, pads=pads, groups=groups, kernel=part.outputs[0][2:])

    def vjp(self, b: Builder, inputs: Values, outputs: Values, cotangents: Cotangents) -> Cotangents:
        """It is linear in x and in g, with the cotangent as weights; a summand gets the cotangent itself."""
        (x, g), whole = inputs[:2], only(cotangents)
        t = convert(b, whole, x.dtype)
        dg = b.apply(Conv(*self.geometry), x, t) if b.wants(g) else None
        dx = b.apply(ConvDataGrad(*self.geometry, spatial=x.shape[2:]), g, t) if b.wants(x) else None
        return [dx, dg, *[whole] * (len(inputs) - 2)]

    def overwrites(self, inputs: Types, outputs: Types) -> tuple[tuple[int, int], ...]:
        """What is added to may be changed in place, but for depth-wise convolutions, which add it at the end."""
        in_place = len(inputs) == 3 and not self.is_depthwise(inputs[0], outputs[0])
        return ((0, 2),) if in_place else ()

    def flops(self, inputs: Types, outputs: Types) -> int:
        """As the convolution's, and an addition an element of what is added to."""
        return 2 * inputs[1].size * math.prod(outputs[0].shape[1:]) + (len(inputs) - 2) * outputs[0].size

    def workspace(self, inputs: Types, outputs: Types) -> int:
        """Columns of a block, gradients of several images side by side, and the block's product."""
        (x, g, *base), (dw,) = inputs, outputs
        if x.dtype.is_narrow:
            return carve_bytes(*weight_grad_pieces(x, dw, g, self.groups))
        if self.is_pointwise(self.kernel):
            return product_bytes(dw, self.groups) if x.shape[0] > 1 or base else 0
        if self.is_depthwise(x, dw):
            return weight_grad_bytes(self.windows(x.shape[2:], self.kernel), g)
        plan = blocking(x, dw, g)
        single = plan.blocks(g.shape) == 1 and not base
        return plan.column_bytes + plan.joined_bytes + (0 if single else product_bytes(dw, self.groups))

    def compute(self, inputs: Arrays, outputs: Arrays, workspace: np.ndarray) -> None:
        """Gradients of a block times its columns transposed, added up block by block."""
        (x, g, *base), (dw,) = inputs, outputs
        if not len(x):  # a sum of no terms
            np.copyto(dw, base[0] if base else 0)
            return
        windows = self.windows(x.shape[2:], self.kernel)
        if as_dtype(x.dtype).is_narrow:
            narrow_weight_grad(windows, self.groups, x, dw, g, base[0] if base else None, workspace)
            return
        if self.is_depthwise(x, dw) and not self.is_pointwise(self.kernel):
            depthwise_weight_grad(windows, x, g, dw, workspace)
            for array in base:
                dw += array
            return
        for array in base:
            np.copyto(dw, array)
        if not self.is_pointwise(self.kernel):
            column_weight_grad(windows, self.groups, x, g, dw, workspace, clear=not base)
            return
        images, grads, weights = grouped(x, self.groups), grouped(g, self.groups), grouped_weights(dw, self.groups)
        for n in range(len(x)):
            add_product(grads[n], images[n], weights, workspace, first=n == 0 and not base)

    def decompose(self, b: Builder, inputs: Values) -> Values | None:
        """Where narrow images give a wide result: a narrow one, converted."""
        x, g, *base = inputs
        if not self.wide or not x.dtype.is_narrow:
            return None
        dw = convert(b, b.apply(replace(self, wide=False), x, g), x.dtype.wide)
        return [elementwise(b, lambda x, y: x + y, dw, *base)] if base else [dw]


def added_part(array: np.ndarray, items: slice, positions: slice) -> np.ndarray:
    """What a block [items, K, positions] of a result is added to, of a vector [K] or of images [N, K, *O]."""
    return array[:, None] if array.ndim == 1 else grouped(array, 1)[items, 0, :, positions]


def _geometry(
    axes: int, strides: PerAxis = None, pads: Padding = None, dilations: PerAxis = None
) -> tuple[Shape, Pads, Shape]:
    """As attributes have it."""
    return per_axis(strides, axes), symmetric(pads, axes), per_axis(dilations, axes)


def conv(
    b: Builder, x: Value, w: Value, bias: Value | None = None, *, groups: int = 1, **geometry: Unpack[Geometry]
) -> Value:
    """Convolution of x [N, C, *S] with w [K, C/groups, *R]; one number stands for all axes."""
    op = Conv(*_geometry(len(x.shape) - 2, **geometry), groups)
    return b.apply(op, *((x, w) if bias is None else (x, w, bias)))


def conv_transpose(
    b: Builder,
    x: Value,
    w: Value,
    bias: Value | None = None,
    *,
    groups: int = 1,
    output_padding: PerAxis = 0,
    **geometry: Unpack[Geometry],
) -> Value:
    """Transposed convolution of x [N, C, *O] with w [C, K/groups, *R], as ONNX's ConvTranspose.

    An axis has stride·(extent − 1) + output_padding + dilation·(taps − 1) + 1 − low − high elements.
    """
    axes = len(x.shape) - 2
    (steps, pads, gaps), extra = _geometry(axes, **geometry), per_axis(output_padding, axes)
    # Elements added at the high end are high padding taken back, so that the windows number x's extent exactly.
    around = tuple((low, high - more) for (low, high), more in zip(pads, extra))
    spatial = tuple(
        step * (extent - 1) + gap * (taps - 1) + 1 - low - high
        for step, extent, gap, taps, (low, high) in zip(steps, x.shape[2:], gaps, w.shape[2:], around)
    )
    y = b.apply(ConvDataGrad(steps, around, gaps, groups, spatial), x, w)
    if bias is None:
        return y
    return elementwise(b, lambda y, c: y + c, y, reshape(b, bias, (-1, *(1 for _ in steps))))
