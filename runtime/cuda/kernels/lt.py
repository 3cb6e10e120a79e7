"""Matrix products and convolutions of one tap by cuBLASLt: an op on tensors of some layout becomes calls with predicted
times.

Planning does not need the library: it is given an amount of scratch memory, and chooses its algorithm within that when
a session is bound.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from foreplan.base.units import align_up, ceil_div
from foreplan.graph import Op
from foreplan.graph.op import Windows
from foreplan.ops.conv.ops import Conv, ConvDataGrad, ConvWeightGrad
from foreplan.ops.matmul_map import MatMulMap
from foreplan.runtime.cuda.device import Device
from foreplan.runtime.cuda.kernels.biased import bias_of, map_behind, overwrites, product_of, terms_of
from foreplan.runtime.cuda.kernels.multiply import Work, multiplications, product_at
from foreplan.runtime.cuda.kernels.one_tap import one_tap
from foreplan.runtime.cuda.kernels.prices import roofline
from foreplan.runtime.cuda.launch import ALIGNMENT, LaunchKernel, Multiply, added_in_place, workspace_at
from foreplan.runtime.kernel import Refused

CUBLASLT = "cublaslt"  # how its kernels' names begin
# What NVIDIA sets aside for cuBLAS itself (cuBLAS documentation, cublasSetWorkspace): more on Hopper and Blackwell.
ADVISED, ADVISED_BEFORE = 32 << 20, 4 << 20
WITH_MORE = (9, 10)  # major compute capabilities
# The share of a card's peak that cuBLASLt reaches while every multiprocessor makes a tile of the result, or a part of a
# tile's sums: in float32, in TensorFloat-32, of narrow numbers, and of those whose columns do not begin at multiples of
# 16 bytes. Medians of 533 products of 16 training steps on an H200 (cuBLASLt 13.1).
REACHED, IN_TF32, NARROW, UNALIGNED = 0.7, 0.5, 0.62, 0.16
OWN = 0.2  # the share of float32's peak that foreplan's own kernel reaches: assumed
ALIGNED = 16  # bytes that tensor cores' loads take at once
TILE = 64  # rows and columns
LEAST_TERMS = 256  # sums are split into parts of no fewer terms, and at most one for each multiprocessor
LARGER = 4  # cuBLASLt makes tiles up to so many times as large, and sums in as many times more parts


def lt_kernels(
    op: Op, inputs: Windows, outputs: Windows, device: Device, *, tf32: bool = False
) -> Mapping[str, LaunchKernel]:
    """The kernels of a matrix product, or of an op that is one, by name: without scratch memory, and with it if more of
    the card then works; none if cuBLASLt cannot describe the layouts.

    Args:
        tf32: whether float32 may be rounded to TensorFloat-32.
    """
    try:
        if isinstance(op, MatMulMap):
            return _with_bias(op, inputs, outputs, device, tf32)
        if isinstance(op, Conv | ConvDataGrad | ConvWeightGrad):
            work = one_tap(op, inputs, outputs, device, tf32)
        else:
            work = Work(multiplications(op, inputs, outputs, device, tf32))
    except Refused:
        return {}
    return _kernels(work, device, added_in_place(inputs, outputs[0]))


def adds_bias(op: MatMulMap, inputs: Windows, outputs: Windows, device: Device) -> bool:
    """Whether cuBLASLt adds a bias in the call that multiplies."""
    try:
        return bool(multiplications(op, inputs, outputs, device, False))
    except Refused:
        return False


def _with_bias(
    op: MatMulMap, inputs: Windows, outputs: Windows, device: Device, tf32: bool
) -> Mapping[str, LaunchKernel]:
    """The bias in cuBLASLt's form, then one call for all; or the product in the workspace, and a map."""
    (y,), terms = outputs, terms_of(op, inputs, outputs)
    in_place = overwrites(terms, inputs, y)
    try:
        calls = multiplications(op, inputs, outputs, device, tf32)
    except Refused:
        product, start = product_of(op, inputs), workspace_at()
        calls = product_at(op, inputs, product, start, device, tf32)
        moved = sum(x.type.nbytes for x in (product, *inputs[2:], y))
        after = map_behind(op, inputs, y, start, product)
        work = Work(calls, after=after, nbytes=product.type.nbytes, moved=moved)
    else:
        before, nbytes = bias_of(terms, inputs, y)
        work = Work(calls, before, nbytes=nbytes)
    return _kernels(work, device, in_place)


