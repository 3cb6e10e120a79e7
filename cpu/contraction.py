"""Matrix products and convolutions by oneDNN: images lie with their channels last, weights are reordered each time.

Convolutions of 3 × 3 taps are taken to products of matrices where that is faster (`winograd`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from foreplan.cpu import library as c
from foreplan.cpu import primitives, winograd
from foreplan.cpu.copies import clear, copy
from foreplan.cpu.kernel import Kernel, Refused, Run, Windows, one_after_another
from foreplan.cpu.layouts import channels_last
from foreplan.cpu.primitives import OLD, After, Description, Following, Geometry, Primitive, argument_of, base_of, onto
from foreplan.cpu.rows import Rows, merged, rows_along
from foreplan.cpu.threads import one_thread
from foreplan.graph import DType, Op, TensorType, Window
from foreplan.graph.types import FLOAT32
from foreplan.ops.conv import Conv, ConvDataGrad, ConvOp, ConvWeightGrad
from foreplan.ops.conv_map import ConvMap, steps_of
from foreplan.ops.expr import parse_expr
from foreplan.ops.matmul import MatMul
from foreplan.units import align_up

ALIGNMENT = 64
PANEL = 384  # columns of a matrix that are copied where they would thrash a cache
SMALL = 2**21  # multiplications that do not repay waking other threads
FEW_ROWS = 64  # products of matrices of fewer do not repay the copy
POSITIONS = 512  # of images; a convolution of one tap at no more is a product with the weights as they lie
ADDED = 4 * 2**20  # bytes of a gradient that are made before they are added to another
Place = tuple[str, int, int]  # "in" or "out" and which, "scratch" or "zero"; and the byte of it
INPUT, WEIGHTS, OUTPUT, ZERO = ("in", 0, 0), ("in", 1, 0), ("out", 0, 0), ("zero", 0, 0)


@dataclass(frozen=True)
class Stage:
    """A primitive within a kernel: where each of its arguments lies.

    Attributes:
        arguments: by argument, an input, an output or the scratch memory, and the byte of it.
    """

    primitive: Primitive
    arguments: Mapping[int, Place]


@dataclass(frozen=True)
class Staged:
    """Primitives that run one after the other.

    Attributes:
        base: index of an input that is copied to output 0 first, unless it lies there; or -1.
        cleared: whether output 0 is zero at first.
    """

    stages: tuple[Stage, ...]
    workspace: int
    base: int = -1
    cleared: bool = False

    @property
    def overwrites(self) -> tuple[tuple[int, int], ...]:
        """What is added to may be changed in place."""
        return ((0, self.base),) if self.base >= 0 else ()

    def bind(self, inputs: Sequence[np.ndarray], outputs: Sequence[np.ndarray], workspace: np.ndarray) -> Run:
        """The primitives, bound."""
        arrays = {"in": inputs, "out": outputs, "scratch": [workspace], "zero": [_ZERO]}
        starts = {kind: [array.ctypes.data for array in found] for kind, found in arrays.items()}
        runs: list[Run] = []
        if self.base >= 0 and starts["in"][self.base] != starts["out"][0]:
            runs.append(copy(outputs[0], inputs[self.base]))
        if self.cleared:
            runs.append(clear(outputs[0]))
        for stage in self.stages:
            addresses = {a: starts[kind][index] + byte for a, (kind, index, byte) in stage.arguments.items()}
            runs.append(stage.primitive.bind(addresses))
        return one_after_another(*runs)


_ZERO = np.zeros(16, np.float32)


class _Plan:
    """Stages as they are added, and the scratch memory that they share."""

    def __init__(self) -> None:
        self.stages: list[Stage] = []
        self.kept = 0  # bytes of scratch memory that hold something between stages
        self.most = 0

    def keep(self, nbytes: int) -> Place:
        """Scratch memory until the end."""
        place = ("scratch", 0, self.kept)
        self.kept += align_up(nbytes, ALIGNMENT)
        self.most = max(self.most, self.kept)
        return place

    def run(self, primitive: Primitive, arguments: Mapping[int, Place]) -> None:
        """A stage, its own scratch memory above what is kept."""
        if primitive.scratchpad:
            arguments = {**arguments, c.SCRATCHPAD: ("scratch", 0, self.kept)}
            self.most = max(self.most, self.kept + align_up(primitive.scratchpad, ALIGNMENT))
        self.stages.append(Stage(primitive, arguments))

    def weights(self, given: Window, wanted: Description, place: Place) -> Place:
        """Weights in the layout that a primitive wants."""
        described = Description.of(given)
        if described == wanted:
            return place
        here = self.keep(wanted.nbytes)
        self.run(primitives.reorder(described, wanted), {c.SRC: place, c.DST: here})
        return here

    def positions(self, image: Window, place: Place) -> tuple[Window, Place]:
        """An image as a matrix of positions and channels: itself, where they lie so, or a copy."""
        rows = rows_along(image, 1)
        if rows is None:
            image, place = self.without_gaps(image, place)
            rows = rows_along(image, 1)
            assert rows is not None
        return _matrix(rows, image.type.dtype), place

    def without_gaps(self, image: Window, place: Place) -> tuple[Window, Place]:
        """An image that lies with channels last and without gaps: itself or a copy."""
        if image.is_compact and rows_along(image, 1) is not None:
            return image, place
        whole = channels_last(image.type)
        here = self.keep(whole.type.nbytes)
        self.run(primitives.reorder(Description.of(image), Description.of(whole)), {c.SRC: place, c.DST: here})
        return whole, here

    def finish(self, base: int = -1, cleared: bool = False) -> Staged:
        """The kernel."""
        return Staged(tuple(self.stages), self.most, base, cleared)


def matmul(op: Op, inputs: Windows, outputs: Windows) -> Staged:
    """A product, batched or not, perhaps added to a third input."""
    assert isinstance(op, MatMul)
    a, b = (_swapped(x) if flag else x for x, flag in zip(inputs, (op.transpose_a, op.transpose_b)))
    y = outputs[0]
    a, b, y = _flattened(a, b, y)
    rank = len(y.shape)
    a, b = (x.viewed((1,) * (rank - len(x.shape)) + x.shape, (0,) * (rank - len(x.shape)) + x.strides) for x in (a, b))
    _check(a, b, y)
    plan, base = _Plan(), len(inputs) - 1 if len(inputs) > 2 else -1
    if _thrashes(b) and rank == 2 and min(y.shape[0], b.shape[0]) >= FEW_ROWS:
        _by_panels(plan, a, b, y, base >= 0)
        return plan.finish(base)
    small = y.type.size * b.shape[-2] < SMALL
    with one_thread() if small else nullcontext():
        product = primitives.matmul(a, b, y, onto(base >= 0))
    plan.run(product, {c.SRC: INPUT, c.WEIGHTS: WEIGHTS, c.DST: OUTPUT})
    return plan.finish(base)


def _thrashes(b: Window) -> bool:
    """Whether the rows of a matrix lie so that too few sets of a cache hold a column, and oneDNN does not know.

    It copies matrices whose rows are a power of two apart; a multiple of 2 KiB is as bad. Those of bfloat16 it copies
    in any case.
    """
    row, column = b.strides[-2:]
    return (
        b.type.dtype == FLOAT32
        and column == FLOAT32.itemsize
        and row > 4096
        and row % 2048 == 0
        and row & (row - 1) != 0
    )


def _by_panels(plan: _Plan, a: Window, b: Window, y: Window, add: bool) -> None:
    """A product by some columns of b at a time, which are copied first."""
    item, products = y.type.dtype.itemsize, {}
    here = plan.keep(b.shape[0] * min(PANEL, b.shape[1]) * item)
    for start in range(0, b.shape[1], PANEL):
        width = min(PANEL, b.shape[1] - start)
        given, part = b.viewed((b.shape[0], width), b.strides), y.viewed((y.shape[0], width), y.strides)
        panel = Window.dense(given.type)
        if width not in products:
            products[width] = primitives.matmul(a, panel, part, onto(add))
        copied = primitives.reorder(Description.of(given), Description.of(panel))
        plan.run(copied, {c.SRC: ("in", 1, start * item), c.DST: here})
        plan.run(products[width], {c.SRC: INPUT, c.WEIGHTS: here, c.DST: ("out", 0, start * item)})


def _swapped(x: Window) -> Window:
    order = [*range(len(x.shape) - 2), len(x.shape) - 1, len(x.shape) - 2]
    return x.viewed([x.shape[i] for i in order], [x.strides[i] for i in order])


def _flattened(a: Window, b: Window, y: Window) -> tuple[Window, Window, Window]:
    """Leading axes made rows of one product, where b is one matrix."""
    if len(a.shape) <= 2 or (len(b.shape) > 2 and math.prod(b.shape[:-2]) > 1):
        return a, b, y
    rows, step = merged(a.shape[:-1], a.strides[:-1], a.strides[-2])
    if len(a.shape) != len(y.shape) or step < 0 or not y.is_dense:
        return a, b, y
    flat = a.viewed((rows, a.shape[-1]), (step, a.strides[-1]))
    return flat, b.viewed(b.shape[-2:], b.strides[-2:]), Window.dense(y.type.with_shape((rows, y.shape[-1])))


def _check(*windows: Window) -> None:
    """Raise for what no kernel here takes."""
    for x in windows:
        if x.type.dtype.name not in ("float32", "bfloat16") or not x.type.size or any(step < 0 for step in x.strides):
            raise Refused(f"{x.type} with the strides {x.strides}")


def _image(x: Window) -> Window:
    """Images whose axes of extent 1 have the strides of channels last: oneDNN knows layouts by their strides."""
    rank, step, steps = len(x.shape), x.type.dtype.itemsize, list(x.strides)
    for axis in (1, 3, 2, 0) if rank == 4 else reversed(range(rank)):
        if x.shape[axis] == 1:
            steps[axis] = step
        step = steps[axis] * x.shape[axis]
    return x.viewed(x.shape, steps)


def _geometry(op: ConvOp) -> Geometry:
    if any(pad < 0 for pads in op.pads for pad in pads):
        raise Refused("negative padding")
    low, high = ((pads[i] for pads in op.pads) for i in (0, 1))
    return Geometry(op.strides, op.dilations, tuple(low), tuple(high))


def _grouped(w: Window, groups: int) -> Window:
    """Weights [K, C/groups, …] as [groups, K/groups, C/groups, …], as oneDNN takes them."""
    if groups == 1:
        return w
    each = w.shape[0] // groups
    return w.viewed((groups, each, *w.shape[1:]), (each * w.strides[0], *w.strides))


def conv(op: Op, inputs: Windows, outputs: Windows) -> Kernel:
    """A convolution, with a bias or added to what there is."""
    assert isinstance(op, Conv)
    after = [(OLD if x.shape == outputs[0].shape else "add", i) for i, x in enumerate(inputs) if i > 1]
    return _convolution(op, inputs, outputs, after)


def conv_map(op: Op, inputs: Windows, outputs: Windows) -> Kernel:
    """A convolution and what is done to its result."""
    assert isinstance(op, ConvMap)
    after = [("add", 2)] if op.biased else []
    for step in steps_of(parse_expr(op.expr)) or ():
        index = op.own - 1 + step.argument
        whole = step.argument > 0 and inputs[index].shape == outputs[0].shape
        if whole and (step.function != "add" or base_of(after) >= 0):
            raise Refused(f"{op.expr} of whole images")
        after.append((OLD if whole else step.function, index))
    return _convolution(op, inputs, outputs, after)


def _convolution(op: Conv | ConvMap, inputs: Windows, outputs: Windows, after: Following) -> Kernel:
    _check(*inputs, *outputs)
    (x, w, *_), (y,) = inputs, outputs
    x, y = _image(x), _image(y)
    if winograd.suits(op, w.shape[2:], x, y, tiled=y):
        return winograd.Convolution(x, w, y, _before(op), turned=False, after=after)
    plan = _Plan()
    if _of_one_tap(op, w.shape[2:], w) and _few(op, x, y) and (rows := rows_along(y, 1)):
        seen, source = plan.positions(_seen(op, x, y), INPUT)
        made = primitives.matmul(
            seen, _swapped(_flat_weights(w)), _matrix(rows, y.type.dtype), _described(after, inputs, y, 2)
        )
        plan.run(made, {c.SRC: source, c.WEIGHTS: WEIGHTS, c.DST: OUTPUT, **_taken(after)})
        return plan.finish(base_of(after))
    bias = inputs[after[0][1]] if after and after[0][0] == "add" else None
    follows = after[1:] if bias else after
    weights = _grouped(w, op.groups)
    bias = bias and bias.viewed(y.shape[1:2], (bias.type.dtype.itemsize,))
    made = primitives.convolution(x, weights, y, _geometry(op), bias, _described(follows, inputs, y, len(y.shape)))
    place = plan.weights(weights, made.descriptions[c.WEIGHTS], WEIGHTS)
    arguments = {c.SRC: INPUT, c.WEIGHTS: place, c.DST: OUTPUT, **_taken(follows)}
    if bias:
        arguments[c.BIAS] = ("in", after[0][1], 0)
    plan.run(made, arguments)
    return plan.finish(base_of(after))


def _described(after: Following, inputs: Windows, y: Window, rank: int) -> list[After]:
    """What follows, with vectors of one number a channel as tensors of so many axes."""
    shape, zero = (1, y.shape[1], *[1] * (rank - 2)), Window.dense(TensorType(FLOAT32, (1,) * rank))
    return [
        After(function, {OLD: None, "relu": zero}[function])
        if function in (OLD, "relu")
        else After(function, Window.dense(inputs[index].type.with_shape(shape)))
        for function, index in after
    ]


def _taken(after: Following) -> dict[int, Place]:
    """The arguments of what follows."""
    places: dict[str, Place] = {"relu": ZERO}
    return {
        argument_of(number, function): places.get(function, ("in", index, 0))
        for number, (function, index) in enumerate(after)
        if function != OLD
    }


def _before(op: ConvOp) -> tuple[int, int]:
    """Zeros before the first row and column of images."""
    (above, _), (left, _) = op.pads
    return above, left


def conv_data_gradient(op: Op, inputs: Windows, outputs: Windows) -> Kernel:
    """The gradient of a convolution's data; added to what there is image by image."""
    assert isinstance(op, ConvDataGrad)
    _check(*inputs, *outputs)
    (g, w, *added), (dx,) = inputs, outputs
    g, dx = _image(g), _image(dx)
    if winograd.suits(op, w.shape[2:], g, dx, tiled=dx):
        above, left = (w.shape[2] - 1 - zeros for zeros in _before(op))
        return winograd.Convolution(g, w, dx, (above, left), turned=True, after=[(OLD, 2)] if added else ())
    plan, everywhere = _Plan(), set(op.strides) == {1}
    if _of_one_tap(op, w.shape[2:], w) and (_few(op, dx, g) or (added and everywhere)):
        return _products_at_positions(plan, op, g, w, dx, bool(added))
    weights, images = _grouped(w, op.groups), g.shape[0]
    together = _together(images, dx.type.nbytes // images) if added else images
    some_g, some_dx = (x.viewed((together, *x.shape[1:]), x.strides) for x in (g, dx))
    made = primitives.convolution_data_gradient(some_g, weights, some_dx, _geometry(op))
    place = plan.weights(weights, made.descriptions[c.WEIGHTS], WEIGHTS)
    if not added:
        plan.run(made, {c.DIFF_DST: INPUT, c.WEIGHTS: place, c.DIFF_SRC: OUTPUT})
        return plan.finish()
    add, here = primitives.sum_of(some_dx), plan.keep(Description.of(some_dx).nbytes)
    for image in range(0, images, together):
        source, target = ("in", 0, image * g.strides[0]), ("out", 0, image * dx.strides[0])
        plan.run(made, {c.DIFF_DST: source, c.WEIGHTS: place, c.DIFF_SRC: here})
        plan.run(add, {c.SRC: target, c.OTHER: here, c.DST: target})
    return plan.finish(2)


def _products_at_positions(plan: _Plan, op: ConvDataGrad, g: Window, w: Window, dx: Window, adds: bool) -> Staged:
    """The gradient of the data of a convolution of one tap: a product, written or added where the tap was."""
    cotangents, source = plan.positions(g, INPUT)
    seen = _seen(op, dx, g)
    if rows := rows_along(seen, 1):
        made = primitives.matmul(cotangents, _flat_weights(w), _matrix(rows, dx.type.dtype), onto(adds))
        plan.run(made, {c.SRC: source, c.WEIGHTS: WEIGHTS, c.DST: OUTPUT})
        return plan.finish(2 if adds else -1, cleared=not adds and seen.shape != dx.shape)
    whole = channels_last(seen.type)
    here, rows = plan.keep(whole.type.nbytes), rows_along(whole, 1)
    assert rows is not None
    made = primitives.matmul(cotangents, _flat_weights(w), _matrix(rows, dx.type.dtype))
    plan.run(made, {c.SRC: source, c.WEIGHTS: WEIGHTS, c.DST: here})
    spread = primitives.reorder(Description.of(whole), Description.of(seen), add=adds)
    plan.run(spread, {c.SRC: here, c.DST: OUTPUT})
    return plan.finish(2 if adds else -1, cleared=not adds)


def _together(images: int, nbytes: int) -> int:
    """How many images' gradients are made before they are added: a divisor of all, of a few megabytes."""
    most = max(1, ADDED // max(nbytes, 1))
    return max(n for n in range(1, images + 1) if images % n == 0 and n <= most)


def conv_weight_gradient(op: Op, inputs: Windows, outputs: Windows) -> Kernel:
    """The gradient of a convolution's weights; of one tap, a product over all positions."""
    assert isinstance(op, ConvWeightGrad)
    _check(*inputs, *outputs)
    (x, g, *added), (dw,) = inputs, outputs
    x, g = _image(x), _image(g)
    if winograd.suits(op, op.kernel, x, g, tiled=g):
        return winograd.WeightGradient(x, g, dw, _before(op), add=bool(added))
    plan = _Plan()
    if _of_one_tap(op, op.kernel, dw) and (_few(op, x, g) or set(op.strides) == {1}):
        (seen, source), (cotangents, at) = plan.positions(_seen(op, x, g), INPUT), plan.positions(g, WEIGHTS)
        made = primitives.matmul(_swapped(cotangents), seen, _flat_weights(dw), onto(bool(added)))
        plan.run(made, {c.SRC: at, c.WEIGHTS: source, c.DST: OUTPUT})
        return plan.finish(2 if added else -1)
    weights = _grouped(dw, op.groups)
    made, source, cotangent = primitives.convolution_weight_gradient(x, g, weights, _geometry(op)), INPUT, WEIGHTS
    if "ref" in made.implementation:  # a loop over single numbers: oneDNN's others may want images without gaps
        (x, source), (g, cotangent) = plan.without_gaps(x, source), plan.without_gaps(g, cotangent)
        made = primitives.convolution_weight_gradient(x, g, weights, _geometry(op))
    wanted, given = made.descriptions[c.DIFF_WEIGHTS], Description.of(weights)
    direct = wanted == given and not added
    place = OUTPUT if direct else plan.keep(wanted.nbytes)
    plan.run(made, {c.SRC: source, c.DIFF_DST: cotangent, c.DIFF_WEIGHTS: place})
    if not direct:
        plan.run(primitives.reorder(wanted, given, add=bool(added)), {c.SRC: place, c.DST: OUTPUT})
    return plan.finish(2 if added else -1)


def _of_one_tap(op: ConvOp, kernel: tuple[int, ...], w: Window) -> bool:
    """Whether a convolution has a single tap, no padding, and weights that are a matrix with dense rows."""
    single = set(kernel) == {1} and op.groups == 1 and not any(map(any, op.pads))
    item = w.type.dtype.itemsize
    return single and (w.shape[1] == 1 or w.strides[1] == item) and w.strides[0] >= w.shape[1] * item


def _few(op: ConvOp, x: Window, y: Window) -> bool:
    """Whether a tap sees so few positions that weights do not repay being taken to another layout; and oneDNN knows
    how those lie: rows within images, places within rows.
    """
    seen = _seen(op, x, y)
    order = sorted((axis for axis in range(len(seen.shape)) if seen.shape[axis] > 1), key=lambda i: seen.strides[i])
    within = all(seen.strides[a] * seen.shape[a] <= seen.strides[b] for a, b in pairwise(order))
    return within and y.type.size // y.shape[1] <= POSITIONS


def _seen(op: ConvOp, x: Window, y: Window) -> Window:
    """The positions of x that a single tap sees, one a position of y."""
    spatial = [stride * step for stride, step in zip(x.strides[2:], op.strides)]
    return x.viewed((*x.shape[:2], *y.shape[2:]), (*x.strides[:2], *spatial))


def _flat_weights(w: Window) -> Window:
    """Weights of one tap as a matrix."""
    return w.viewed(w.shape[:2], w.strides[:2])


def _matrix(rows: Rows, dtype: DType) -> Window:
    return Window(TensorType(dtype, (rows.count, rows.width)), (rows.step * dtype.itemsize, dtype.itemsize))
