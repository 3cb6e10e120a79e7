"""What a program means, by the plainest reading: each value an array of its own, each call by its NumPy kernel.

It knows no offsets and no plan but the order of its steps. What is read must have been written, as that type.
"""

from __future__ import annotations

import numpy as np

import foreplan as fp
from foreplan.graph import Kind
from foreplan.graph.init import generator_for
from foreplan.lower.program import Call, Operand, Program, Slot
from foreplan.ops.loop import Loop
from foreplan.planner import Plan
from foreplan.runtime.loop import planned_loop

Memory = dict[int, np.ndarray]  # by value, its elements as they lie, flat


def interpret(step: fp.Compiled, batches: list[dict[str, np.ndarray]], seed: int) -> list[bytes]:
    """The bytes of what each step returns, and of what the last one leaves."""
    stored: dict[str, np.ndarray] = {}
    for slot in step.program.stored:
        assert slot.name not in stored and slot.init is not None
        stored[slot.name] = _made(slot, seed)
    made: list[bytes] = []
    for batch in batches:
        losses: list[np.ndarray] = []
        outputs: list[list[np.ndarray]] = []
        for i in range(step.accumulate):
            given = {
                s.name: batch[s.name][i] if step.accumulate > 1 else batch[s.name]
                for s in step.program.inputs
                if s.init is None
            }
            memory = _run(step.program, step.plan, stored, given)
            losses += [] if step.program.loss is None else [_read(memory, step.program.loss.operand)]
            outputs.append([_read(memory, s.operand).copy() for s in (*step.program.outputs, *step.program.gradients)])
        if step.update is not None:
            _run(step.update.program, step.update.plan, stored, {})
        made.append(np.float64(float(losses[-1]) if losses else np.nan).tobytes())
        made += [np.stack(each).tobytes() if step.accumulate > 1 else each[0].tobytes() for each in zip(*outputs)]
    return made + [stored[slot.name].tobytes() for slot in step.program.stored if slot.kind.is_kept]


def _made(slot: Slot, seed: int) -> np.ndarray:
    """A first content."""
    array = np.empty(slot.operand.type.shape, slot.operand.type.dtype.numpy)
    assert slot.init is not None
    slot.init.fill(array, generator_for(seed, slot.name))
    return array


def _run(program: Program, plan: Plan, stored: dict[str, np.ndarray], given: dict[str, np.ndarray]) -> Memory:
    """Run a program once, and let what is stored have its next content."""
    memory: Memory = {}
    for slot in (*program.inputs, *program.stored):
        assert slot.operand.value not in memory, f"{slot.name} is where another one is"
        content = (
            stored[slot.name]
            if slot.kind is not Kind.INPUT
            else given[slot.name]
            if slot.init is None
            else _made(slot, 0)
        )
        memory[slot.operand.value] = np.ascontiguousarray(content, slot.operand.type.dtype.numpy).reshape(-1)
    with np.errstate(all="ignore"):
        for number in plan.steps:
            call = program.calls[number.action]
            for operand, array in zip(call.outputs, _computed(call, memory)):
                memory[operand.value] = array
    homes = {slot.operand.value: slot.name for slot in program.stored}
    for index, value in enumerate(program.values):
        if value.home >= 0:
            old = stored[homes[value.home]]
            assert memory[index].dtype == old.dtype, f"{homes[value.home]} gets a content of another type"
            stored[homes[value.home]] = memory[index].reshape(old.shape).copy()
    return memory


def _computed(call: Call, memory: Memory) -> list[np.ndarray]:
    """A call's outputs, flat as they lie."""
    inputs = [_read(memory, operand) for operand in call.inputs]
    types = [operand.type for operand in call.inputs], [operand.type for operand in call.outputs]
    flat = [np.empty(operand.type.size, operand.type.dtype.numpy) for operand in call.outputs]
    outputs = [_window(array, operand) for array, operand in zip(flat, call.outputs)]
    dense = [np.empty(operand.type.shape, operand.type.dtype.numpy) for operand in call.outputs]
    nbytes = call.op.workspace(*types)
    raw = np.empty(nbytes + 64, np.uint8)
    start = -raw.ctypes.data % 64
    if isinstance(call.op, Loop):
        dense = _looped(call.op, inputs)
    elif type(call.op).compute is fp.graph.Op.compute:
        return flat  # no NumPy kernel: types alone are checked
    else:
        call.op.compute(inputs, dense, raw[start : start + nbytes])
    for output, array in zip(outputs, dense):
        output[...] = array
    return flat


def _looped(op: Loop, inputs: list[np.ndarray]) -> list[np.ndarray]:
    """A loop's outputs, step by step; carries, stacks and histories are arrays of their own."""
    body = planned_loop(op, "numpy").body.program
    plan = planned_loop(op, "numpy").plan
    names = [value.name for value in op.graph.inputs]
    stored = {name: x.copy() for name, x in zip(names, inputs)}
    stacks: dict[int, list[np.ndarray]] = {}
    histories = [[stored[names[i]]] for i in op.histories]
    order = list(range(op.steps))[:: -1 if op.reverse else 1]
    for t in order:
        stored |= {name: x[t, ...] for i, (name, x) in enumerate(zip(names, inputs)) if op.is_slice(i)}
        memory = _run(body, plan, stored, {})
        stacks[t] = [_read(memory, slot.operand).copy() for slot in body.outputs]
        for history, i in zip(histories, op.histories):
            history.append(stored[names[i]])
    carried = [stored[name] for name in names[: op.carries]]
    rows = [np.stack(each) for each in zip(*(stacks[t] for t in range(op.steps)))]
    return [*carried, *rows, *(np.stack(history[:: -1 if op.reverse else 1]) for history in histories)]


def _read(memory: Memory, operand: Operand) -> np.ndarray:
    assert operand.value in memory, f"{operand} is read, and nothing has written it"
    array = memory[operand.value]
    assert array.dtype == operand.written.numpy, f"{operand} is read, and holds {array.dtype}"
    return _window(array.view(operand.type.dtype.numpy), operand)


def _window(array: np.ndarray, operand: Operand) -> np.ndarray:
    if operand.type.size == 0:
        return np.empty(operand.type.shape, operand.type.dtype.numpy)
    return np.ndarray(operand.type.shape, array.dtype, array.data, operand.offset, operand.strides)
