"""How tensors lie where the CPU engine chooses."""

from __future__ import annotations

from foreplan.graph import TensorType, Window


def channels_last(type: TensorType) -> Window:
    """Images [N, C, H, W] with their channels side by side; anything else in C order."""
    if type.rank != 4:
        return Window.dense(type)
    _, channels, height, width = type.shape
    item = type.dtype.itemsize
    row = width * channels * item
    return Window(type, (height * row, item, row, channels * item))
