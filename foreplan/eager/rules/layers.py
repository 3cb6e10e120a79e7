"""Normalisations, softmax, pooling, attention, embeddings and dropout."""

from __future__ import annotations

from collections.abc import Sequence

from foreplan.eager.autograd import Grads, Needs, Saved, Tape, only
from foreplan.eager.rules.elementwise import cast, mul, operands, unary
from foreplan.eager.rules.shape import contiguous, of_input, reduce
from foreplan.eager.storage import Tensor
from foreplan.graph.types import BOOL, FLOAT32, INT64, Shape

STATISTICS = "statistics"


def batch_norm(
    tape: Tape, x: Tensor, weight: Tensor, bias: Tensor, statistics: Sequence[Tensor], frozen: bool
) -> Tensor:
    """`native_batch_norm`: input, weight, running statistics and those of the batch are saved."""
    own = (0,) if frozen else (x.shape[1],)
    result = tape.like(x, "batch_norm")
    mean, scale = (tape.new(own, FLOAT32 if tape.cuda else weight.dtype, STATISTICS) for _ in range(2))
    tape.record((x, weight, bias), (result,), _norm_backward, (x, weight, mean, scale, *statistics))
    return result


def layer_norm(tape: Tape, x: Tensor, weights: Sequence[Tensor], axis: int) -> Tensor:
    """`native_layer_norm`: input, weight, bias, mean and scale of each row are saved."""
    x, *weights = operands(tape, "layer_norm", x, *weights)
    rows = (*x.shape[:axis], *(1 for _ in x.shape[axis:]))
    result = tape.new(x.shape, x.dtype, "layer_norm")
    narrow = not tape.cuda and all(weight.dtype == x.dtype for weight in weights)
    mean, scale = (tape.new(rows, x.dtype if narrow else FLOAT32, STATISTICS) for _ in range(2))
    tape.record((x, *weights), (result,), _norm_backward, (x, *weights, mean, scale))
    return result


def group_norm(tape: Tape, x: Tensor, weight: Tensor, bias: Tensor, groups: int) -> Tensor:
    """`native_group_norm`: input, weight, mean and scale of each group are saved."""
    x, weight, bias = operands(tape, "group_norm", x, weight, bias)
    result = tape.new(x.shape, x.dtype, "group_norm")
    mean, scale = (tape.new((x.shape[0], groups), weight.dtype, STATISTICS) for _ in range(2))
    tape.record((x, weight, bias), (result,), _norm_backward, (x, weight, mean, scale))
    return result


def rms_norm(tape: Tape, x: Tensor, weight: Tensor | None, axis: int) -> Tensor:
    """`F.rms_norm`: one op on a card; elsewhere x · rsqrt(mean(x²) + ε), then · weight, each with what it saves."""
    x, weight = operands(tape, "rms_norm", x, weight)
    weights = () if weight is None else (weight,)
    if tape.cuda:
        result = tape.new(x.shape, x.dtype, "rms_norm")
        scale = tape.new((*x.shape[:axis], *(1 for _ in x.shape[axis:])), FLOAT32, STATISTICS)
        tape.record((x, *weights), (result,), _norm_backward, (x, *weights, scale))
        return result
    dtype, x = x.dtype, cast(tape, x, FLOAT32)
    square = unary(tape, "pow", x)
    mean = reduce(tape, "mean", square, range(axis, x.rank), True)
    root = unary(tape, "rsqrt", mean)
    del square, mean
    result = mul(tape, x, root)
    if weight is not None:
        result = mul(tape, result, weight)
    return contiguous(tape, cast(tape, result, dtype))


def _norm_backward(tape: Tape, saved: Saved, needs: Needs, grads: Grads) -> Grads:
    (grad,), x = grads, saved[0]
    assert grad is not None and x is not None
    data = tape.like(x, "gradient of the data") if needs[0] else None
    rest: list[Tensor | None] = []
    for need in needs[1:]:
        weight = saved[1]
        assert weight is not None
        rest.append(tape.like(weight, "gradient of a scale or bias") if need else None)
    return [data, *rest]


