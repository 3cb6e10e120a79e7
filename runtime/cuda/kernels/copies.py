"""Copies of tensors from one order of axes to another, and tensors put into larger ones."""

from __future__ import annotations

from foreplan.base.units import ceil_div
from foreplan.graph import Window
from foreplan.graph.layouts import lie_alike
from foreplan.ops.map import merged_axes
from foreplan.runtime.cuda.launch import THREADS, Address, Copy, Launch, Word, launch

TILES = {1: 64, 2: 64, 4: 32, 8: 32}  # elements along both axes of a tile, by their bytes
_WORDS = {1: "u8", 2: "u16", 4: "u32", 8: "u64"}
_LEAST = 8  # elements along an axis of a tile that are worth turning around


def dense_copy(source: Address, x: Window, target: Address, y: Window) -> tuple[Copy, ...] | None:
    """The bytes as they lie, where both lie alike without gaps."""
    if x.type != y.type or not (x.is_compact and lie_alike(x, y)):
        return None
    return (Copy(target, source, x.type.nbytes),) if x.type.size else ()


def transposition(source: Address, x: Window, target: Address, y: Window) -> tuple[Launch, ...] | None:
    """A copy in tiles, where elements lie side by side along one axis of the source and another of the target."""
    item = x.type.dtype.itemsize
    order = sorted(range(len(y.shape)), key=lambda axis: -abs(y.strides[axis]))
    axes = merged_axes(y.shape, [x.strides, y.strides], order)
    along_x = [i for i, (n, steps) in enumerate(axes) if steps[0] == item and n >= _LEAST]
    along_y = [i for i, (n, steps) in enumerate(axes) if steps[1] == item and n >= _LEAST]
    if x.type != y.type or len(along_x) != 1 or len(along_y) != 1 or along_x == along_y:
        return None
    (across,), (down,) = along_x, along_y
    others = [axis for i, axis in enumerate(axes) if i not in (across, down)] or [(1, (0, 0))]
    batch = 1
    for n, _ in others:
        batch *= n
    tile = TILES[item]
    tiles = [ceil_div(axes[i][0], tile) for i in (across, down)]
    blocks = tiles[0] * tiles[1] * batch
    if blocks >= 1 << 31:
        return None
    sizes = (("ELEMENT", _WORDS[item]), ("TILE", tile), ("ROWS", THREADS // tile), ("RANK", len(others)))
    numbers: list[Word] = [
        source,
        target,
        axes[across][0],
        axes[down][0],
        axes[down][1][0],
        axes[across][1][1],
        *tiles,
    ]
    numbers += [n for n, _ in others] + [steps[0] for _, steps in others] + [steps[1] for _, steps in others]
    return (launch("transpose.cu", "transpose", blocks, numbers, sizes),)
