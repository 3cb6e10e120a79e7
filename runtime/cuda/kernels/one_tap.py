"""Convolutions of one tap and their gradients as products by cuBLASLt: each position of a window is a row.

With strides, windows are some elements of the images. One call reads or writes these where they lie, if it can.
Otherwise they are gathered into the workspace before the product, or a data gradient is spread from there behind it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from foreplan.graph import Window
from foreplan.graph.layouts import channels_last, lie_alike
from foreplan.graph.op import Windows
from foreplan.graph.types import Shape
from foreplan.ops.conv.ops import ConvDataGrad, ConvOp, ConvWeightGrad
from foreplan.ops.expr import parse_expr
from foreplan.ops.map import merged_axes
from foreplan.runtime.cuda.device import Device
from foreplan.runtime.cuda.kernels.map import Tensor, broadcast, copies, map_launches
from foreplan.runtime.cuda.kernels.multiply import Operands, Work, calls_of
from foreplan.runtime.cuda.launch import Address, Clear, Instruction, Multiply, input_at, output_at, workspace_at
from foreplan.runtime.kernel import Refused

LEAST_ROWS = 64  # of each product of a batch; elements of images that would make fewer are gathered: assumed
Calls = Callable[[Operands], tuple[Multiply, ...]]


@dataclass(frozen=True)
class _Images:
    """Images, or those of their elements that are windows, and where the first one lies."""

    window: Window
    start: Address

    def tensor(self, *strides: int) -> Tensor:
        return Tensor(self.start, self.window.type.dtype, strides)

    @property
    def whole(self) -> Tensor:
        return broadcast(self.start, self.window, self.window.shape)


def one_tap(op: ConvOp, inputs: Windows, outputs: Windows, device: Device, tf32: bool) -> Work:
    """A convolution of one tap, or a gradient of one.

    Raises:
        Refused: it has several taps or groups, or windows in the padding, or BLAS cannot describe it.
    """
    w = outputs[0] if isinstance(op, ConvWeightGrad) else inputs[1]
    if op.groups > 1 or set(w.shape[2:]) != {1}:
        raise Refused("a convolution of groups, or of several taps")

    def calls(operands: Operands) -> tuple[Multiply, ...]:
        return calls_of(operands, device, tf32)

    if isinstance(op, ConvDataGrad):
        return _data_gradient(op, inputs, outputs, calls)
    return _of_windows(op, inputs, outputs, calls)


def _of_windows(op: ConvOp, inputs: Windows, outputs: Windows, calls: Calls) -> Work:
    """A convolution or a gradient of weights, which read images under windows."""
    x, y = inputs[0], inputs[1] if isinstance(op, ConvWeightGrad) else outputs[0]
    operands = _gradient_of_weights if isinstance(op, ConvWeightGrad) else _convolution
    read = _under_windows(op, x, input_at(0), y.shape[2:])
    if found := _directly(lambda: calls(operands(read, inputs, outputs)), read.window.shape == x.shape):
        return Work(found)
    gathered = _Images(channels_last(read.window.type), workspace_at())
    nbytes = gathered.window.type.nbytes
    return Work(
        calls=calls(operands(gathered, inputs, outputs)),
        before=copies(read.start, read.window, gathered.start, gathered.window),
        nbytes=nbytes,
        moved=2 * nbytes,
    )


def _data_gradient(op: ConvDataGrad, inputs: Windows, outputs: Windows, calls: Calls) -> Work:
    """Zeros or the summand first, unless every element has a window; then dx = g w at those that have one."""
    g, w, *added = inputs
    (dx,) = outputs
    written = _under_windows(op, dx, output_at(0), g.shape[2:])
    given = _Images(g, input_at(0))
    if written.window.shape == dx.shape:
        base = _Images(added[0], input_at(2)) if added else None
        return Work(calls(_rows(given, w, 0, written, base)))
    before: tuple[Instruction, ...] = (Clear(output_at(0), dx.type.nbytes),)
    moved = dx.type.nbytes
    if added:
        before = copies(input_at(2), added[0], output_at(0), dx)
        moved = 0 if lie_alike(added[0], dx) else 2 * dx.type.nbytes  # one that lies alike is assumed in place
    if found := _directly(lambda: calls(_rows(given, w, 0, written, written if added else None)), False):
        return Work(found, before, moved=moved)
    type = written.window.type.with_dtype(g.type.dtype.wide) if added else written.window.type
    product = _Images(channels_last(type), workspace_at())
    terms = [product.whole, *([written.whole] if added else [])]
    spread = map_launches([parse_expr("(a0 + a1)" if added else "a0")], type.shape, terms, [written.whole])
    return Work(
        calls=calls(_rows(given, w, 0, product, None)),
        before=before,
        after=spread,
        nbytes=type.nbytes,
        moved=moved + type.nbytes + (1 + len(added)) * written.window.type.nbytes,
    )


def _under_windows(op: ConvOp, images: Window, start: Address, positions: Shape) -> _Images:
    """The elements of images that are windows of one tap."""
    strides, axes = list(images.strides), zip(op.strides, op.pads, images.shape[2:], positions)
    for axis, (step, (low, _), extent, count) in enumerate(axes, 2):
        if low > 0 or (count - 1) * step - low >= extent:
            raise Refused("windows in the padding")
        start = start.behind(-low * images.strides[axis])
        strides[axis] *= step
    return _Images(images.viewed((*images.shape[:2], *positions), strides), start)


def _directly(calls: Callable[[], tuple[Multiply, ...]], whole: bool) -> tuple[Multiply, ...]:
    """The calls that read and write images where they lie; of some elements alone, one call, if that makes tiles of
    enough rows; none if these are better gathered.

    Args:
        whole: whether every element is a window.
    """
    if whole:
        return calls()
    try:
        found = calls()
    except Refused:
        return ()
    (first, *more) = found
    return () if more or (first.batch > 1 and first.d.columns < LEAST_ROWS) else found


def _convolution(x: _Images, inputs: Windows, outputs: Windows) -> Operands:
    """y = x wᵀ."""
    (_, w, *added), (y,) = inputs, outputs
    if any(each.shape != y.shape for each in added):
        raise Refused("a bias")  # rows without any bytes between them
    return _rows(x, w, 1, _Images(y, output_at(0)), _Images(added[0], input_at(2)) if added else None)


def _rows(x: _Images, w: Window, term: int, y: _Images, added: _Images | None) -> Operands:
    """Images times weights.

    Args:
        term: the axis of the weights that sums go over.
    """
    images = (x, y) if added is None else (x, y, added)
    positions = _positions(*images)
    steps = [tuple(each[i] for _, each in positions) for i in range(len(images))]
    tensors = [each.tensor(*lead, each.window.strides[1]) for each, lead in zip(images, steps)]
    column = 1 - term
    return Operands(
        shape=(*(extent for extent, _ in positions), w.shape[column]),
        terms=w.shape[term],
        a=tensors[0],
        b=Tensor(input_at(1), w.type.dtype, (*(0,) * (len(positions) - 1), w.strides[term], w.strides[column])),
        c=None if added is None else tensors[2],
        d=tensors[1],
    )


def _gradient_of_weights(x: _Images, inputs: Windows, outputs: Windows) -> Operands:
    """dw = gᵀ x."""
    (_, g, *added), (dw,) = inputs, outputs
    gradient = _Images(g, input_at(1))
    positions = _positions(gradient, x)
    if len(positions) > 1:
        raise Refused("images whose positions do not lie evenly")
    extent, (of_g, of_x) = positions[0]
    return Operands(
        shape=dw.shape[:2],
        terms=extent,
        a=gradient.tensor(g.strides[1], of_g),
        b=x.tensor(of_x, x.window.strides[1]),
        c=Tensor(input_at(2), added[0].type.dtype, added[0].strides[:2]) if added else None,
        d=Tensor(output_at(0), dw.type.dtype, dw.strides[:2]),
    )


def _positions(*images: _Images) -> list[tuple[int, tuple[int, ...]]]:
    """The axes of items and positions: extent, and bytes from one to the next of each; neighbours merged."""
    shape = images[0].window.shape
    return merged_axes(shape, [x.window.strides for x in images], (0, *range(2, len(shape))))
