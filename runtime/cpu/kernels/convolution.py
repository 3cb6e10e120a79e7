"""Convolutions and their gradients: images lie with their channels last, weights as in checkpoints.

Each may have several ways: oneDNN's own, weights reordered each time; products of matrices, for one tap, or with the
inputs of several taps gathered (`columns`); and Winograd's algorithm (`winograd`), for 3 × 3 taps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from itertools import pairwise

from foreplan.graph import Op, TensorType, Window
from foreplan.graph.op import Windows
from foreplan.graph.types import FLOAT32
from foreplan.ops.conv.mapped import ConvMap, steps_of
from foreplan.ops.conv.ops import Conv, ConvDataGrad, ConvOp, ConvWeightGrad
from foreplan.ops.expr import parse_expr
from foreplan.runtime.cpu import prices
from foreplan.runtime.cpu.codegen.epilogue import Made
from foreplan.runtime.cpu.gemm.blocked import Blocked
from foreplan.runtime.cpu.gemm.panels import Panels
from foreplan.runtime.cpu.gemm.products import Product
from foreplan.runtime.cpu.gemm.tiles import Tiles
from foreplan.runtime.cpu.kernel import LoopKernel
from foreplan.runtime.cpu.kernels import im2col as columns
from foreplan.runtime.cpu.kernels import volumes, winograd
from foreplan.runtime.cpu.kernels.rows import image_rows, rows_along, rows_from
from foreplan.runtime.cpu.kernels.stages import (
    INPUT,
    OUTPUT,
    WEIGHTS,
    ZERO,
    Place,
    Staged,
    Stages,
    beside,
    channels_together,
    check,
    matrix,
    positions_of,
)
from foreplan.runtime.cpu.onednn import library as c
from foreplan.runtime.cpu.onednn import primitives
from foreplan.runtime.cpu.onednn.layouts import swapped
from foreplan.runtime.cpu.onednn.primitives import (
    OLD,
    After,
    Description,
    Following,
    Geometry,
    argument_of,
    base_of,
    onto,
)
from foreplan.runtime.kernel import Refused

Blocks = type[Tiles] | type[Panels]
ADDED = 4 * 2**20  # bytes of a gradient that are made before they are added to another


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
    low, high = zip(*op.pads)
    return Geometry(op.strides, op.dilations, low, high)


def _grouped(w: Window, groups: int) -> Window:
    """Weights [K, C/groups, …] as [groups, K/groups, C/groups, …], as oneDNN takes them."""
    if groups == 1:
        return w
    each = w.shape[0] // groups
    return w.viewed((groups, each, *w.shape[1:]), (each * w.strides[0], *w.strides))


def conv(op: Op, inputs: Windows, outputs: Windows) -> Staged:
    """A convolution, with a bias or added to a tensor, and perhaps an epilogue."""
    (x, w, y), after = _seen_as_images(op, inputs, outputs)
    assert isinstance(op, Conv | ConvMap)
    bias = inputs[after[0][1]] if after and after[0][0] == "add" else None
    follows = after[1:] if bias else after
    weights = _grouped(w, op.groups)
    bias = bias and bias.viewed(y.shape[1:2], (bias.type.dtype.itemsize,))
    plan, geometry, described = Stages(), _geometry(op), _described(follows, inputs, y, len(y.shape))
    made, ((_, source),) = plan.of_images(
        lambda seen: primitives.convolution(seen, weights, y, geometry, bias, described), (x, INPUT)
    )
    place = plan.weights(weights, made.descriptions[c.WEIGHTS], WEIGHTS, w.blocks)
    arguments = {c.SRC: source, c.WEIGHTS: place, c.DST: OUTPUT, **_taken(follows)}
    if bias:
        arguments[c.BIAS] = ("in", after[0][1], 0)
    plan.run(made, arguments)
    grouped = x if op.groups > 1 else None
    return plan.finish(base_of(after), nanoseconds=prices.direct(w, y, x=grouped))


def conv_by_winograd(op: Op, inputs: Windows, outputs: Windows) -> winograd.Convolution:
    """A convolution of 3 × 3 taps."""
    (x, w, y), after = _seen_as_images(op, inputs, outputs)
    assert isinstance(op, Conv | ConvMap)
    winograd.check(op, w.shape[2:], x, y)
    return winograd.Convolution(x, w, y, _before(op), turned=False, after=after)


def conv_by_products(op: Op, inputs: Windows, outputs: Windows) -> Staged:
    """A convolution of one tap, the weights as they lie."""
    (x, w, y), after = _seen_as_images(op, inputs, outputs)
    described = _described(after, inputs, y, 2)
    return _one_tap(op, x, w, y, lambda a, b, z: primitives.matmul(a, b, z, described), _taken(after), base_of(after))


def conv_in_blocks(op: Op, inputs: Windows, outputs: Windows, way: Blocks) -> Staged:
    """A convolution of one tap as a product by foreplan's own code, with any epilogue."""
    check(*inputs, *outputs)
    x, w, y = _image(inputs[0]), inputs[1], _image(outputs[0])
    if isinstance(op, Conv):
        after = _what_follows(op, inputs, outputs)
        if all(function == OLD for function, _ in after):
            return _one_tap(op, x, w, y, lambda a, b, z: way(a, b, z, add=bool(after)), {}, base_of(after))
    own = op.own if isinstance(op, ConvMap) else 2
    if isinstance(op, ConvMap) and op.biased:
        raise Refused("a bias, and more to follow a product in blocks")
    expr = op.expr if isinstance(op, ConvMap) else "(a0 + a1)"

    def product(a: Window, b: Window, z: Window) -> Product:
        further = tuple(as_rows(each, y) for each in inputs[own:])
        return way(a, b, z, made=Made((expr,), further, (z,)))

    return _one_tap(op, x, w, y, product, beside(own, len(inputs)), -1)


