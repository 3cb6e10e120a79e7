"""Products and convolutions."""

from __future__ import annotations

import math

from foreplan.eager.autograd import Grads, Needs, Saved, Tape, only
from foreplan.eager.rules.elementwise import operands
from foreplan.eager.rules.shape import expand, reshape
from foreplan.eager.storage import Tensor, dense_strides
from foreplan.graph.types import Shape, broadcast_shapes
from foreplan.ops.conv.common import ConvOp
from foreplan.ops.conv.ops import Conv, ConvDataGrad, ConvWeightGrad


def _transposed(x: Tensor) -> Tensor:
    return x.viewed(x.shape[::-1], x.strides[::-1])


def linear(tape: Tape, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`F.linear`: `addmm`, or `mm` without a bias. Rows of x are saved if the weight has a gradient, and the other way
    round.

    Args:
        x: [..., inputs].
        weight: [outputs, inputs].
    """
    x, weight, bias = operands(tape, "linear", x, weight, bias)
    if bias is not None and x.rank > 2 and not x.is_contiguous:
        return _biased_later(tape, linear(tape, x, weight, None), bias)
    flat = reshape(tape, x, (math.prod(x.shape[:-1]), x.shape[-1])) if x.rank != 2 else x
    weight = _turned(tape, weight)
    shape = (flat.shape[0], weight.shape[0])
    result = tape.new(shape, x.dtype, "linear")
    saved = (flat if weight.needs_grad else None, weight if flat.needs_grad else None)
    inputs = (flat, weight) if bias is None else (bias, flat, weight)  # in `addmm`'s order
    tape.record(inputs, (result,), _linear_backward, saved)
    return reshape(tape, result, (*x.shape[:-1], shape[1])) if x.rank != 2 else result


def _turned(tape: Tape, weight: Tensor) -> Tensor:
    """`weight.t()`, which has a function of its own in the history; it lies here as the weight does."""
    result = weight.detached()
    tape.record((weight,), (result,), lambda tape, saved, needs, grads: grads)
    return result


def _biased_later(tape: Tape, y: Tensor, bias: Tensor) -> Tensor:
    """A bias added to a product, in place; rows that lie apart are multiplied by `matmul`, which adds none."""
    result = y.detached() if tape.sums_in_place else tape.like(y, "add")
    tape.record((y, bias), (result,), lambda tape, saved, needs, grads: [grads[0] if need else None for need in needs])
    return result


def _linear_backward(tape: Tape, saved: Saved, needs: Needs, grads: Grads) -> Grads:
    grad = only(grads)
    flat, weight = saved
    given: list[Tensor | None] = [None] * len(needs)
    if needs[-2]:
        assert weight is not None
        given[-2] = tape.new((grad.shape[0], weight.shape[1]), grad.dtype, "gradient of the data")
    if needs[-1]:
        assert flat is not None
        given[-1] = tape.new((grad.shape[1], flat.shape[1]), grad.dtype, "gradient of the weight")
    if len(needs) > 2 and needs[0]:
        given[0] = grad  # which is summed to the bias's shape
    return given


def matmul(tape: Tape, a: Tensor, b: Tensor) -> Tensor:
    """`a @ b` of two axes or more."""
    a, b = operands(tape, "matmul", a, b)
    if b.rank == 2 and a.rank == 2:
        return _mm(tape, a, b)
    if b.rank == 2:
        flat = reshape(tape, a, (math.prod(a.shape[:-1]), a.shape[-1]))
        return reshape(tape, _mm(tape, flat, b), (*a.shape[:-1], b.shape[1]))
    batch = broadcast_shapes(a.shape[:-2], b.shape[:-2])
    count = math.prod(batch)
    left = reshape(tape, expand(tape, a, (*batch, *a.shape[-2:])), (count, *a.shape[-2:]))
    right = reshape(tape, expand(tape, b, (*batch, *b.shape[-2:])), (count, *b.shape[-2:]))
    return reshape(tape, _mm(tape, left, right), (*batch, a.shape[-2], b.shape[-1]))


def _mm(tape: Tape, a: Tensor, b: Tensor) -> Tensor:
    """`mm` or `bmm`."""
    result = tape.new((*a.shape[:-1], b.shape[-1]), a.dtype, "matmul")
    shapes = a, b
    saved = (a if b.needs_grad else None, b if a.needs_grad else None)
    left, right = (_like_operand(each) for each in shapes)

    def backward(tape: Tape, saved: Saved, needs: Needs, grads: Grads) -> Grads:
        grad = only(grads)
        second = tape.new(right[0], grad.dtype, "gradient of an operand", right[1]) if needs[1] else None
        first = tape.new(left[0], grad.dtype, "gradient of an operand", left[1]) if needs[0] else None
        return (first, second)

    tape.record((a, b), (result,), backward, saved)
    return result


def _like_operand(x: Tensor) -> tuple[Shape, tuple[int, ...]]:
    """A gradient of a matrix lies as the matrix does, by rows or by columns; of a batch, by rows."""
    if x.rank == 2 and x.strides[0] == 1 and x.strides[1] == x.shape[0]:
        return x.shape, x.strides
    return x.shape, dense_strides(x.shape)


def convolution(tape: Tape, x: Tensor, weight: Tensor, bias: Tensor | None, op: ConvOp, shape: Shape) -> Tensor:
    """`aten::convolution`, transposed ones too: input and weight are saved whatever has a gradient.

    Args:
        op: `Conv`; or `ConvDataGrad`, which is a transposed convolution.
        shape: of the result.
    """
    transposed = isinstance(op, ConvDataGrad)
    x, weight, bias = operands(tape, "convolution", x, weight, bias)
    # For depth-wise ones PyTorch has kernels of its own, without workspace (`ConvParams::use_cudnn_depthwise`).
    library = transposed or not 1 < op.groups == x.shape[1]
    name = "conv_transpose" if transposed else "convolution"
    result = tape.new(shape, x.dtype, name)
    if library:
        tape.convolve(op, (x, weight), result, name)
    biased = shape[1:2]

    def backward(tape: Tape, saved: Saved, needs: Needs, grads: Grads) -> Grads:
        (grad,), (x, weight) = grads, saved
        assert grad is not None and x is not None and weight is not None
        data: ConvOp = Conv(*op.geometry) if transposed else ConvDataGrad(*op.geometry, spatial=x.shape[2:])
        weights = ConvWeightGrad(*op.geometry, kernel=weight.shape[2:])
        parts: list[tuple[str, Shape, ConvOp | None, tuple[Tensor, ...]]] = [
            ("gradient of the data", x.shape, data, (grad, weight)),
            ("gradient of the weight", weight.shape, weights, (grad, x) if transposed else (x, grad)),
            ("gradient of the bias", biased, None, ()),
        ]
        given: list[Tensor | None] = []
        for need, (name, shape, of, inputs) in zip(needs, parts):
            made = tape.new(shape, grad.dtype, name) if need else None
            if made is not None and of is not None and library:
                tape.convolve(of, inputs, made, name, gradient=True)
            given.append(made)
        return given

    tape.record((x, weight) if bias is None else (x, weight, bias), (result,), backward, (x, weight))
    return result
