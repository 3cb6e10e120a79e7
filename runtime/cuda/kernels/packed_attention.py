"""The gradient of packed attention: kernels of the separate tensors' gradient, on parts of the packed ones."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from foreplan.graph import Op, Window
from foreplan.graph.op import Windows
from foreplan.ops.attention.packed import PackedAttentionGrad
from foreplan.runtime.cuda.device import Device
from foreplan.runtime.cuda.kernels import attention
from foreplan.runtime.cuda.kernels.cudnn_attention import attention_kernel, attention_kernels
from foreplan.runtime.cuda.launch import Address, Arithmetic, LaunchKernel, input_at, output_at, relocated
from foreplan.runtime.kernel import Refused

PARTS = 3  # queries, keys and values


def gradient(op: Op, inputs: Windows, outputs: Windows, device: Device, tensor_cores: bool = False) -> LaunchKernel:
    """Foreplan's own launches."""
    assert isinstance(op, PackedAttentionGrad)
    apart = attention.gradient(op.unpacked, *_unpacked(op, inputs, outputs), device, tensor_cores)
    return _packed(op, apart, inputs, outputs)


def packed_kernels(
    op: Op, inputs: Windows, outputs: Windows, device: Device, how: Arithmetic
) -> Mapping[str, LaunchKernel]:
    """cuDNN's, by name; none where it is not installed, or has none."""
    if not isinstance(op, PackedAttentionGrad):
        return {}
    apart = _unpacked(op, inputs, outputs)
    found = attention_kernels(op.unpacked, *apart, device, how)
    return {name: _packed(op, kernel, inputs, outputs) for name, kernel in found.items() if _fits(op, kernel, inputs)}


def packed_kernel(op: Op, payload: bytes, inputs: Windows, outputs: Windows) -> LaunchKernel:
    """The kernel of cuDNN's whose payload is in a plan.

    Raises:
        Refused: it is no such plan.
    """
    if not isinstance(op, PackedAttentionGrad):
        raise Refused(f"no plan of cuDNN's for {op.name}")
    kernel = attention_kernel(op.unpacked, payload, *_unpacked(op, inputs, outputs))
    if not _fits(op, kernel, inputs):
        raise Refused(f"parts of {inputs[0].type} that begin where cuDNN cannot read")
    return _packed(op, kernel, inputs, outputs)


def reads(op: Op, index: int, window: Window) -> Window:
    """As it lies; the logarithms of sums in C order."""
    return Window.dense(window.type) if index == 2 else window


def _parts(op: PackedAttentionGrad, inputs: Windows, whole: Window) -> list[tuple[int, Window]]:
    return op.unpacked_windows(whole, op.unpacked_types([x.type for x in inputs])[:PARTS])


def _unpacked(op: PackedAttentionGrad, inputs: Windows, outputs: Windows) -> tuple[list[Window], list[Window]]:
    """Inputs and outputs of the separate op."""
    own, gradients = ([window for _, window in _parts(op, inputs, whole)] for whole in (inputs[0], outputs[0]))
    return [*own, *inputs[1:]], gradients


def _fits(op: PackedAttentionGrad, kernel: LaunchKernel, inputs: Windows) -> bool:
    """Whether parts begin at the alignment of a kernel's operands."""
    return all(start % kernel.alignment == 0 for start, _ in _parts(op, inputs, inputs[0]))


def _packed(op: PackedAttentionGrad, kernel: LaunchKernel, inputs: Windows, outputs: Windows) -> LaunchKernel:
    """A kernel of the separate op on parts of the packed tensors. It overwrites nothing of x: it reads every part of x
    again after the first gradient is written.
    """
    starts, ends = ([start for start, _ in _parts(op, inputs, whole)] for whole in (inputs[0], outputs[0]))

    def moved(place: Address) -> Address:
        if place.of == "workspace":
            return place
        if place.of == "output":
            return output_at(0, ends[place.index] + place.offset)
        if place.index < PARTS:
            return input_at(0, starts[place.index] + place.offset)
        return input_at(place.index - PARTS + 1, place.offset)

    instructions = tuple(relocated(each, moved) for each in kernel.instructions)
    return replace(kernel, instructions=instructions, overwrites=())
