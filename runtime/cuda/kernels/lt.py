"""Matrix products by cuBLASLt, and convolutions of one tap: how an op on tensors that lie in a certain way becomes its
calls, and what they take.

Nothing of the library is needed to plan: how much scratch memory it may have is given to it, and within that it picks
its algorithm when a session is bound.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from foreplan.graph import Op
from foreplan.graph.op import Windows
from foreplan.ops.matmul_map import MatMulMap
from foreplan.runtime.cuda.device import Device
from foreplan.runtime.cuda.kernels.biased import bias_of, map_behind, overwrites, product_of, terms_of
from foreplan.runtime.cuda.kernels.multiply import multiplications, product_at
from foreplan.runtime.cuda.kernels.prices import roofline
from foreplan.runtime.cuda.launch import ALIGNMENT, Instruction, LaunchKernel, Multiply, added_in_place, workspace_at
from foreplan.runtime.kernel import Refused
from foreplan.units import align_up, ceil_div

CUBLASLT = "cublaslt"  # how its kernels' names begin
# What NVIDIA sets aside for cuBLAS itself (cuBLAS documentation, cublasSetWorkspace): more on Hopper and Blackwell.
ADVISED, ADVISED_BEFORE = 32 << 20, 4 << 20
WITH_MORE = (9, 10)  # major compute capabilities
# Assumed speeds, none of them measured: the share of a card's peak that cuBLASLt reaches, and the share of the peak for
# float32 that a kernel of ours reaches. Both hold while every multiprocessor makes a tile of the result, or a part of a
# tile's sums.
REACHED, OWN = 0.7, 0.2
TILE = 64  # rows and columns
LEAST_TERMS, MOST_PARTS = 256, 16  # sums are split into parts of no fewer terms, and no more parts


def lt_kernels(
    op: Op, inputs: Windows, outputs: Windows, device: Device, *, tf32: bool = False
) -> Mapping[str, LaunchKernel]:
    """The kernels of a matrix product, or of what is one, by name: without scratch memory, and with it where that lets
    more of the card work; none where cuBLASLt has no words for how its tensors lie.

    Args:
        tf32: whether float32 may be rounded to TensorFloat-32.
    """
    try:
        if isinstance(op, MatMulMap):
            return _with_bias(op, inputs, outputs, device, tf32)
        calls = multiplications(op, inputs, outputs, device, tf32)
    except Refused:
        return {}
    return _kernels(calls, device, added_in_place(inputs, outputs[0]))


def adds_bias(op: MatMulMap, inputs: Windows, outputs: Windows, device: Device) -> bool:
    """Whether cuBLASLt adds a bias in the call that multiplies."""
    try:
        return bool(multiplications(op, inputs, outputs, device, False))
    except Refused:
        return False


def _with_bias(
    op: MatMulMap, inputs: Windows, outputs: Windows, device: Device, tf32: bool
) -> Mapping[str, LaunchKernel]:
    """The bias as cuBLASLt takes it, then all in one call; or a map behind the product, which lies in the workspace."""
    (y,), terms = outputs, terms_of(op, inputs, outputs)
    in_place = overwrites(terms, inputs, y)
    try:
        calls = multiplications(op, inputs, outputs, device, tf32)
    except Refused:
        product, start = product_of(op, inputs), workspace_at()
        calls = product_at(op, inputs, product, start, device, tf32)
        moved = sum(x.type.nbytes for x in (product, *inputs[2:], y)) / device.bytes_per_second * 1e9
        after = map_behind(op, inputs, y, start, product)
        return _kernels(calls, device, in_place, nbytes=product.type.nbytes, after=after, nanoseconds=moved)
    before, nbytes = bias_of(terms, inputs, y)
    return _kernels(calls, device, in_place, nbytes=nbytes, before=before)


def _kernels(
    calls: Sequence[Multiply],
    device: Device,
    overwrites: tuple[tuple[int, int], ...],
    *,
    nbytes: int = 0,
    before: tuple[Instruction, ...] = (),
    after: tuple[Instruction, ...] = (),
    nanoseconds: float = 0,
) -> Mapping[str, LaunchKernel]:
    """Kernels of such calls, all of one size.

    Args:
        nbytes: of the workspace that what is before or after needs, behind which scratch memory lies.
        nanoseconds: that it takes.
    """
    call, parts, first = calls[0], _parts(calls[0], device), align_up(nbytes, ALIGNMENT)
    name = CUBLASLT + " tf32" * call.tf32
    found = {}
    for kind, room, split in ((name, _room(call, parts, device), parts), (f"{name} 0", 0, 1)):
        if split > 1 or not room:
            made = tuple(replace(each, nbytes=room, workspace=workspace_at(first)) for each in calls)
            price = nanoseconds + sum(_nanoseconds(each, _rate(each, device), split, device) for each in calls)
            whole = first + room if room else nbytes
            found[kind] = LaunchKernel((*before, *made, *after), whole, overwrites, nanoseconds=round(price))
    return found


def planned(call: Multiply, device: Device) -> tuple[int, float]:
    """Bytes of scratch memory that let most of the card work at a call, and the nanoseconds that it then takes."""
    parts = _parts(call, device)
    room = _room(call, parts, device) if parts > 1 else 0
    return room, _nanoseconds(call, _rate(call, device), parts, device)


def own_nanoseconds(op: Op, inputs: Windows, outputs: Windows, device: Device) -> int:
    """What a kernel of ours, which uses no tensor cores, takes for a product."""
    try:
        if isinstance(op, MatMulMap):
            calls = product_at(op, inputs, product_of(op, inputs), workspace_at(), device, False)
        else:
            calls = multiplications(op, inputs, outputs, device, False)
    except Refused:  # which cuBLASLt has no words for
        return round(roofline(op, inputs, outputs, device, "float32", OWN))
    rate, parts = device.peak("float32") * OWN, _parts(calls[0], device)
    return round(sum(_nanoseconds(each, rate, parts, device) for each in calls))


def _nanoseconds(call: Multiply, rate: float, parts: int, device: Device) -> float:
    """The roofline: arithmetic by that share of the card which is at work, or reading and writing."""
    flops = 2 * call.d.rows * call.d.columns * call.terms * call.batch
    matrices = (call.a, call.b, call.d, *[call.c] * call.adds)
    nbytes = sum(x.rows * x.columns * x.dtype.itemsize * (call.batch if x.stride else 1) for x in matrices)
    return max(flops / (rate * _busy(call, parts, device)), nbytes / device.bytes_per_second) * 1e9


def _rate(call: Multiply, device: Device) -> float:
    """Flops a second of cuBLASLt, the whole card at work."""
    return device.peak("tensorfloat32" if call.tf32 else call.a.dtype.name) * REACHED


def _busy(call: Multiply, parts: int, device: Device) -> float:
    """How much of the card is at work, its multiprocessors making a tile each at a time, or a part of a tile's sums."""
    tasks = ceil_div(call.d.rows, TILE) * ceil_div(call.d.columns, TILE) * call.batch * parts
    return tasks / (ceil_div(tasks, device.multiprocessors) * device.multiprocessors)


def _parts(call: Multiply, device: Device) -> int:
    """In how many parts sums are taken: the fewest that leave least of the card idle."""
    most = max(1, min(call.terms // LEAST_TERMS, MOST_PARTS))
    return max(range(1, most + 1), key=lambda parts: _busy(call, parts, device))


def _room(call: Multiply, parts: int, device: Device) -> int:
    """Bytes of scratch memory: what is advised for the card, but no more than twice what `parts` parts of all sums
    take. Twice, so that cuBLASLt has a choice.
    """
    advised = ADVISED if device.compute // 10 in WITH_MORE else ADVISED_BEFORE
    sums = call.d.rows * call.d.columns * call.batch * call.d.dtype.wide.itemsize
    return min(advised, align_up(2 * parts * sums, ALIGNMENT))
