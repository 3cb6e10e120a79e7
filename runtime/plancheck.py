"""The check of a plan file's program against its kernels."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from foreplan.base.errors import PlanError
from foreplan.lower import Call, Operand, Program, Slot, Target, engine_info, target_named
from foreplan.lower.program import REGIONS, WITH_HOST
from foreplan.lower.target import named
from foreplan.planner import Action, Plan, check_problem
from foreplan.runtime.slotcheck import check_slots
from foreplan.runtime.world.check import check_exchanges


def slots_of(program: Program) -> Iterator[tuple[str, Slot]]:
    """Every slot with what it is."""
    yield from (("input", slot) for slot in program.inputs)
    yield from (("stored", slot) for slot in program.stored)
    yield from (("ahead", slot) for slot in program.ahead)
    yield from (("output", slot) for slot in program.outputs)
    yield from (("gradient", slot) for slot in program.gradients)
    if program.loss is not None:
        yield "loss", program.loss


def check_program(program: Program, plan: Plan) -> None:
    """Check everything in a program that follows from its calls, since the verifier trusts the problem.

    Types, and the fields of actions that are derived from their calls, are right already.

    Args:
        plan: the verifier proves it, except for the fields that it does not need.

    Raises:
        PlanError: names the node, slot or value, and what is wrong with it.
    """
    target = target_named(program.target)
    _check_device(program, target)
    if program.regions not in (REGIONS, WITH_HOST):
        raise PlanError(f"its regions are {[region.name for region in program.regions]}, and no program has these")
    check_problem(program)
    for _, slot in slots_of(program):
        _check_window(program, slot.operand, f"slot {slot.name!r}")
    _check_ahead(program)
    used = {step.action for step in plan.steps}
    for index in range(len(program.calls)):
        _check_call(program, index, target, index in used)
    check_slots(program, target)
    check_exchanges(program, plan)
    for number, step in enumerate(plan.steps):
        if 0 <= step.action < len(program.actions) and not program.actions[step.action].workspace and step.workspace:
            raise PlanError(f"step {number} needs no workspace, but has one at {step.workspace}")


def _check_call(program: Program, index: int, target: Target, used: bool) -> None:
    """Windows, kernel, workspace and rights of one action. The payloads of unused kernels, such as a plan of cuDNN's,
    are not in the file.
    """
    action, call = program.actions[index], program.calls[index]
    where = f"node {call.node!r}"
    for operand in (*call.inputs, *call.outputs):
        _check_window(program, operand, where)
    windows = [operand.window for operand in call.outputs]
    for operand, window in zip(call.outputs, windows):
        whole = operand.offset == 0 and operand.type.nbytes == program.values[operand.value].nbytes
        if not whole or not window.is_compact:
            raise PlanError(f"{where}: an output must be a whole value")
    inputs = [x.window for x in call.inputs]
    if any(x.blocks is not None for x in inputs):  # which lowering asks for itself
        kernel = named(target.kernels(call.op, inputs, windows), call.kernel, call.payload)
    else:
        kernel = target.kernel(call.op, call.kernel, call.payload, inputs, windows)
    if kernel is None and not used and not call.payload and engine_info(target.name).on_card:
        return
    if kernel is None:
        raise PlanError(f"{where}: target {target.name} has no kernel {call.kernel!r} for {call.op.name}")
    if any(operand.offset % kernel.alignment for operand in (*call.inputs, *call.outputs)):
        raise PlanError(f"{where}: the kernel {call.kernel!r} needs operands at multiples of {kernel.alignment} bytes")
    if action.workspace != kernel.workspace:
        raise PlanError(f"{where}: needs {kernel.workspace} bytes of workspace, and {action.workspace} are planned")
    _check_reads(target, call)
    _check_overwrites(action, call, kernel.overwrites, where)
    _check_parts(action, call, kernel.parts, where)


def _check_ahead(program: Program) -> None:
    """Second slots have bytes of their own, which no action touches; an input has at most one."""
    inputs = {slot.name: slot.operand.type for slot in program.required_inputs}
    touched = {operand.value for call in program.calls for operand in (*call.inputs, *call.outputs)}
    for slot in program.ahead:
        if slot.operand.value in touched:
            raise PlanError(f"the second slot of {slot.name!r} has no bytes of its own")
        if inputs and inputs.pop(slot.name, None) != slot.operand.type:
            raise PlanError(f"there is a second slot for {slot.name!r}, but no such input without a default")
    if program.ahead and inputs:
        raise PlanError(f"other inputs have a second slot, but {next(iter(inputs))!r} has none")


def _check_device(program: Program, target: Target) -> None:
    """Everything that the plan depends on must be as on the machine that made it."""
    here = dict(target.profile.needs)
    for name, wanted in program.profile.needs if program.profile is not None else ():
        if here.get(name) != wanted:
            raise PlanError(f"it was made for {name} {wanted}, and this machine has {here.get(name, 'none')}")
    if program.profile is None or len(program.profile.needs) != len(here) or program.target != target.name:
        raise PlanError(
            f"it does not name everything that it was made for: target {target.name}, {', '.join(here) or 'no more'}"
        )


def _check_window(program: Program, operand: Operand, where: str) -> None:
    if not 0 <= operand.value < len(program.values):
        raise PlanError(f"{where}: there is no value {operand.value}")
    value = program.values[operand.value]
    if operand.blocks is not None and (operand.offset, operand.nbytes) != (0, value.nbytes):
        raise PlanError(f"{where}: {operand} is not all of {value.name!r}, which has {value.nbytes} bytes")
    if operand.type.size == 0 or operand.blocks is not None:
        return
    steps = [(extent - 1) * stride for extent, stride in zip(operand.type.shape, operand.strides)]
    low = operand.offset + sum(step for step in steps if step < 0)
    high = operand.offset + sum(step for step in steps if step > 0) + operand.type.dtype.itemsize
    if low < 0 or high > value.nbytes:
        raise PlanError(f"{where}: reads bytes {low} to {high} of {value.name!r}, which has {value.nbytes}")
    if any(number % operand.type.dtype.itemsize for number in (operand.offset, *operand.strides)):
        raise PlanError(f"{where}: a window onto {value.name!r} is not aligned to its elements")


def _check_reads(target: Target, call: Call) -> None:
    windows = [operand.window for operand in call.inputs]
    wanted = target.reads(call.op, windows, [operand.type for operand in call.outputs])
    for i, window in enumerate(windows):
        if window.type.size > 1 and wanted[i] != window:
            raise PlanError(f"node {call.node!r}: its kernel cannot read input {i} with the strides {window.strides}")


def _check_overwrites(action: Action, call: Call, allowed: Sequence[tuple[int, int]], where: str) -> None:
    for pair in action.overwrites:
        readers = [i for i, operand in enumerate(call.inputs) if operand.value == action.reads[pair.read]]
        output = call.outputs[pair.write]
        for i in readers:
            operand = call.inputs[i]
            whole = operand.offset == 0 and operand.type.nbytes == output.type.nbytes
            alike = (operand.window.is_dense and output.window.is_dense) or operand.window == output.window
            if (pair.write, i) not in allowed or not whole or not alike:
                raise PlanError(f"{where}: its kernel may not overwrite input {i} with output {pair.write}")


def _check_parts(action: Action, call: Call, allowed: Sequence[tuple[int, int, int]], where: str) -> None:
    for part in action.parts:
        readers = [i for i, operand in enumerate(call.inputs) if operand.value == action.reads[part.read]]
        dense = all(
            operand.window.is_dense for operand in (*(call.inputs[i] for i in readers), call.outputs[part.write])
        )
        if len(readers) != 1 or (part.write, readers[0], part.offset) not in allowed or not dense:
            raise PlanError(f"{where}: its kernel does not find input {readers} at byte {part.offset} of its output")
