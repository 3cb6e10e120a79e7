"""What a plan file says of values and slots, held against what follows from its calls.

Every value belongs to exactly one slot that gives it, or is written by calls; from that follow its bytes, element type,
alignment, region, category, role, and where its home may be.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from foreplan.base.errors import PlanError
from foreplan.graph import Array, Fill, Initializer, Kind, Stored, TensorType
from foreplan.graph.flat import Flat
from foreplan.graph.init import RandomSeed
from foreplan.graph.shard import Sharded
from foreplan.lower.program import ARENA, CATEGORIES, HOST, STATE, Operand, Program, Slot, region_of
from foreplan.lower.target import Target
from foreplan.ops.collective import Begin, Finish
from foreplan.ops.map import COPY
from foreplan.ops.random import STATE as RANDOM_STATE
from foreplan.ops.storage import alike
from foreplan.planner import Category, Role, Value
from foreplan.runtime.magnitudes import adapters_with_magnitudes

_PASSING = (Category.ACTIVATIONS, Category.GRADIENTS)  # of what lives within a step
_FIELDS = ("nbytes", "alignment", "region", "category", "role", "home")


def check_slots(program: Program, target: Target) -> None:
    """Every slot and value must be what the calls make it, and every name must mean one thing.

    Args:
        program: whose windows lie within their values.
        target: that it was lowered for.

    Raises:
        PlanError: names the slot or value, and what it should be.
    """
    _check_names(program)
    _check_kinds(program)
    _check_rows(program)
    _check_magnitudes(program)
    _check_results(program)
    given, written, results = _given(program), _written(program), _results(program)
    owned = given.keys() | written.keys()
    if orphans := [value.name for index, value in enumerate(program.values) if index not in owned]:
        raise PlanError(f"value {orphans[0]!r}: no action writes it, and it is no slot's")
    if gone := [program.values[index].name for index in results if index not in written]:
        raise PlanError(f"value {gone[0]!r} is a result, and no action writes it")
    _check_types(program, {value: slot.operand for value, slot in given.items()} | written)
    _check_homes(program, given, written)
    ahead = {slot.operand.value for slot in program.ahead}
    for index, value in enumerate(program.values):
        if index in given:
            wanted = _wanted_of_slot(value, given[index], index in ahead)
        else:
            wanted = _wanted_of_result(program, index, written[index], results.get(index))
        wanted = replace(wanted, alignment=target.alignment)
        for field in _FIELDS:
            found, right = getattr(value, field), getattr(wanted, field)
            if found != right:
                raise PlanError(f"value {value.name!r}: its {field} is {found}, and must be {right}")


def _check_names(program: Program) -> None:
    together = {
        "values": [value.name for value in program.values],
        "inputs and stored values": [slot.name for slot in (*program.inputs, *program.stored)],
        "inputs and stored tensors": [slot.name for slot in (*program.inputs, *program.tensors)],
        "second slots": [slot.name for slot in program.ahead],
        "outputs": [slot.name for slot in program.outputs],
        "gradients": [slot.name for slot in program.gradients],
    }
    for what, names in together.items():
        if len(set(names)) < len(names):
            twice = next(name for i, name in enumerate(names) if name in names[:i])
            raise PlanError(f"two {what} are named {twice!r}")


def _check_kinds(program: Program) -> None:
    """Stored values have a kind that is stored, and a first content that their type holds."""
    for slot in (*program.inputs, *program.stored):
        type, init = slot.operand.type, slot.init
        if isinstance(init, Sharded):
            type, init = init.type, _cut(slot.name, slot.operand.type, init)
        if slot.kind is not Kind.INPUT and (init is None or not slot.kind.is_stored):
            raise PlanError(f"slot {slot.name!r}: a stored value needs a first content and a kind that is stored")
        drawn = init is not None and not isinstance(init, Array | Fill | Stored)
        if drawn and (type != RANDOM_STATE if isinstance(init, RandomSeed) else not type.dtype.is_float):
            raise PlanError(f"slot {slot.name!r}: {init} is no content of {type}")
        if slot.kind is Kind.ACCUMULATOR and not (isinstance(init, Fill) and init.value == 0):
            raise PlanError(f"slot {slot.name!r}: a sum over micro-batches is zero at first")


def _check_rows(program: Program) -> None:
    """Tensors in a row lie side by side within it, and each has a first content that its type holds."""
    for slot in program.stored:
        if not isinstance(slot.init, Flat):
            continue
        where, row, end = f"slot {slot.name!r}", slot.operand.type, 0
        groups = slot.init.ranks * slot.init.stride
        divided = min(slot.init.ranks, slot.init.stride) > 0 and program.ranks % groups == 0
        if row.rank != 1 or not divided or slot.operand.blocks is not None:
            raise PlanError(f"{where}: {row} is no row of tensors, or no part of one for {program.ranks} ranks")
        if slot.kind not in (Kind.PARAMETER, Kind.FROZEN, Kind.STATE) or not slot.init.members:
            raise PlanError(f"{where}: a {slot.kind} holds no tensors of other names")
        for each in slot.init.members:
            fits = end <= each.start and each.type.dtype == row.dtype
            end = each.start + each.type.size
            if not fits or end > row.size * slot.init.ranks:
                raise PlanError(f"{where}: {each.name!r} does not lie behind the tensor before it, within the row")
            init = _cut(each.name, each.type, each.init) if isinstance(each.init, Sharded) else each.init
            if isinstance(init, Flat | RandomSeed | Sharded):
                raise PlanError(f"{where}: {init} is no content of {each.name!r}")
            if not isinstance(init, Array | Fill | Stored) and not each.type.dtype.is_float:
                raise PlanError(f"{where}: {init} is no content of {each.type}")


def _cut(name: str, type: TensorType, init: Sharded) -> Initializer:
    """The first content of the whole of a tensor of which a value is a part."""
    shard = init.shard
    if shard.ranks < 2 or shard.blocks < 1 or not shard.divides(init.type) or shard.of(init.type) != type:
        raise PlanError(f"slot {name!r}: {type} is not {shard} of {init.type}")
    if isinstance(init.init, Sharded | Flat):
        raise PlanError(f"slot {name!r}: a part has no parts of its own")
    return init.init


def _check_magnitudes(program: Program) -> None:
    """An adapter has one magnitude for each output of a weight that is there."""
    types = {slot.name: slot.operand.type for slot in program.tensors}
    for each in adapters_with_magnitudes(program.tensors):
        weight, magnitude = types.get(each.weight), types[each.magnitude or ""]
        shape = () if weight is None else weight.shape
        outputs = math.prod(shape[1:]) if each.transposed else math.prod(shape[:1])
        if len(shape) < 2 or magnitude.size != outputs or not magnitude.dtype.is_float:
            raise PlanError(f"slot {each.magnitude!r}: {magnitude} are no magnitudes of {each.weight!r}, {weight}")


def _check_results(program: Program) -> None:
    loss = program.loss
    if loss is not None and (loss.operand.type.shape or not loss.operand.type.dtype.is_float):
        raise PlanError(f"the loss must be a floating-point scalar, and is {loss.operand.type}")
    parameters = {slot.name: slot.operand.type for slot in program.stored if slot.kind is Kind.PARAMETER}
    parameters |= {slot.name: slot.operand.type for slot in program.inputs}
    for slot in program.gradients:
        if parameters.get(slot.name) != slot.operand.type:
            raise PlanError(f"there is a gradient {slot.name!r} of {slot.operand.type}, and no such parameter or input")


def _given(program: Program) -> dict[int, Slot]:
    """By value, the slot that gives it: a whole value in C order, and each value once."""
    found: dict[int, Slot] = {}
    for slot in (*program.inputs, *program.stored, *program.ahead):
        operand = slot.operand
        whole = operand.offset == 0 and operand.nbytes == program.values[operand.value].nbytes
        lies = operand.window.is_dense if operand.blocks is None else slot.kind.is_stored
        if operand.value in found or not whole or not lies or operand.holds is not None:
            raise PlanError(f"slot {slot.name!r}: it must have a whole value in C order for itself")
        found[operand.value] = slot
    return found


def _written(program: Program) -> dict[int, Operand]:
    """By value, the output that writes it; all actions that write one write it alike."""
    found: dict[int, Operand] = {}
    for call in program.calls:
        for operand in call.outputs:
            if operand.holds is not None:
                raise PlanError(f"node {call.node!r}: writes {operand}, and only what is read may be of another type")
            if found.setdefault(operand.value, operand) != operand:
                raise PlanError(f"node {call.node!r}: another one writes the same value as {found[operand.value]}")
    return found


def _results(program: Program) -> dict[int, Category]:
    """By value, the category of the first result that it is."""
    loss = () if program.loss is None else (program.loss,)
    slots: Sequence[tuple[Category, Collection[Slot]]] = (
        (Category.OUTPUTS, program.outputs),
        (Category.GRADIENTS, program.gradients),
        (Category.OUTPUTS, loss),
    )
    found: dict[int, Category] = {}
    for category, some in slots:
        for slot in some:
            found.setdefault(slot.operand.value, category)
    return found


def _check_types(program: Program, owners: Mapping[int, Operand]) -> None:
    """Whatever reads a value takes it for elements of the type that is written there, or says which bytes it reads."""
    dtypes = {value: operand.type.dtype for value, operand in owners.items()}

    def is_taken(operand: Operand) -> bool:
        there = owners[operand.value]
        lies = operand.blocks == there.blocks and (there.blocks is None or operand == there)
        return lies and dtypes[operand.value] == operand.written and alike(operand.written, operand.type.dtype)

    for call in program.calls:
        for operand in call.inputs:
            if not is_taken(operand):
                raise PlanError(f"node {call.node!r}: reads {operand}, which holds {dtypes[operand.value]}")
    loss = () if program.loss is None else (program.loss,)
    for slot in (*program.outputs, *program.gradients, *loss):
        if not is_taken(slot.operand):
            raise PlanError(f"slot {slot.name!r}: is {slot.operand}, which holds {dtypes[slot.operand.value]}")


def _check_homes(program: Program, given: Mapping[int, Slot], written: Mapping[int, Operand]) -> None:
    """A stored value that steps change has one next content at most, which is written as a whole, and lies as it."""
    replaced: set[int] = set()
    for index, value in enumerate(program.values):
        if value.home < 0:
            continue
        home, new = given.get(value.home), written.get(index)
        if home is None or home.kind.is_fixed or home.kind is Kind.INPUT or value.home in replaced:
            raise PlanError(f"value {value.name!r}: its home must be a stored value that changes, and no other's")
        if new is None or new.window != home.operand.window:
            raise PlanError(f"value {value.name!r}: is no next content of {home.name!r}, {home.operand.type}")
        replaced.add(value.home)
    for slot in program.stored:
        if slot.kind is Kind.ACCUMULATOR and slot.operand.value not in replaced:
            raise PlanError(f"slot {slot.name!r}: a sum over micro-batches changes in both halves of a step")


def _wanted_of_slot(value: Value, slot: Slot, ahead: bool) -> Value:
    """What a value must be that is there when the step begins."""
    wanted = replace(value, nbytes=slot.operand.nbytes, category=CATEGORIES[slot.kind], home=-1)
    if ahead:
        return replace(wanted, region=STATE, role=Role.STORED)
    if slot.kind is Kind.INPUT:
        return replace(wanted, region=ARENA, role=Role.INPUT)
    return replace(wanted, region=region_of(slot.kind), role=Role.STORED)


def _wanted_of_result(program: Program, index: int, written: Operand, result: Category | None) -> Value:
    """What a value must be that actions write."""
    value = program.values[index]
    if value.home >= 0:
        home = program.values[value.home]
        wanted = replace(value, region=home.region, category=home.category, role=Role.OUTPUT)
    elif result is not None:
        wanted = replace(value, region=ARENA, category=result, role=Role.OUTPUT)
    else:
        arrives = any(program.calls[each].of(Begin, Finish) for each in program.producers[index])
        category = value.category if value.category in _PASSING else Category.ACTIVATIONS
        category = Category.COMMUNICATION if arrives else category
        region = HOST if value.region == HOST and _is_copied(program, index) else ARENA
        wanted = replace(value, region=region, category=category, role=Role.TRANSIENT)
    return replace(wanted, nbytes=written.type.nbytes)


def _is_copied(program: Program, index: int) -> bool:
    """Whether a value is what only copies write and read, as it must be in host memory. What waits for it reads none of
    its bytes.
    """
    readers = [each for each in program.readers[index] if any(x.value == index for x in program.calls[each].inputs)]
    return all(program.calls[each].op == COPY for each in (*program.producers[index], *readers))