def as_rows(z: Window, y: Window) -> Window:
    """A tensor as a convolution's result, or of one number a channel, as rows of channels."""
    shape, item = (y.type.size // y.shape[1], y.shape[1]), z.type.dtype.itemsize
    if z.type.size == y.shape[1]:
        return Window.dense(z.type.with_shape((shape[1],))).broadcast(shape)
    rows = rows_along(_image(z), 1)
    if z.shape != y.shape or rows is None:
        raise Refused(f"{z.type} with the strides {z.strides}")
    return z.viewed(shape, (rows.step * item, item))


def _one_tap(
    op: Op,
    x: Window,
    w: Window,
    y: Window,
    product: Callable[[Window, Window, Window], Product],
    arguments: Mapping[int, Place],
    base: int,
) -> Staged:
    assert isinstance(op, Conv | ConvMap)
    plan, rows = Stages(), rows_along(y, 1)
    if rows is None:
        raise Refused(f"{y.type} with the strides {y.strides}")
    seen, source = plan.positions(_seen_by_one_tap(op, w.shape[2:], w, x, y), INPUT)
    flat = swapped(_flat_weights(w))
    made = product(seen, Window(flat.type, flat.strides, w.blocks), matrix(rows, y.type.dtype))
    plan.wants = made.wants if isinstance(made, Blocked) else None
    plan.run(made, {c.SRC: source, c.WEIGHTS: WEIGHTS, c.DST: OUTPUT, **arguments})
    then = made.made if isinstance(made, Blocked) else None
    mapped = then.overwrites(op.own if isinstance(op, ConvMap) else 2) if then else ()
    return plan.finish(base, nanoseconds=_price(made, prices.products(w, y)), mapped=mapped)


def _product(a: Window, b: Window, y: Window, add: bool, way: Blocks | None) -> Product:
    return way(a, b, y, add=add) if way else primitives.matmul(a, b, y, onto(add))


def _price(made: Product, otherwise: int) -> int:
    """Its own, of a product in blocks."""
    return made.nanoseconds if isinstance(made, Blocked) else otherwise


def conv_by_columns(op: Op, inputs: Windows, outputs: Windows) -> LoopKernel:
    """A convolution of several taps as a product of gathered inputs; weights are read as they lie."""
    (x, w, y), after = _seen_as_images(op, inputs, outputs)
    assert isinstance(op, Conv | ConvMap)
    rows, taps, weights = rows_along(y, 1), math.prod(w.shape[2:]), rows_from(w, 1)
    if rows is None or weights is None or op.groups > 1 or taps == 1 or len(w.shape) != 4 or y.type.dtype != FLOAT32:
        raise Refused("products are for float32, several taps on two axes without groups, and weights in C order")
    if prices.columns(w, y) >= prices.direct(w, y):
        raise Refused("gathering takes longer than changing the layout of the weights")
    images, plan = image_rows(x), Stages()
    seen = Window.dense(TensorType(FLOAT32, (rows.count, weights.width)))
    place = plan.keep(seen.type.nbytes)
    flat, result = swapped(matrix(weights, FLOAT32)), matrix(rows, FLOAT32)
    made = primitives.matmul(seen, flat, result, _described(after, inputs, y, 2))
    plan.run(made, {c.SRC: place, c.WEIGHTS: WEIGHTS, c.DST: OUTPUT, **_taken(after)})
    places = (*x.shape[2:], *y.shape[2:], *w.shape[2:], *op.strides, *_before(op), *op.dilations)
    product = plan.finish(base_of(after), nanoseconds=prices.columns(w, y))
    return columns.gathered(images, rows.count, places, taps, place, product)


def _seen_as_images(op: Op, inputs: Windows, outputs: Windows) -> tuple[tuple[Window, Window, Window], Following]:
    """Data, weights and result of a convolution, and its epilogue."""
    check(*inputs, *outputs)
    after = _what_follows(op, inputs, outputs)
    return (_image(inputs[0]), inputs[1], _image(outputs[0])), after


def _what_follows(op: Op, inputs: Windows, outputs: Windows) -> Following:
    if isinstance(op, Conv):
        return [(OLD if x.shape == outputs[0].shape else "add", i) for i, x in enumerate(inputs) if i > 1]
    assert isinstance(op, ConvMap)
    after, steps = [("add", 2)] if op.biased else [], steps_of(parse_expr(op.expr))
    if steps is None:
        raise Refused(f"{op.expr} of a convolution's result")
    for step in steps:
        index = op.own - 1 + step.argument
        whole = step.argument > 0 and inputs[index].shape == outputs[0].shape
        if whole and (step.function != "add" or base_of(after) >= 0 or inputs[index].type != outputs[0].type):
            raise Refused(f"{op.expr} of {inputs[index].type}")
        after.append((OLD if whole else step.function, index))
    return after


def _described(after: Following, inputs: Windows, y: Window, rank: int) -> list[After]:
    """The epilogue, with vectors of one number a channel as tensors of `rank` axes."""
    shape, zero = (1, y.shape[1], *[1] * (rank - 2)), Window.dense(TensorType(FLOAT32, (1,) * rank))
    return [
        After(function, {OLD: None, "relu": zero}[function])
        if function in (OLD, "relu")
        else After(function, Window.dense(inputs[index].type.with_shape(shape)))
        for function, index in after
    ]


def _taken(after: Following) -> dict[int, Place]:
    """The arguments of the epilogue."""
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


def conv_data_gradient(op: Op, inputs: Windows, outputs: Windows) -> Staged:
    """The gradient of a convolution's data; if it is added to a tensor, then image by image."""
    assert isinstance(op, ConvDataGrad)
    g, w, dx, adds = _data_gradient(inputs, outputs)
    plan, weights, geometry, images = Stages(), _grouped(w, op.groups), _geometry(op), g.shape[0]
    together = _together(images, dx.type.nbytes // images) if adds else images

    def some(x: Window) -> Window:
        return x.viewed((together, *x.shape[1:]), x.strides)

    made, ((g, (kind, index, first)),) = plan.of_images(
        lambda g: primitives.convolution_data_gradient(some(g), weights, some(dx), geometry), (g, INPUT)
    )
    place = plan.weights(weights, made.descriptions[c.WEIGHTS], WEIGHTS)
    apart = set(w.shape[2:]) == {1} and set(op.strides) != {1}
    cost = prices.direct(w, g, dx.type.nbytes if adds else 0, dx.type.nbytes if apart else 0)
    if not adds:
        plan.run(made, {c.DIFF_DST: (kind, index, first), c.WEIGHTS: place, c.DIFF_SRC: OUTPUT})
        return plan.finish(nanoseconds=cost)
    add, here = primitives.sum_of(some(dx)), plan.keep(Description.of(some(dx)).nbytes)
    for image in range(0, images, together):
        source, target = (kind, index, first + image * g.strides[0]), ("out", 0, image * dx.strides[0])
        plan.run(made, {c.DIFF_DST: source, c.WEIGHTS: place, c.DIFF_SRC: here})
        plan.run(add, {c.SRC: target, c.OTHER: here, c.DST: target})
    return plan.finish(2, nanoseconds=cost)


def data_gradient_by_winograd(op: Op, inputs: Windows, outputs: Windows) -> winograd.Convolution | volumes.Volumes:
    """The gradient of the data of a convolution of 3 × 3 taps."""
    assert isinstance(op, ConvDataGrad)
    g, w, dx, adds = _data_gradient(inputs, outputs)
    if len(w.shape) == 5:
        return volumes.data_gradient(op, g, w, dx, adds)
    winograd.check(op, w.shape[2:], g, dx)
    above, left = (w.shape[2] - 1 - zeros for zeros in _before(op))
    return winograd.Convolution(g, w, dx, (above, left), turned=True, after=[(OLD, 2)] if adds else ())


def data_gradient_by_products(op: Op, inputs: Windows, outputs: Windows, way: Blocks | None = None) -> Staged:
    """The gradient of the data of a convolution of one tap: a product, written or added at the positions of the tap.

    Args:
        way: of products; None: by oneDNN.
    """
    assert isinstance(op, ConvDataGrad)
    g, w, dx, adds = _data_gradient(inputs, outputs)
    seen = _seen_by_one_tap(op, w.shape[2:], w, dx, g)
    plan = Stages()
    cotangents, source = plan.positions(g, INPUT)
    base, cost = 2 if adds else -1, prices.products(w, g, dx.type.nbytes if adds else 0)
    cleared = not adds and seen.shape != dx.shape
    clearing = dx.type.nbytes // prices.SECOND_PASS if cleared else 0
    if rows := rows_along(seen, 1):
        made = _product(cotangents, _flat_weights(w), matrix(rows, dx.type.dtype), adds, way)
        plan.run(made, {c.SRC: source, c.WEIGHTS: WEIGHTS, c.DST: OUTPUT})
        return plan.finish(base, cleared, _price(made, cost) + clearing)
    whole = channels_together(seen.type)
    here = plan.keep(whole.type.nbytes)
    made = _product(cotangents, _flat_weights(w), positions_of(whole.type), False, way)
    plan.run(made, {c.SRC: source, c.WEIGHTS: WEIGHTS, c.DST: here})
    spread = primitives.reorder(Description.of(whole), Description.of(seen), add=adds)
    plan.run(spread, {c.SRC: here, c.DST: OUTPUT})
    return plan.finish(base, not adds, _price(made, cost) + clearing + whole.type.nbytes // prices.SECOND_PASS)


def _data_gradient(inputs: Windows, outputs: Windows) -> tuple[Window, Window, Window, bool]:
    """Cotangents, weights and result, and whether the result is added to a tensor."""
    check(*inputs, *outputs)
    return _image(inputs[0]), inputs[1], _image(outputs[0]), len(inputs) > 2


def _together(images: int, nbytes: int) -> int:
    """Images whose gradients are made before they are added, of a few megabytes: a divisor of all."""
    most = max(1, ADDED // max(nbytes, 1))
    return max(n for n in range(1, images + 1) if images % n == 0 and n <= most)


def conv_weight_gradient(op: Op, inputs: Windows, outputs: Windows) -> Staged:
    """The gradient of a convolution's weights."""
    assert isinstance(op, ConvWeightGrad)
    x, g, dw, adds = _weight_gradient(inputs, outputs)
    if x.type.dtype.is_narrow and x.shape[-1] < op.strides[-1]:
        raise Refused(
            "narrow images with fewer columns than a stride: oneDNN 3.2 reads scratch memory it has not written"
        )
    plan, weights, geometry = Stages(), _grouped(dw, op.groups), _geometry(op)
    made, ((_, source), (_, cotangent)) = plan.of_images(
        lambda x, g: primitives.convolution_weight_gradient(x, g, weights, geometry), (x, INPUT), (g, WEIGHTS)
    )
    wanted, given = made.descriptions[c.DIFF_WEIGHTS], Description.of(weights)
    direct = wanted == given and not adds
    place = OUTPUT if direct else plan.keep(wanted.nbytes)
    plan.run(made, {c.SRC: source, c.DIFF_DST: cotangent, c.DIFF_WEIGHTS: place})
    if not direct:
        plan.run(primitives.reorder(wanted, given, add=adds), {c.SRC: place, c.DST: OUTPUT})
    return plan.finish(2 if adds else -1, nanoseconds=prices.direct_weights(dw, g))


def weight_gradient_by_winograd(op: Op, inputs: Windows, outputs: Windows) -> winograd.WeightGradient | volumes.Volumes:
    """The gradient of 3 × 3 taps."""
    assert isinstance(op, ConvWeightGrad)
    x, g, dw, adds = _weight_gradient(inputs, outputs)
    if len(dw.shape) == 5:
        return volumes.weight_gradient(op, op.kernel, x, g, dw, adds)
    winograd.check(op, op.kernel, x, g)
    return winograd.WeightGradient(x, g, dw, _before(op), add=adds)


def weight_gradient_by_products(op: Op, inputs: Windows, outputs: Windows, way: Blocks | None = None) -> Staged:
    """The gradient of one tap: a product over all positions.

    Args:
        way: of products; None: by oneDNN.
    """
    assert isinstance(op, ConvWeightGrad)
    x, g, dw, adds = _weight_gradient(inputs, outputs)
    seen, plan = _seen_by_one_tap(op, op.kernel, dw, x, g), Stages()
    (seen, source), (cotangents, at) = plan.positions(seen, INPUT), plan.positions(g, WEIGHTS)
    made = _product(swapped(cotangents), seen, _flat_weights(dw), adds, way)
    plan.run(made, {c.SRC: at, c.WEIGHTS: source, c.DST: OUTPUT})
    return plan.finish(2 if adds else -1, nanoseconds=_price(made, prices.products_weights(dw, g)))


def _weight_gradient(inputs: Windows, outputs: Windows) -> tuple[Window, Window, Window, bool]:
    """Data, cotangents and result, and whether the result is added to a tensor."""
    check(*inputs, *outputs)
    return _image(inputs[0]), _image(inputs[1]), outputs[0], len(inputs) > 2


def _seen_by_one_tap(op: ConvOp, kernel: tuple[int, ...], w: Window, x: Window, y: Window) -> Window:
    """The positions of x that a single tap sees, one a position of y.

    Raises:
        Refused: there are more taps, or padding; weights are no matrix with dense rows; oneDNN has no layout for the
            positions (rows within images, places within rows); or channels lie apart, as in images of one or three
            axes: oneDNN's own convolution takes half as long as transposing such images.
    """
    item = w.type.dtype.itemsize
    single = set(kernel) == {1} and op.groups == 1 and not any(map(any, op.pads))
    if not single or (w.shape[1] != 1 and w.strides[1] != item) or w.strides[0] < w.shape[1] * item:
        raise Refused("products are for convolutions of one tap, without padding and groups, and dense weights")
    if any(image.shape[1] != 1 and image.strides[1] != image.type.dtype.itemsize for image in (x, y)):
        raise Refused("products are for positions whose channels lie side by side")
    spatial = [stride * step for stride, step in zip(x.strides[2:], op.strides)]
    seen = x.viewed((*x.shape[:2], *y.shape[2:]), (*x.strides[:2], *spatial))
    order = sorted((axis for axis in range(len(seen.shape)) if seen.shape[axis] > 1), key=lambda i: seen.strides[i])
    if any(seen.strides[a] * seen.shape[a] > seen.strides[b] for a, b in pairwise(order)):
        raise Refused(f"{x.type} with the strides {x.strides}")
    return seen


def _flat_weights(w: Window) -> Window:
    """Weights of one tap as a matrix."""
    return w.viewed(w.shape[:2], w.strides[:2])
