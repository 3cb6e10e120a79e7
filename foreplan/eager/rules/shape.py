"""Views, and what moves elements. A view shares bytes; its gradient is a view too, or a copy where there is none."""

from __future__ import annotations

from collections.abc import Sequence

from foreplan.eager.autograd import Backward, Grads, Needs, Saved, Tape, only, summed_to
from foreplan.eager.rules.elementwise import cast, widest
from foreplan.eager.storage import Tensor, view_strides
from foreplan.graph.types import BOOL, INT64, Shape


def contiguous(tape: Tape, x: Tensor) -> Tensor:
    """`x.contiguous()`."""
    if x.is_contiguous:
        return x
    result = tape.new(x.shape, x.dtype, "copy")
    tape.record((x,), (result,), lambda tape, saved, needs, grads: grads)
    return result


def bare_reshape(tape: Tape, x: Tensor, shape: Shape) -> Tensor:
    """`x.reshape(shape)` without history: a view, or a copy."""
    strides = view_strides(x, shape)
    return tape.new(shape, x.dtype, "copy") if strides is None else x.viewed(shape, strides)


def reshape(tape: Tape, x: Tensor, shape: Shape) -> Tensor:
    """`x.reshape(shape)`."""
    shape, before = tuple(shape), x.shape
    result = bare_reshape(tape, x, shape)

    def backward(tape: Tape, saved: Saved, needs: Needs, grads: Grads) -> Grads:
        grad = only(grads)
        return (bare_reshape(tape, grad, before),)

    tape.record((x,), (result,), backward)
    return result


def permute(tape: Tape, x: Tensor, perm: Sequence[int]) -> Tensor:
    """`x.permute(perm)`."""
    result = x.viewed(tuple(x.shape[axis] for axis in perm), [x.strides[axis] for axis in perm])
    inverse = sorted(range(len(perm)), key=lambda axis: perm[axis])

    def backward(tape: Tape, saved: Saved, needs: Needs, grads: Grads) -> Grads:
        grad = only(grads)
        return (grad.viewed(tuple(grad.shape[a] for a in inverse), [grad.strides[a] for a in inverse]),)

    tape.record((x,), (result,), backward)
    return result


def expand(tape: Tape, x: Tensor, shape: Shape) -> Tensor:
    """`x.expand(shape)`: axes of one element are repeated with the stride 0."""
    result = x.viewed(shape, _expanded(x, shape))
    before = x.shape

    def backward(tape: Tape, saved: Saved, needs: Needs, grads: Grads) -> Grads:
        grad = only(grads)
        return (summed_to(tape, grad, before),)

    tape.record((x,), (result,), backward)
    return result


def _expanded(x: Tensor, shape: Shape) -> list[int]:
    lead = len(shape) - x.rank
    inner = [0 if a == 1 and b != 1 else s for a, b, s in zip(x.shape, shape[lead:], x.strides)]
    return [0] * lead + inner


def cut(tape: Tape, x: Tensor, shape: Shape, steps: Sequence[int]) -> Tensor:
    """`x[a:b:c, …]`; its gradient is a tensor of zeros, into which that of the part is written, for each cut axis."""
    result = x.viewed(shape, [stride * step for stride, step in zip(x.strides, steps)])
    cuts = [axis for axis, (a, b) in enumerate(zip(x.shape, shape)) if a != b]
    before = x.shape

    def backward(tape: Tape, saved: Saved, needs: Needs, grads: Grads) -> Grads:
        grad = only(grads)
        extents = list(grad.shape)
        for axis in reversed(cuts):
            extents[axis] = before[axis]
            grad = tape.new(tuple(extents), grad.dtype, "backward of slice")
        return (grad,)

    tape.record((x,), (result,), backward)
    return result


def split(tape: Tape, x: Tensor, axis: int, extents: Sequence[int]) -> list[Tensor]:
    """`x.split(extents, axis)`: views side by side, whose gradients are concatenated."""
    parts = []
    for extent in extents:
        shape = (*x.shape[:axis], extent, *x.shape[axis + 1 :])
        parts.append(x.viewed(shape, x.strides))
    before = x.shape

    def backward(tape: Tape, saved: Saved, needs: Needs, grads: Grads) -> Grads:
        first = next(grad for grad in grads if grad is not None)
        zeros = [tape.new(part, first.dtype, "zeros") for part, grad in zip(shapes, grads) if grad is None]
        result = tape.new(before, first.dtype, "backward of split")
        del zeros
        return (result,)

    shapes = [part.shape for part in parts]
    tape.record((x,), parts, backward)
    return parts


