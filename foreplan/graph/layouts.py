"""How tensors lie where an engine chooses, and whether two tensors lie alike."""

from __future__ import annotations

from collections.abc import Sequence

from foreplan.graph.op import Op, Types, Windows
from foreplan.graph.types import TensorType, Window


def channels_last(type: TensorType) -> Window:
    """Images [N, C, …], of one spatial axis or more, with their channels side by side; anything else in C order."""
    if type.rank < 3:
        return Window.dense(type)
    item = type.dtype.itemsize
    steps, step = [item], type.shape[1] * item
    for extent in reversed(type.shape[2:]):
        steps.append(step)
        step *= extent
    return Window(type, (step, item, *reversed(steps[1:])))


def in_c_order(op: Op, inputs: Windows, outputs: Types) -> list[Window]:
    """Outputs without gaps, their last axis innermost."""
    return [Window.dense(type) for type in outputs]


def images(op: Op, inputs: Windows, outputs: Types) -> list[Window]:
    """Outputs with their channels last."""
    return [channels_last(type) for type in outputs]


def lie_alike(a: Window, b: Window) -> bool:
    """Whether two tensors of one type lie in the same way."""
    return a.type == b.type and all(extent == 1 or x == y for extent, x, y in zip(a.shape, a.strides, b.strides))


def like_whole_input(op: Op, inputs: Sequence[Window], outputs: Types) -> list[Window]:
    """Outputs as a whole input lies that has no gaps, rather one with its channels last; else in C order."""
    shape = outputs[0].shape
    whole = [x for x in inputs if x.shape == shape and x.is_compact]
    if not whole:
        return [Window.dense(type) for type in outputs]
    best = next((x for x in whole if x == channels_last(x.type)), whole[0])
    item = best.type.dtype.itemsize
    return [Window(y, tuple(step // item * y.dtype.itemsize for step in best.strides)) for y in outputs]


def like_most_inputs(op: Op, inputs: Sequence[Window], outputs: Types) -> list[Window]:
    """Outputs with channels last, if most of what inputs hold lies so; else in C order."""
    last = sum(x.type.nbytes for x in inputs if x == channels_last(x.type) and not x.is_dense)
    images = 2 * last > sum(x.type.nbytes for x in inputs)
    return [channels_last(type) if images else Window.dense(type) for type in outputs]
