"""Layouts of tensors in the form that oneDNN takes."""

from __future__ import annotations

from foreplan.graph import Window


def stepped(x: Window) -> Window:
    """The window with strides that oneDNN accepts for axes of extent 1."""
    steps, step = [0] * len(x.shape), x.type.dtype.itemsize
    for axis in sorted(range(len(x.shape)), key=lambda axis: (x.shape[axis] == 1, x.strides[axis])):
        steps[axis] = step if x.shape[axis] == 1 else x.strides[axis]
        step = max(step, steps[axis] * x.shape[axis])
    return x.viewed(x.shape, steps)


def swapped(x: Window) -> Window:
    """A matrix, or several, transposed."""
    order = [*range(len(x.shape) - 2), len(x.shape) - 1, len(x.shape) - 2]
    return x.viewed([x.shape[i] for i in order], [x.strides[i] for i in order])
