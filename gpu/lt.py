"""Matrix products by cuBLASLt: how an op on tensors that lie in a certain way becomes its calls, and what they take.

Nothing of the library is needed to plan: how much scratch memory it may have is given to it, and within that it picks
its algorithm when a session is bound.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from foreplan.gpu.device import Device
from foreplan.gpu.launch import ALIGNMENT, LaunchKernel, Multiply, Refused, Windows, ceil_div
from foreplan.gpu.multiply import multiplications
from foreplan.graph import Op
from foreplan.graph.layouts import lie_alike
from foreplan.units import align_up

CUBLASLT = "cublaslt"  # how its kernels' names begin
# What NVIDIA sets aside for cuBLAS itself (cuBLAS documentation, cublasSetWorkspace): more on Hopper and Blackwell.
ADVISED, ADVISED_BEFORE = 32 << 20, 4 << 20
WITH_MORE = (9, 10)  # major compute capabilities
# What is assumed of speed; none of it has been measured. Of a card's peak, cuBLASLt reaches so much where its tiles
# fill the card, and a kernel of ours so much of float32's; without scratch memory cuBLASLt takes so much longer.
REACHED, OWN, WITHOUT = 0.7, 0.2, 0.05
TILE = 64  # rows and columns that a multiprocessor makes at a time
LEAST_TERMS, MOST_PARTS = 256, 16  # sums are split into parts of no fewer terms, and no more parts


def lt_kernels(
    op: Op, inputs: Windows, outputs: Windows, device: Device, *, tf32: bool = False
) -> Mapping[str, LaunchKernel]:
    """The kernels of a matrix product, by name: without scratch memory, and with it where sums are long enough to be
    split; none where cuBLASLt has no words for how its tensors lie.

    Args:
        tf32: whether float32 may be rounded to TensorFloat-32.
    """
    try:
        calls = multiplications(op, inputs, outputs, device, tf32)
    except Refused:
        return {}
    kinds = (True, False) if calls[0].terms >= 2 * LEAST_TERMS else (False,)
    return {_name(calls[0], scratch): _kernel(calls, scratch, inputs, outputs, device) for scratch in kinds}


def lt_kernel(op: Op, name: str, inputs: Windows, outputs: Windows, device: Device) -> LaunchKernel:
    """The kernel that a plan names.

    Raises:
        Refused: there is none such.
    """
    words = name.split(" ")
    calls = multiplications(op, inputs, outputs, device, "tf32" in words)
    scratch = "0" not in words
    if name != _name(calls[0], scratch):
        raise Refused(f"no kernel {name!r} for {op.name}")
    return _kernel(calls, scratch, inputs, outputs, device)


def own_nanoseconds(op: Op, inputs: Windows, outputs: Windows, device: Device) -> int:
    """What a kernel of ours, which uses no tensor cores, takes for a product that cuBLASLt has words for."""
    calls = multiplications(op, inputs, outputs, device, False)
    seconds = sum(_seconds(call, device, device.peak("float32") * OWN, _parts(call, device)) for call in calls)
    return round(max(seconds, _moved(inputs, outputs, device)) * 1e9)


def _name(call: Multiply, scratch: bool) -> str:
    return CUBLASLT + " tf32" * call.tf32 + " 0" * (not scratch)


def _kernel(
    calls: Sequence[Multiply], scratch: bool, inputs: Windows, outputs: Windows, device: Device
) -> LaunchKernel:
    """Calls one after the other, with the same scratch memory."""
    room = max(_room(call, device) for call in calls) if scratch else 0
    made = tuple(replace(call, nbytes=room) for call in calls)
    overwrites = ((0, 2),) if len(inputs) == 3 and lie_alike(inputs[2], outputs[0]) else ()
    seconds = sum(_seconds(call, device, _rate(call, device), _parts(call, device) if scratch else 1) for call in made)
    seconds *= 1 if scratch or calls[0].terms < 2 * LEAST_TERMS else 1 + WITHOUT
    nanoseconds = round(max(seconds, _moved(inputs, outputs, device)) * 1e9)
    return LaunchKernel(made, room, overwrites, nanoseconds=nanoseconds)


def _rate(call: Multiply, device: Device) -> float:
    """Operations a second where tiles fill the card."""
    return device.peak("tensorfloat32" if call.tf32 else call.a.dtype.name) * REACHED


def _seconds(call: Multiply, device: Device, rate: float, parts: int) -> float:
    """Arithmetic alone; multiprocessors that have no tile to make, and no part of a tile's sums, are idle."""
    busy = min(1.0, _tiles(call) * parts / device.multiprocessors)
    return 2 * call.d.rows * call.d.columns * call.terms * call.batch / (rate * busy)


def _moved(inputs: Windows, outputs: Windows, device: Device) -> float:
    """Seconds that reading and writing takes."""
    return sum(x.type.nbytes for x in (*inputs, *outputs)) / device.bytes_per_second


def _tiles(call: Multiply) -> int:
    return ceil_div(call.d.rows, TILE) * ceil_div(call.d.columns, TILE) * call.batch


def _parts(call: Multiply, device: Device) -> int:
    """In how many parts sums are taken so that no multiprocessor is idle."""
    return max(1, min(ceil_div(device.multiprocessors, _tiles(call)), call.terms // LEAST_TERMS, MOST_PARTS))


def _room(call: Multiply, device: Device) -> int:
    """Bytes of scratch memory: what is advised for the card, or less if it holds all parts of the sums."""
    advised = ADVISED if device.compute // 10 in WITH_MORE else ADVISED_BEFORE
    results = call.d.rows * call.d.columns * call.batch * call.d.dtype.wide.itemsize
    return min(advised, align_up(MOST_PARTS * results, ALIGNMENT))
