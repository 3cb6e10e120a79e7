"""The macros of cuda/windows.cuh: the sizes of windows that slide over images."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from foreplan.graph.types import Shape
from foreplan.runtime.cuda.launch import Defines


def window_defines(kernel: Shape, strides: Shape, pads: Sequence[tuple[int, int]], dilations: Shape) -> Defines:
    """Each a list with a number for each spatial axis; of the padding, that before the first element."""
    return (
        ("AXES", len(kernel)),
        ("KERNEL", _list(kernel)),
        ("STRIDES", _list(strides)),
        ("LOWS", _list(low for low, _ in pads)),
        ("DILATIONS", _list(dilations)),
    )


def _list(numbers: Iterable[int]) -> str:
    return ", ".join(map(str, numbers))
