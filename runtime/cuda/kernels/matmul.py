"""Matrix products, batched, either side transposed, added to a tensor."""

from __future__ import annotations

from collections.abc import Sequence

from foreplan.graph import Op
from foreplan.graph.op import Windows
from foreplan.ops.map import merged_axes
from foreplan.ops.matmul import MatMul
from foreplan.runtime.cuda.device import Device
from foreplan.runtime.cuda.kernels.map import broadcast
from foreplan.runtime.cuda.kernels.product import Batch, Plain, Product, product_kernel
from foreplan.runtime.cuda.kernels.reduce import Axis
from foreplan.runtime.cuda.launch import LaunchKernel, added_in_place, input_at, output_at
from foreplan.runtime.kernel import Refused


def matmul(op: Op, inputs: Windows, outputs: Windows, device: Device) -> LaunchKernel:
    """One product for each matrix; where all share b, one for the rows of all."""
    assert isinstance(op, MatMul)
    (y,), rank = outputs, len(outputs[0].shape)
    if not all(x.type.dtype.is_float for x in inputs):
        raise Refused(f"a product of {inputs[0].type}")
    terms = inputs[0].shape[-2 if op.transpose_a else -1]
    shapes = [(*y.shape[:-2], *x.shape[-2:]) for x in inputs[:2]]
    strides = [
        broadcast(input_at(i), inputs[i], shape).strides for i, shape in enumerate([*shapes, y.shape][: len(inputs)])
    ]
    strides.insert(2, y.strides)
    a_row, a_term = (-1, -2) if op.transpose_a else (-2, -1)
    b_column, b_term = (-2, -1) if op.transpose_b else (-1, -2)
    left, right, result, *added = strides
    shared = all(step == 0 for step in right[:-2])  # one b for all: their rows are those of one product
    row_axes = range(rank - 1) if shared else (rank - 2,)
    batch_axes = () if shared else range(rank - 2)
    lefts = (*left[:-2], left[a_row])
    rows = merged_axes(y.shape[:-1], [lefts, result[:-1], *(x[:-1] for x in added)], row_axes)
    batch = merged_axes(y.shape[:-2], [x[:-2] for x in strides], batch_axes)
    columns = y.shape[-1]

    def axes(which: int) -> tuple[Axis, ...]:
        return tuple(Axis(n, steps[which]) for n, steps in rows)

    def along(extent: int, step: int) -> tuple[Axis, ...]:
        return (Axis(extent, step),)

    product = Product(
        rows=_count(rows),
        columns=columns,
        terms=terms,
        a=Plain(input_at(0), inputs[0].type.dtype, axes(0), along(terms, left[a_term])),
        b=Plain(input_at(1), inputs[1].type.dtype, along(columns, right[b_column]), along(terms, right[b_term])),
        results=Plain(output_at(0), y.type.dtype, axes(1), along(columns, result[-1])),
        added=Plain(input_at(2), y.type.dtype, axes(2), along(columns, added[0][-1])) if added else None,
        batch=tuple(Batch(n, *steps) for n, steps in batch),
        nbytes=y.type.nbytes,
    )
    return product_kernel(product, device, added_in_place(inputs, y), parts_allowed=y.is_compact)


def _count(axes: Sequence[tuple[int, tuple[int, ...]]]) -> int:
    count = 1
    for n, _ in axes:
        count *= n
    return count
