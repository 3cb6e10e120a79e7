"""Matrix products, by oneDNN and by foreplan's own code."""

from __future__ import annotations

import math
from contextlib import nullcontext

from foreplan.graph import Op, TensorType, Window
from foreplan.graph.op import Windows
from foreplan.graph.types import FLOAT32
from foreplan.ops.matmul import MatMul
from foreplan.ops.matmul_map import MatMulMap
from foreplan.runtime.cpu import prices
from foreplan.runtime.cpu.codegen.epilogue import Made
from foreplan.runtime.cpu.gemm.panels import Panels
from foreplan.runtime.cpu.gemm.parts import product_in_parts
from foreplan.runtime.cpu.gemm.tiles import Tiles
from foreplan.runtime.cpu.gemm.vectors import Vectors
from foreplan.runtime.cpu.kernels.rows import merged
from foreplan.runtime.cpu.kernels.stages import INPUT, OUTPUT, WEIGHTS, Staged, Stages, beside, check
from foreplan.runtime.cpu.onednn import library as c
from foreplan.runtime.cpu.onednn import primitives
from foreplan.runtime.cpu.onednn.layouts import swapped
from foreplan.runtime.cpu.onednn.primitives import Description
from foreplan.runtime.cpu.threads import one_thread
from foreplan.runtime.kernel import Refused

PANEL = 384  # columns of a matrix that are copied at a time if they would thrash a cache
SMALL = 2**21  # for fewer multiplications, other threads are not worth waking
FEW_ROWS = 64  # products of matrices of fewer do not repay the copy


