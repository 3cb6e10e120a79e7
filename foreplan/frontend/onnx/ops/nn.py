"""ONNX ops with weights and windows: convolution, pooling, matrix products."""

from __future__ import annotations

import math

from foreplan.frontend.onnx.node import OnnxNode, Operand, Result, translates
from foreplan.graph import Value
from foreplan.ops.conv.ops import conv, conv_transpose
from foreplan.ops.expr import Expr, call
from foreplan.ops.join import pad
from foreplan.ops.map import elementwise
from foreplan.ops.matmul import matmul
from foreplan.ops.pool import avg_pool, lrn, max_pool, max_pool_places
from foreplan.ops.reduce import reduce
from foreplan.ops.shape import reshape
from foreplan.ops.unpool import col2im, placed
from foreplan.ops.window import Geometry, same_padding

Pads = tuple[tuple[int, int], ...]


def window(
    n: OnnxNode, kernel: tuple[int, ...], axes: int | None = None
) -> tuple[tuple[int, ...], tuple[int, ...], Pads]:
    """(strides, dilations, pads) of spatial axes, those of input 0 by default, with `auto_pad` turned into pads.

    Raises:
        ModelError: an attribute does not have one entry for each axis, or is not positive.
    """
    spatial = n.shape(0)[2:]
    axes = len(spatial) if axes is None else axes
    strides = tuple(n.integers("strides", [1] * axes))
    dilations = tuple(n.integers("dilations", [1] * axes))
    flat = n.integers("pads", [0] * 2 * axes)
    if not len(kernel) == len(strides) == len(dilations) == axes or len(flat) != 2 * axes or axes == 0:
        raise n.fail(
            f"kernel {list(kernel)}, strides {list(strides)}, dilations {list(dilations)} and pads {flat} do not fit "
            f"the {axes} spatial axes of {n.type(0)}"
        )
    if min(strides + dilations + kernel) < 1:
        raise n.fail(f"kernel {list(kernel)}, strides {list(strides)} and dilations {list(dilations)} must be positive")
    mode = n.text("auto_pad", "NOTSET") or "NOTSET"
    if mode == "NOTSET":
        return strides, dilations, tuple(zip(flat[:axes], flat[axes:]))
    if mode == "VALID":
        return strides, dilations, ((0, 0),) * axes
    if mode not in ("SAME_UPPER", "SAME_LOWER"):
        raise n.fail(f"auto_pad {mode!r} is not NOTSET, VALID, SAME_UPPER or SAME_LOWER")
    totals = (same_padding(*axis) for axis in zip(spatial, kernel, strides, dilations))
    return strides, dilations, tuple(_halves(total, mode) for total in totals)


def _halves(total: int, mode: str) -> tuple[int, int]:
    """An odd element goes to the end for SAME_UPPER, and to the beginning otherwise."""
    small, large = total // 2, total - total // 2
    return (small, large) if mode == "SAME_UPPER" else (large, small)


@translates("Conv")
def _conv(n: OnnxNode) -> Operand:
    return convolution(n, n.value(0), n.value(1), n.value(2) if n.has(2) else None)


def convolution(n: OnnxNode, x: Value, w: Value, bias: Value | None = None) -> Value:
    """Images convolved with the node's attributes; `x` has the shape of its input 0."""
    strides, dilations, pads = window(n, w.shape[2:])
    groups = n.integer("group", 1)
    return conv(n.b, x, w, bias, strides=strides, pads=pads, dilations=dilations, groups=groups)


