"""How tensors of images lie where an engine chooses, and whether two tensors lie alike."""

from __future__ import annotations

from foreplan.graph.types import TensorType, Window


def channels_last(type: TensorType) -> Window:
    """Images [N, C, H, W] with their channels side by side; anything else in C order."""
    if type.rank != 4:
        return Window.dense(type)
    _, channels, height, width = type.shape
    item = type.dtype.itemsize
    row = width * channels * item
    return Window(type, (height * row, item, row, channels * item))


def lie_alike(a: Window, b: Window) -> bool:
    """Whether two tensors of one type lie in the same way."""
    return a.type == b.type and all(extent == 1 or x == y for extent, x, y in zip(a.shape, a.strides, b.strides))
