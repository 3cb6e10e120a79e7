"""Tensors put into larger ones: concatenated, padded, or put back where a slice took them from."""

from __future__ import annotations

from collections.abc import Sequence

from foreplan.graph import Op, Window
from foreplan.graph.layouts import lie_alike
from foreplan.graph.op import Windows
from foreplan.ops.join import MODES, Concat, Pad, Unslice
from foreplan.runtime.cuda.device import Device
from foreplan.runtime.cuda.kernels.map import copies, index_type
from foreplan.runtime.cuda.launch import Instruction, LaunchKernel, Word, for_each, input_at, output_at


def concat(op: Op, inputs: Windows, outputs: Windows, device: Device) -> LaunchKernel:
    """A copy for each input; those that are one stretch of the output may lie there already."""
    assert isinstance(op, Concat)
    (y,), start, parts = outputs, 0, []
    found: list[Instruction] = []
    for i, x in enumerate(inputs):
        place, byte = Window(x.type, y.strides), start * y.strides[op.axis]
        if x.is_compact and lie_alike(x, place):
            parts.append((0, i, byte))
        found += copies(input_at(i), x, output_at(0, byte), place)
        start += x.shape[op.axis]
    return LaunchKernel(tuple(found), parts=tuple(parts))


def pad(op: Op, inputs: Windows, outputs: Windows, device: Device) -> LaunchKernel:
    """One launch."""
    assert isinstance(op, Pad)
    return _put(inputs[0], outputs[0], [low for low, _ in op.pads], [1] * len(op.pads), op.value, op.mode)


def unslice(op: Op, inputs: Windows, outputs: Windows, device: Device) -> LaunchKernel:
    """One launch."""
    assert isinstance(op, Unslice)
    return _put(inputs[0], outputs[0], op.starts, op.steps, 0.0, "constant")


def _put(x: Window, y: Window, firsts: Sequence[int], steps: Sequence[int], fill: float, mode: str) -> LaunchKernel:
    if not y.type.size:
        return LaunchKernel(())
    order = sorted(range(len(y.shape)), key=lambda axis: -y.strides[axis])
    columns = [y.shape, y.strides, x.shape, x.strides, firsts, steps]
    words: list[Word] = [y.type.size, input_at(0), output_at(0), float(fill)]
    words += [column[axis] for column in columns for axis in order] if order else [1, 0, 1, 0, 0, 1]
    defines = (
        ("ELEMENT", y.type.dtype),
        ("RANK", max(1, len(order))),
        ("MODE", MODES.index(mode)),
        ("INDEX", index_type(y.type.size)),
    )
    return LaunchKernel((for_each("pad.cu", "pad", y.type.size, words, defines),))