@translates("ConvTranspose")
def _conv_transpose(n: OnnxNode) -> Operand:
    x, w = n.value(0), n.value(1)
    axes, kernel = len(x.shape) - 2, w.shape[2:]
    mode = n.text("auto_pad", "NOTSET")
    strides = tuple(n.integers("strides", [1] * axes))
    dilations = tuple(n.integers("dilations", [1] * axes))
    extra = tuple(n.integers("output_padding", [0] * axes))
    flat = n.integers("pads", [0] * 2 * axes)
    if not len(kernel) == len(strides) == len(dilations) == len(extra) == axes or len(flat) != 2 * axes:
        raise n.fail(
            f"kernel {list(kernel)}, strides {list(strides)}, dilations {list(dilations)}, output_padding "
            f"{list(extra)} and pads {flat} do not fit the {axes} spatial axes of {n.type(0)}"
        )
    pads: Pads = tuple(zip(flat[:axes], flat[axes:]))
    wanted = n.integers("output_shape")
    if wanted is None and mode in ("SAME_UPPER", "SAME_LOWER"):
        wanted = [extent * stride for extent, stride in zip(x.shape[2:], strides)]
    if wanted is not None:
        whole = [
            stride * (extent - 1) + more + (taps - 1) * gap + 1
            for stride, extent, more, taps, gap in zip(strides, x.shape[2:], extra, kernel, dilations)
        ]
        pads = tuple(_halves(full - want, mode) for full, want in zip(whole, wanted[-axes:]))
    elif mode == "VALID":
        pads = ((0, 0),) * axes
    bias, groups = n.value(2) if n.has(2) else None, n.integer("group", 1)
    geometry: Geometry = {"strides": strides, "pads": pads, "dilations": dilations}
    return conv_transpose(n.b, x, w, bias, groups=groups, output_padding=extra, **geometry)


@translates("MaxPool")
def _max_pool(n: OnnxNode) -> Result:
    kernel = tuple(n.integers("kernel_shape", ()))
    strides, dilations, pads = window(n, kernel)
    geometry: Geometry = {"strides": strides, "pads": pads, "dilations": dilations}
    ceil = bool(n.integer("ceil_mode", 0))
    if not n.wants(1):
        return max_pool(n.b, n.value(0), kernel, ceil_mode=ceil, **geometry)
    return max_pool_places(
        n.b, n.value(0), kernel, ceil_mode=ceil, columns=bool(n.integer("storage_order", 0)), **geometry
    )


@translates("MaxUnpool")
def _max_unpool(n: OnnxNode) -> Operand:
    x, kernel = n.value(0), tuple(n.integers("kernel_shape", ()))
    axes = len(x.shape) - 2
    strides, flat = tuple(n.integers("strides", [1] * axes)), n.integers("pads", [0] * 2 * axes)
    if not len(kernel) == len(strides) == axes or len(flat) != 2 * axes:
        raise n.fail(f"kernel {list(kernel)}, strides {list(strides)} and pads {flat} do not fit {n.type(0)}")
    pads = zip(flat[:axes], flat[axes:])
    extents = [
        (extent - 1) * stride - low - high + taps
        for extent, stride, taps, (low, high) in zip(x.shape[2:], strides, kernel, pads)
    ]
    shape = (*x.shape[:2], *extents)
    # Windows that overlap may have the same largest element.
    y = placed(n.b, x, n.value(1), shape, shared=any(taps > step for taps, step in zip(kernel, strides)))
    wanted = tuple(n.known_ints(2)) if n.has(2) else shape
    if len(wanted) != len(shape) or any(more < least for more, least in zip(wanted, shape)):
        raise n.misshapen(f"the output_shape {list(wanted)} must be at least {list(shape)}")
    return pad(n.b, y, [(0, more - least) for more, least in zip(wanted, shape)])


@translates("Col2Im")
def _col2im(n: OnnxNode) -> Operand:
    x, image, kernel = n.value(0), tuple(n.known_ints(1)), tuple(n.known_ints(2))
    strides, dilations, pads = window(n, kernel, len(image))
    return col2im(n.b, x, image, kernel, strides=strides, dilations=dilations, pads=pads)


@translates("AveragePool")
def _average_pool(n: OnnxNode) -> Operand:
    kernel = tuple(n.integers("kernel_shape", ()))
    strides, dilations, pads = window(n, kernel)
    geometry: Geometry = {"strides": strides, "pads": pads, "dilations": dilations}
    ceil, padding = bool(n.integer("ceil_mode", 0)), bool(n.integer("count_include_pad", 0))
    return avg_pool(n.b, n.value(0), kernel, ceil_mode=ceil, count_include_pad=padding, **geometry)