def matmul(op: Op, inputs: Windows, outputs: Windows) -> Staged:
    """A product, batched or not, perhaps added to a third input."""
    a, b, y = _operands(op, inputs, outputs)
    plan, base = Stages(), len(inputs) - 1 if len(inputs) > 2 else -1
    if _thrashes(b) and len(y.shape) == 2 and min(y.shape[0], b.shape[0]) >= FEW_ROWS:
        _by_panels(plan, a, b, y, base >= 0)
        return plan.finish(base, nanoseconds=prices.product(a, b, y) + 2 * b.type.nbytes // prices.SECOND_PASS)
    small = y.type.size * b.shape[-2] < SMALL
    with one_thread() if small else nullcontext():
        product = product_in_parts(a, b, y, base >= 0)
    plan.run(product, {c.SRC: INPUT, c.WEIGHTS: WEIGHTS, c.DST: OUTPUT})
    return plan.finish(base, nanoseconds=prices.product(a, b, y))


def matmul_in_blocks(op: Op, inputs: Windows, outputs: Windows, way: type[Tiles] | type[Panels]) -> Staged:
    """Likewise, of float32, by foreplan's own code."""
    a, b, y = _operands(op, inputs, outputs)
    plan, base = Stages(), len(inputs) - 1 if len(inputs) > 2 else -1
    product = way(a, b, y, add=base >= 0)
    plan.wants = product.wants
    plan.run(product, {c.SRC: INPUT, c.WEIGHTS: WEIGHTS, c.DST: OUTPUT})
    return plan.finish(base, nanoseconds=product.nanoseconds)


def matmul_by_vectors(op: Op, inputs: Windows, outputs: Windows) -> Staged:
    """Likewise, if it is small, and added to nothing."""
    a, b, y = _operands(op, inputs, outputs)
    if len(inputs) > 2:
        raise Refused("a product that is added to something")
    plan, product = Stages(), Vectors(a, b, y)
    plan.run(product, {c.SRC: INPUT, c.WEIGHTS: WEIGHTS, c.DST: OUTPUT})
    return plan.finish(nanoseconds=product.nanoseconds)


def matmul_map(op: Op, inputs: Windows, outputs: Windows, way: type[Tiles] | type[Panels] | type[Vectors]) -> Staged:
    """A product of float32 with a map as its epilogue, if that is faster than one after the other."""
    assert isinstance(op, MatMulMap)
    a, b, y = _operands(op.matmul, inputs[:2], [Window.dense(TensorType(FLOAT32, outputs[0].shape))])
    if len(y.shape) != 2:
        raise Refused("several products")
    further = tuple(_rows(x.broadcast(outputs[0].shape)) for x in inputs[2:])
    made = Made(op.exprs, further, tuple(map(_rows, outputs)))
    plan, product = Stages(), way(a, b, y, made=made)
    moved = 2 * y.type.nbytes + sum(x.type.nbytes for x in (*inputs[2:], *outputs))
    if product.nanoseconds > prices.product(a, b, y) + prices.mapped(moved):
        raise Refused("one after the other is faster, the product by oneDNN")
    arguments = {c.SRC: INPUT, c.WEIGHTS: WEIGHTS, c.DST: OUTPUT, **beside(2, len(inputs), len(outputs))}
    plan.wants = product.wants
    plan.run(product, arguments)
    return plan.finish(nanoseconds=product.nanoseconds, mapped=made.overwrites(2))


def _operands(op: Op, inputs: Windows, outputs: Windows) -> tuple[Window, Window, Window]:
    """Both matrices and their product, or several, all of one rank. The second may lie in blocks."""
    assert isinstance(op, MatMul)
    a, b = (swapped(x) if flag else x for x, flag in zip(inputs, (op.transpose_a, op.transpose_b)))
    y = outputs[0]
    a, b, y = _flattened(a, b, y)
    rank = len(y.shape)
    a, b = (x.viewed((1,) * (rank - len(x.shape)) + x.shape, (0,) * (rank - len(x.shape)) + x.strides) for x in (a, b))
    check(a, b, y)
    return a, Window(b.type, b.strides, inputs[1].blocks), y


def _rows(x: Window) -> Window:
    """A tensor as rows of one matrix.

    Raises:
        Refused: they do not lie evenly.
    """
    rows, step = merged(x.shape[:-1], x.strides[:-1], x.strides[-2])
    if step < 0:
        raise Refused("rows that do not lie evenly")
    return x.viewed((rows, x.shape[-1]), (step, x.strides[-1]))


def _thrashes(b: Window) -> bool:
    """Whether rows are at a distance at which too few sets of a cache hold a column, unnoticed by oneDNN.

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


def _by_panels(plan: Stages, a: Window, b: Window, y: Window, add: bool) -> None:
    """A product by some columns of b at a time, which are copied first."""
    item, products = y.type.dtype.itemsize, {}
    here = plan.keep(b.shape[0] * min(PANEL, b.shape[1]) * item)
    for start in range(0, b.shape[1], PANEL):
        width = min(PANEL, b.shape[1] - start)
        given, part = b.viewed((b.shape[0], width), b.strides), y.viewed((y.shape[0], width), y.strides)
        panel = Window.dense(given.type)
        if width not in products:
            products[width] = product_in_parts(a, panel, part, add)
        copied = primitives.reorder(Description.of(given), Description.of(panel))
        plan.run(copied, {c.SRC: ("in", 1, start * item), c.DST: here})
        plan.run(products[width], {c.SRC: INPUT, c.WEIGHTS: here, c.DST: ("out", 0, start * item)})


def _flattened(a: Window, b: Window, y: Window) -> tuple[Window, Window, Window]:
    """Leading axes made rows of one product, where b is one matrix; if they do not lie evenly, the longest one."""
    if len(a.shape) <= 2 or (len(b.shape) > 2 and math.prod(b.shape[:-2]) != 1):
        return a, b, y
    rows, step = merged(a.shape[:-1], a.strides[:-1], a.strides[-2])
    if len(a.shape) != len(y.shape) or step < 0 or not y.is_dense:
        if a.shape[:-1] != y.shape[:-1]:
            return a, b, y
        longest = max(range(len(y.shape) - 1), key=lambda axis: (y.shape[axis], axis))
        order = [*(axis for axis in range(len(y.shape) - 1) if axis != longest), longest, len(y.shape) - 1]
        a, y = (x.viewed(tuple(x.shape[i] for i in order), tuple(x.strides[i] for i in order)) for x in (a, y))
        return a, b, y
    flat = a.viewed((rows, a.shape[-1]), (step, a.strides[-1]))
    return flat, b.viewed(b.shape[-2:], b.strides[-2:]), Window.dense(y.type.with_shape((rows, y.shape[-1])))