def _kernels(work: Work, device: Device, overwrites: tuple[tuple[int, int], ...]) -> Mapping[str, LaunchKernel]:
    """Kernels of such work, whose calls are all of one size; scratch memory lies behind the rest of the workspace."""
    call, first = work.calls[0], align_up(work.nbytes, ALIGNMENT)
    parts = _parts(call, device)
    name = CUBLASLT + " tf32" * call.tf32
    found = {}
    for kind, room, split in ((name, _room(call, parts, device), parts), (f"{name} 0", 0, 1)):
        if split > 1 or not room:
            made = tuple(replace(each, nbytes=room, workspace=workspace_at(first)) for each in work.calls)
            price = work.moved / device.bytes_per_second * 1e9
            price += sum(_nanoseconds(each, _rate(each, device), split, device) for each in made)
            whole = first + room if room else work.nbytes
            found[kind] = LaunchKernel((*work.before, *made, *work.after), whole, overwrites, nanoseconds=round(price))
    return found


def planned(call: Multiply, device: Device) -> tuple[int, float]:
    """Bytes of scratch memory with which most of the card works at a call, and the call's nanoseconds."""
    parts = _parts(call, device)
    room = _room(call, parts, device) if parts > 1 else 0
    return room, _nanoseconds(call, _rate(call, device), parts, device)


def own_nanoseconds(op: Op, inputs: Windows, outputs: Windows, device: Device) -> int:
    """The time of foreplan's own kernel, which uses no tensor cores, for a product."""
    try:
        if isinstance(op, MatMulMap):
            calls = product_at(op, inputs, product_of(op, inputs), workspace_at(), device, False)
        else:
            calls = multiplications(op, inputs, outputs, device, False)
    except Refused:  # cuBLASLt cannot describe these
        return round(roofline(op, inputs, outputs, device, "float32", OWN))
    rate, parts = device.peak("float32") * OWN, _parts(calls[0], device)
    return round(sum(_nanoseconds(each, rate, parts, device) for each in calls))


def _nanoseconds(call: Multiply, rate: float, parts: int, device: Device) -> float:
    """The roofline: arithmetic by the share of the card that works, or reading and writing."""
    flops = 2 * call.d.rows * call.d.columns * call.terms * call.batch
    matrices = (call.a, call.b, call.d, *[call.c] * call.adds)
    nbytes = sum(x.rows * x.columns * x.dtype.itemsize * (call.batch if x.stride else 1) for x in matrices)
    return max(flops / (rate * _busy(call, parts, device)), nbytes / device.bytes_per_second) * 1e9


def _rate(call: Multiply, device: Device) -> float:
    """Flops a second of cuBLASLt, the whole card at work."""
    if call.tf32:
        return device.peak("tensorfloat32") * IN_TF32
    reached = REACHED
    if call.a.dtype.is_narrow:
        unaligned = any(x.leading * x.dtype.itemsize % ALIGNED for x in (call.a, call.b))
        reached = UNALIGNED if unaligned else NARROW
    return device.peak(call.a.dtype.name) * reached


def _busy(call: Multiply, parts: int, device: Device) -> float:
    """The share of the card that works, if each multiprocessor makes a tile at a time, or a part of a tile's sums."""
    tasks = ceil_div(call.d.rows, TILE) * ceil_div(call.d.columns, TILE) * call.batch * parts
    return tasks / (ceil_div(tasks, device.multiprocessors) * device.multiprocessors)


def _parts(call: Multiply, device: Device) -> int:
    """The number of parts of sums: the fewest that leave the least of the card idle."""
    most = max(1, min(call.terms // LEAST_TERMS, device.multiprocessors))
    return max(range(1, most + 1), key=lambda parts: _busy(call, parts, device))


def _room(call: Multiply, parts: int, device: Device) -> int:
    """Bytes of scratch memory: those advised for the card, but at most those of LARGER times `parts` parts of sums."""
    advised = ADVISED if device.compute // 10 in WITH_MORE else ADVISED_BEFORE
    sums = call.d.rows * call.d.columns * call.batch * call.d.dtype.wide.itemsize
    return min(advised, align_up(LARGER * parts * sums, ALIGNMENT))
