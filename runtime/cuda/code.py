"""A planned step on a card: its instructions, and the machine code of its kernels."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from foreplan.base.errors import UsageError
from foreplan.lower.program import Program
from foreplan.lower.targets import engine_info, options_of
from foreplan.planner.plan import Plan
from foreplan.runtime.cuda.device import Device
from foreplan.runtime.cuda.launch import Instruction, Launch, holding
from foreplan.runtime.cuda.libraries.nvrtc import architecture_of, cubin, key_of
from foreplan.runtime.cuda.table import kernel_named
from foreplan.runtime.cuda.target import target


def device_of(program: Program) -> Device:
    """The card that a program was lowered for."""
    return target(options_of(program.target)).device


def instructions(program: Program, plan: Plan, device: Device) -> Iterator[Instruction]:
    """All that a plan runs on a card, in order."""
    for step in plan.steps:
        call = program.calls[step.action]
        reads, writes = ([operand.window for operand in found] for found in (call.inputs, call.outputs))
        kernel = kernel_named(call.op, call.kernel, call.payload, reads, writes, device)
        yield from () if kernel is None else kernel.instructions


def with_code(program: Program, plan: Plan) -> Program:
    """The program with the machine code of foreplan's own kernels in its plan, so that binding compiles nothing.

    Raises:
        UsageError: the target is no card.
        TargetError: there is no CUDA compiler.
    """
    if not engine_info(program.target).on_card:
        raise UsageError(
            f"only plans for cards can hold kernels, and this one is for {program.target}: leave them out, or "
            f"plan for a target such as cuda:h100"
        )
    device = device_of(program)
    architecture = architecture_of(device)
    sources = {each.source for each in instructions(program, plan, device) if isinstance(each, Launch)}
    sources.add(holding(0).source)  # of a trace
    made = {key_of(source, architecture): cubin(source, architecture) for source in sources}
    return replace(program, code=tuple(sorted(made.items())))