@translates("LpPool")
def _lp_pool(n: OnnxNode) -> Operand:
    power = n.integer("p", 2) if n.opset >= 2 else n.number("p", 2.0)
    kernel = tuple(n.integers("kernel_shape", ()))
    strides, dilations, pads = window(n, kernel)
    if n.integer("ceil_mode", 0):
        # Sums need one count for all windows, so those that reach beyond the pads get ordinary padding.
        spans = [(taps - 1) * gap + 1 for taps, gap in zip(kernel, dilations)]
        found = []
        for extent, span, stride, (low, high) in zip(n.shape(0)[2:], spans, strides, pads):
            positions = -(-(extent + low + high - span) // stride) + 1
            if (positions - 1) * stride >= extent + low:
                positions -= 1
            found.append((low, (positions - 1) * stride + span - extent - low))
        pads = tuple(found)
    x = n.map(lambda x: _power(call("abs", x), power), 0)
    mean = avg_pool(n.b, n.as_value(x), kernel, strides=strides, pads=pads, dilations=dilations, count_include_pad=True)
    return elementwise(n.b, lambda m: _power(m * float(math.prod(kernel)), 1.0 / power), mean)


def _power(x: Expr, power: float) -> Expr:
    return call("sqrt", x) if power == 0.5 else x if power == 1 else x**power


@translates("GlobalAveragePool", "GlobalMaxPool", "GlobalLpPool")
def _global_pool(n: OnnxNode) -> Operand:
    axes = range(2, len(n.shape(0)))
    if n.op_type != "GlobalLpPool":
        return reduce(n.b, "mean" if n.op_type == "GlobalAveragePool" else "max", n.value(0), axes, keepdims=True)
    power = n.integer("p", 2) if n.opset >= 2 else n.number("p", 2.0)
    powers = n.as_value(n.map(lambda x: _power(call("abs", x), power), 0))
    return elementwise(n.b, lambda s: _power(s, 1.0 / power), reduce(n.b, "sum", powers, axes, keepdims=True))


@translates("LRN")
def _lrn(n: OnnxNode) -> Operand:
    alpha, beta, bias = n.number("alpha", 0.0001), n.number("beta", 0.75), n.number("bias", 1.0)
    return lrn(n.b, n.value(0), n.integer("size"), alpha, beta, bias)


@translates("MatMul")
def _matmul(n: OnnxNode) -> Operand:
    return product(n, n.value(0), n.value(1))


def product(n: OnnxNode, x: Value, y: Value) -> Value:
    """A matrix product as NumPy's `matmul` has it, vectors among the operands."""
    if not x.shape or not y.shape:
        raise n.misshapen(f"{x.type} and {y.type} must have at least one axis each")
    left = reshape(n.b, x, (1, *x.shape)) if len(x.shape) == 1 else x
    right = reshape(n.b, y, (*y.shape, 1)) if len(y.shape) == 1 else y
    multiplied = matmul(n.b, left, right)
    shape = list(multiplied.shape)
    if len(x.shape) == 1:
        del shape[-2]
    if len(y.shape) == 1:
        del shape[-1]
    return reshape(n.b, multiplied, shape)


@translates("Gemm")
def _gemm(n: OnnxNode) -> Operand:
    a, w = n.value(0), n.value(1)
    if len(a.shape) != 2 or len(w.shape) != 2:
        raise n.misshapen(f"{n.type(0)} and {n.type(1)} must be matrices")
    alpha, beta = n.number("alpha", 1.0), n.number("beta", 1.0)
    is_float = a.dtype.is_float
    alpha, beta = (alpha, beta) if is_float else (int(alpha), int(beta))
    product = matmul(n.b, a, w, bool(n.integer("transA", 0)), bool(n.integer("transB", 0)))
    if n.has(2) and beta:
        return elementwise(n.b, lambda p, c: p * alpha + c * beta, product, n.value(2))
    return elementwise(n.b, lambda p: p * alpha, product)