def unbind(tape: Tape, x: Tensor) -> list[Tensor]:
    """`x.unbind(0)`: views, whose gradients are stacked."""
    parts = [x.viewed(x.shape[1:], x.strides[1:]) for _ in range(x.shape[0])]
    before = x.shape

    def backward(tape: Tape, saved: Saved, needs: Needs, grads: Grads) -> Grads:
        first = next(grad for grad in grads if grad is not None)
        zeros = [tape.new(before[1:], first.dtype, "zeros") for grad in grads if grad is None]
        result = tape.new(before, first.dtype, "backward of unbind")
        del zeros
        return (result,)

    tape.record((x,), parts, backward)
    return parts


def stack(tape: Tape, parts: Sequence[Tensor]) -> Tensor:
    """`torch.stack(parts)`."""
    return concat(tape, [reshape(tape, part, (1, *part.shape)) for part in parts], 0)


def concat(tape: Tape, parts: Sequence[Tensor], axis: int) -> Tensor:
    """`torch.cat(parts, axis)`, whose gradients are views of one tensor."""
    extent = sum(part.shape[axis] for part in parts)
    shape = (*parts[0].shape[:axis], extent, *parts[0].shape[axis + 1 :])
    dtype = widest(*(part.dtype for part in parts))
    if tape.autocast is not None and not tape.cuda:
        parts = [cast(tape, part, dtype) for part in parts]
    result = tape.new(shape, dtype, "cat")
    shapes = [part.shape for part in parts]

    def backward(tape: Tape, saved: Saved, needs: Needs, grads: Grads) -> Grads:
        grad = only(grads)
        return [grad.viewed(shape, grad.strides) if need else None for shape, need in zip(shapes, needs)]

    tape.record(parts, (result,), backward)
    return result


def pad(tape: Tape, x: Tensor, shape: Shape) -> Tensor:
    """`F.pad` with a number."""
    result = tape.new(shape, x.dtype, "pad")
    tape.record((x,), (result,), of_input(x.shape, "pad"))
    return result


def of_input(shape: Shape, op: str) -> Backward:
    """The gradient is a tensor of the input's shape."""

    def backward(tape: Tape, saved: Saved, needs: Needs, grads: Grads) -> Grads:
        return (tape.new(shape, only(grads).dtype, f"backward of {op}"),)

    return backward


def reduce(tape: Tape, how: str, x: Tensor, axes: Sequence[int], keepdims: bool) -> Tensor:
    """`sum`, `mean`, `amax` or `amin` over axes."""
    kept = tuple(1 if axis in axes else extent for axis, extent in enumerate(x.shape))
    shape = kept if keepdims else tuple(extent for axis, extent in enumerate(x.shape) if axis not in axes)
    dtype = (tape.autocast and tape.autocast.result_type(how)) or x.dtype
    result = tape.new(shape, dtype, how)
    if how in ("max", "min"):
        tape.record((x,), (result,), lambda *args: _extreme_backward(kept, *args), (x, result))
        return result
    before, every = x.shape, range(x.rank)

    def backward(tape: Tape, saved: Saved, needs: Needs, grads: Grads) -> Grads:
        grad = only(grads)
        if how == "mean":
            return (tape.new(before, grad.dtype, "backward of mean"),)
        steps = iter(grad.strides)
        narrow = grad if keepdims else grad.viewed(kept, [1 if axis in axes else next(steps) for axis in every])
        return (narrow.viewed(before, _expanded(narrow, before)),)

    tape.record((x,), (result,), backward)
    return result


def _extreme_backward(kept: Shape, tape: Tape, saved: Saved, needs: Needs, grads: Grads) -> Grads:
    """mask * grad / mask.sum(axes), the mask being self == result."""
    (grad,), x = grads, saved[0]
    assert grad is not None and x is not None
    mask = tape.new(x.shape, BOOL, "mask")
    count = tape.new(kept, INT64, "count")
    share = tape.new(kept, grad.dtype, "share")
    result = tape.new(x.shape, grad.dtype, "backward of max")
    del mask, count, share
    return (result,)
