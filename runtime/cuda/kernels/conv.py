"""Convolution and its gradients as products whose columns are read from the images, without a copy of them; those of
one input channel a group by kernels of their own.
"""

from __future__ import annotations

import math

from foreplan.graph import Op, Window
from foreplan.graph.op import Windows
from foreplan.ops.conv.ops import Conv, ConvDataGrad, ConvOp, ConvWeightGrad
from foreplan.ops.map import merged_axes
from foreplan.runtime.cuda.device import Device
from foreplan.runtime.cuda.kernels import depthwise
from foreplan.runtime.cuda.kernels.product import Batch, Images, Plain, Product, product_kernel
from foreplan.runtime.cuda.kernels.reduce import Axis
from foreplan.runtime.cuda.launch import LaunchKernel, added_in_place, input_at, output_at
from foreplan.runtime.kernel import Refused

MOST_AXES = 3


def conv(op: Op, inputs: Windows, outputs: Windows, device: Device) -> LaunchKernel:
    """y[position, filter] = Σ x · w over taps and channels."""
    assert isinstance(op, Conv)
    if depthwise.serves(op, inputs, outputs):
        return depthwise.results(op, inputs, outputs, device)
    x, w, *rest = inputs
    (y,) = outputs
    _check(x, w)
    filters, own = w.shape[0] // op.groups, w.shape[1]
    added, step = None, 0
    if rest:
        vector = len(rest[0].shape) == 1
        step = rest[0].strides[0 if vector else 1]
        rows = (Axis(1, 0),) if vector else _positions(rest[0])
        added = Plain(input_at(2), rest[0].type.dtype, rows, (Axis(filters, step),))
    product = Product(
        rows=_count(y),
        columns=filters,
        terms=math.prod(w.shape[1:]),
        a=_under_windows("Windows", op, x, w, y),
        b=Plain(input_at(1), w.type.dtype, (Axis(filters, w.strides[0]),), _taps(w, 1)),
        results=Plain(output_at(0), y.type.dtype, _positions(y), (Axis(filters, y.strides[1]),)),
        added=added,
        batch=_groups(op, own * x.strides[1], filters * w.strides[0], filters * y.strides[1], filters * step),
        nbytes=y.type.nbytes,
    )
    return product_kernel(product, device, added_in_place(inputs, y), parts_allowed=True)


def data_gradient(op: Op, inputs: Windows, outputs: Windows, device: Device) -> LaunchKernel:
    """dx[element, channel] = Σ g · w over taps and filters: g is read where the tap of a window lies on the element."""
    assert isinstance(op, ConvDataGrad)
    if depthwise.serves(op, inputs, outputs):
        return depthwise.results(op, inputs, outputs, device)
    g, w, *rest = inputs
    (dx,) = outputs
    _check(g, w)
    filters, own = w.shape[0] // op.groups, w.shape[1]
    step = rest[0].strides[1] if rest else 0
    product = Product(
        rows=_count(dx),
        columns=own,
        terms=filters * math.prod(w.shape[2:]),
        a=Images(
            along="Windows",
            start=input_at(0),
            dtype=g.type.dtype,
            strides=g.strides,
            extents=g.shape[2:],
            position_steps=(1,) * len(op.strides),
            tap_steps=tuple(-step for step in op.dilations),
            shifts=tuple(low for low, _ in op.pads),
            divisors=op.strides,
            positions=op.spatial,
            taps=w.shape[2:],
            channels=filters,
        ),
        b=Plain(input_at(1), w.type.dtype, (Axis(own, w.strides[1]),), _taps(w, 0, filters)),
        results=Plain(output_at(0), dx.type.dtype, _positions(dx), (Axis(own, dx.strides[1]),)),
        added=Plain(input_at(2), rest[0].type.dtype, _positions(rest[0]), (Axis(own, step),)) if rest else None,
        batch=_groups(op, filters * g.strides[1], filters * w.strides[0], own * dx.strides[1], own * step),
        nbytes=dx.type.nbytes,
    )
    return product_kernel(product, device, added_in_place(inputs, dx), parts_allowed=True)


def weight_gradient(op: Op, inputs: Windows, outputs: Windows, device: Device) -> LaunchKernel:
    """dw[filter, tap and channel] = Σ g · x over positions."""
    assert isinstance(op, ConvWeightGrad)
    if depthwise.serves(op, inputs, outputs):
        return depthwise.weights(op, inputs, outputs, device)
    x, g, *rest = inputs
    (dw,) = outputs
    _check(x, dw)
    filters, own = dw.shape[0] // op.groups, dw.shape[1]
    step = rest[0].strides[0] if rest else 0
    product = Product(
        rows=filters,
        columns=math.prod(dw.shape[1:]),
        terms=_count(g),
        a=Plain(input_at(1), g.type.dtype, (Axis(filters, g.strides[1]),), _positions(g)),
        b=_under_windows("Taps", op, x, dw, g),
        results=Plain(output_at(0), dw.type.dtype, (Axis(filters, dw.strides[0]),), _taps(dw, 1)),
        added=Plain(input_at(2), rest[0].type.dtype, (Axis(filters, step),), _taps(rest[0], 1)) if rest else None,
        batch=_groups(op, filters * g.strides[1], own * x.strides[1], filters * dw.strides[0], filters * step),
        nbytes=dw.type.nbytes,
    )
    return product_kernel(product, device, added_in_place(inputs, dw), parts_allowed=True)


def _under_windows(along: str, op: ConvOp, x: Window, w: Window, y: Window) -> Images:
    """The images x as a convolution reads them: in windows of w's taps, one for each of y's positions."""
    return Images(
        along=along,
        start=input_at(0),
        dtype=x.type.dtype,
        strides=x.strides,
        extents=x.shape[2:],
        position_steps=op.strides,
        tap_steps=op.dilations,
        shifts=tuple(-low for low, _ in op.pads),
        divisors=(1,) * len(op.strides),
        positions=y.shape[2:],
        taps=w.shape[2:],
        channels=w.shape[1],
    )


def _check(x: Window, w: Window) -> None:
    if len(x.shape) - 2 > MOST_AXES or not x.type.dtype.is_float:
        raise Refused(f"a convolution of {x.type}")


def _count(images: Window) -> int:
    """Items and positions."""
    return images.shape[0] * math.prod(images.shape[2:])


def _positions(images: Window) -> tuple[Axis, ...]:
    """The axes of items and positions, neighbours merged."""
    axes = merged_axes(images.shape, [images.strides], (0, *range(2, len(images.shape))))
    return tuple(Axis(n, steps[0]) for n, steps in axes)


def _taps(w: Window, last: int, extent: int | None = None) -> tuple[Axis, ...]:
    """The axes of taps, and of one axis of the weights behind them, or a part of it."""
    taps = [Axis(n, step) for n, step in zip(w.shape[2:], w.strides[2:])]
    return (*taps, Axis(w.shape[last] if extent is None else extent, w.strides[last]))


def _groups(op: ConvOp, *strides: int) -> tuple[Batch, ...]:
    """The axis of groups: bytes from one to the next of each operand."""
    return (Batch(op.groups, *strides),) if op.groups > 1 else ()