def softmax(tape: Tape, x: Tensor, op: str = "softmax", typed: bool = False) -> Tensor:
    """`softmax` or `log_softmax`: the result is saved.

    Args:
        typed: it is asked for the type of its operand, which autocast heeds.
    """
    if not typed:
        (x,) = operands(tape, op, x)
    result = tape.new(x.shape, x.dtype, op)

    def backward(tape: Tape, saved: Saved, needs: Needs, grads: Grads) -> Grads:
        grad = only(grads)
        return (tape.like(grad, f"backward of {op}"),)

    tape.record((x,), (result,), backward, (result,))
    return result


def max_pool(tape: Tape, x: Tensor, shape: Shape) -> Tensor:
    """`max_pool2d_with_indices`: input and places of the largest elements, int64, are saved."""
    result = tape.new(shape, x.dtype, "max_pool")
    places = tape.new(shape, INT64, "places of max_pool")
    tape.record((x,), (result,), of_input(x.shape, "max_pool"), (x, places))
    return result


def avg_pool(tape: Tape, x: Tensor, shape: Shape) -> Tensor:
    """`avg_pool2d`: the input is saved."""
    result = tape.new(shape, x.dtype, "avg_pool")
    tape.record((x,), (result,), of_input(x.shape, "avg_pool"), (x,))
    return result


def resize(tape: Tape, x: Tensor, shape: Shape) -> Tensor:
    """`F.interpolate`: nothing is saved."""
    (x,) = operands(tape, "interpolate", x)
    result = tape.new(shape, x.dtype, "interpolate")
    tape.record((x,), (result,), of_input(x.shape, "interpolate"))
    return result


def cumsum(tape: Tape, x: Tensor) -> Tensor:
    """`cumsum`: its gradient is summed from behind."""
    dtype, before = (tape.autocast and tape.autocast.result_type("cumsum")) or x.dtype, x.dtype
    result = tape.new(x.shape, dtype, "cumsum")

    def backward(tape: Tape, saved: Saved, needs: Needs, grads: Grads) -> Grads:
        grad = only(grads)
        grad = cast(tape, grad, before)
        held = [tape.new(grad.shape, grad.dtype, "backward of cumsum") for _ in range(2)]
        result = tape.new(grad.shape, grad.dtype, "backward of cumsum")
        del held
        return (result,)

    tape.record((x,), (result,), backward)
    return result


def embedding(tape: Tape, table: Tensor, indices: Tensor) -> Tensor:
    """`F.embedding`: the indices are saved; the gradient of the table is dense."""
    result = tape.new((*indices.shape, *table.shape[1:]), table.dtype, "embedding")
    tape.record((table,), (result,), of_input(table.shape, "embedding"), (indices,))
    return result


def gather(tape: Tape, x: Tensor, indices: Tensor, shape: Shape) -> Tensor:
    """`index_select`, `gather` and indexing by tensors: indices are saved; the gradient is added into zeros."""
    result = tape.new(shape, x.dtype, "gather")
    before = x.shape

    def backward(tape: Tape, saved: Saved, needs: Needs, grads: Grads) -> Grads:
        grad = only(grads)
        zeros = tape.new(before, grad.dtype, "zeros")
        result = tape.new(before, grad.dtype, "backward of gather")
        del zeros
        return (result,)

    tape.record((x,), (result,), backward, (indices,))
    return result


def dropout(tape: Tape, x: Tensor, ratio: float) -> Tensor:
    """`F.dropout`: on a card a mask of one byte an element is saved, elsewhere a factor for each element."""
    if not ratio:
        return x
    if not tape.cuda:
        return mul(tape, x, tape.like(x, "factors of dropout"))
    result, mask = tape.like(x, "dropout"), tape.new(x.shape, BOOL, "mask of dropout")

    def backward(tape: Tape, saved: Saved, needs: Needs, grads: Grads) -> Grads:
        grad = only(grads)
        return (tape.like(grad, "backward of dropout"),)

    tape.record((x,), (result,), backward, (mask,))
    return result
