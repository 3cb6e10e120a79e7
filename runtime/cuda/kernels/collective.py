"""Exchanges between ranks by NCCL, and copies that depend on the rank.

NCCL only moves bytes. Sums over ranks are foreplan's own kernels, in the order of ranks.
"""

from __future__ import annotations

from collections.abc import Mapping

from foreplan.graph import Op, Window
from foreplan.graph.layouts import lie_alike
from foreplan.graph.op import Windows
from foreplan.ops.collective import Begin, Finish, OnlyOn, OwnPart
from foreplan.ops.local_index import LocalIndex
from foreplan.ops.point_to_point import BeginMessage, BeginSend
from foreplan.runtime.cuda.device import Device
from foreplan.runtime.cuda.kernels.map import broadcast, map_launches
from foreplan.runtime.cuda.launch import (
    Arithmetic,
    Await,
    Choose,
    Clear,
    Copy,
    Exchange,
    LaunchKernel,
    input_at,
    output_at,
)
from foreplan.runtime.cuda.libraries import nccl
from foreplan.runtime.kernel import Refused


def reads(op: Op, index: int, window: Window) -> Window:
    """Without gaps, but for what is only to be there."""
    return window if isinstance(op, Finish) and index > 1 else Window.dense(window.type)


def exchanges(op: Op, inputs: Windows, outputs: Windows, device: Device, how: Arithmetic) -> Mapping[str, LaunchKernel]:
    """The kernel of an exchange that begins or ends, by name."""
    return {nccl.NAME: exchange(op, inputs, outputs, device)}


def exchange_named(
    op: Op, name: str, payload: bytes, inputs: Windows, outputs: Windows, device: Device
) -> LaunchKernel | None:
    """The same, for a name and payload in a plan."""
    return exchange(op, inputs, outputs, device) if name == nccl.NAME and not payload else None


def exchange(op: Op, inputs: Windows, outputs: Windows, device: Device) -> LaunchKernel:
    """One call of NCCL, or one wait for it. Lowering prices exchanges by links, not by cards."""
    if isinstance(op, BeginMessage):
        return message(op, inputs, outputs)
    x, (y,) = inputs[0], outputs
    if isinstance(op, Finish):
        instructions = (Await(output_at(0)),) if y.type.size else ()
        return LaunchKernel(instructions, overwrites=((0, 0),), nanoseconds=0)
    assert isinstance(op, Begin)
    if not x.is_dense:
        raise Refused(f"{x} has gaps")
    call = Exchange(op.kind, op.peer, input_at(0), output_at(0), x.type.nbytes, op.ranks, op.stride)
    waits = (Await(output_at(0)),) if op.wait else ()
    return LaunchKernel((call, *waits) if x.type.size else ())


def message(op: BeginMessage, inputs: Windows, outputs: Windows) -> LaunchKernel:
    """One side of a message: what is sent, or the place where it arrives. Its wait is for the first result."""
    content, place = (inputs[0], input_at(0)) if isinstance(op, BeginSend) else (outputs[0], output_at(0))
    if not content.is_dense:
        raise Refused(f"{content} has gaps")
    call = Exchange(op.kind, op.peer, place, output_at(0), content.type.nbytes, op.ranks, op.stride, op.own)
    return LaunchKernel((call,))


def own_part(op: Op, inputs: Windows, outputs: Windows, device: Device) -> LaunchKernel:
    """A copy, from further behind the higher the rank is."""
    assert isinstance(op, OwnPart)
    nbytes = outputs[0].type.nbytes
    choices = tuple(Copy(output_at(0), input_at(0, r * nbytes), nbytes) for r in range(op.ranks))
    return LaunchKernel((Choose(choices, op.stride),))


def local_index(op: Op, inputs: Windows, outputs: Windows, device: Device) -> LaunchKernel:
    """A map, for each rank another one."""
    assert isinstance(op, LocalIndex)
    (x,), (y,) = inputs, outputs
    if not y.type.size:
        return LaunchKernel(())
    tensors = [broadcast(input_at(0), x, y.shape)], [broadcast(output_at(0), y, y.shape)]
    launches = [map_launches([op.of_rank(rank)], y.shape, *tensors) for rank in range(op.ranks)]
    return LaunchKernel((Choose(tuple(each for (each,) in launches), op.stride),))


def only_on(op: Op, inputs: Windows, outputs: Windows, device: Device) -> LaunchKernel:
    """A copy on one rank, which may be in place, and zeros on the others."""
    assert isinstance(op, OnlyOn)
    (x,), (y,) = inputs, outputs
    copy, zeros = Copy(output_at(0), input_at(0), y.type.nbytes), Clear(output_at(0), y.type.nbytes)
    choices = tuple(copy if rank == op.root else zeros for rank in range(op.ranks))
    return LaunchKernel((Choose(choices, op.stride),), overwrites=((0, 0),) if lie_alike(x, y) else ())
