"""What a program says of its values and slots follows from its calls: no other figure, kind or name is taken."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

import foreplan as fp
from foreplan.base.errors import PlanError
from foreplan.graph import Fill, Kind, Normal, RandomSeed
from foreplan.lower import Program, target_named
from foreplan.lower.program import ARENA, CATEGORIES, HOST, Slot, region_of
from foreplan.ops.map import COPY
from foreplan.ops.random import STATE
from foreplan.planner import Category, Role
from foreplan.runtime.slotcheck import check_slots
from tests.profile import pick
from tests.runtime.test_session import classifier, compiled

PASSING = {Category.ACTIVATIONS, Category.GRADIENTS}
LISTS = ("inputs", "stored", "ahead", "outputs", "gradients")


@pytest.fixture(scope="module")
def programs(halves: fp.Compiled) -> dict[str, Program]:
    assert halves.update is not None
    asked = compiled(classifier(), optimizer=None)
    return {
        "training": compiled(classifier(dropout=0.2), prefetch=True).program,
        "gradients": asked.program,
        "first half": halves.program,
        "second half": halves.update.program,
        "with host": compiled(classifier(batch=256), offload=True).program,
        "inference": fp.compile(classifier()).program,
    }


NAMES = ("training", "gradients", "first half", "second half", "with host", "inference")


def taken(program: Program) -> bool:
    try:
        check_slots(program, target_named(program.target))
    except PlanError:
        return False
    return True


def with_value(program: Program, index: int, **fields: Any) -> Program:
    new = replace(program.values[index], **fields)
    return replace(program, values=(*program.values[:index], new, *program.values[index + 1 :]))


def with_slots(program: Program, where: str, slots: list[Slot]) -> Program:
    return replace(program, **{where: tuple(slots)})


def others(program: Program, index: int) -> Iterator[dict[str, Any]]:
    """Figures that a value does not have, each by itself."""
    value = program.values[index]
    calls = [program.calls[i].op for i in (*program.producers[index], *program.readers[index])]
    yield from ({"nbytes": n} for n in (0, value.nbytes - 1, value.nbytes + 64) if n != value.nbytes)
    yield from ({"alignment": n} for n in (1, value.alignment // 2, 2 * value.alignment))
    for region in range(len(program.regions)):
        copied = {region, value.region} == {ARENA, HOST} and calls and set(calls) == {COPY}
        if region != value.region and not copied:
            yield {"region": region}
    passing = value.role is Role.TRANSIENT and value.category in PASSING
    yield from ({"category": c} for c in Category if c is not value.category and not (passing and c in PASSING))
    yield from ({"role": role} for role in Role if role is not value.role)
    free = {slot.operand.value for slot in program.stored if slot.operand.type.nbytes == value.nbytes}
    free -= {other.home for other in program.values}  # to update one that nothing updates is another program
    given = (*program.stored, *program.inputs)
    homes = {-1, index, *(slot.operand.value for slot in given)} - free
    apart = pick(4, 4, 1)  # of a few values in a row, each tries others
    yield from ({"home": home} for home in sorted(homes)[index % apart :: apart] if home != value.home)


@pytest.mark.parametrize("name", NAMES)
def test_no_value_has_another_figure(programs: dict[str, Program], name: str) -> None:
    program = programs[name]
    assert taken(program)
    for index in range(len(program.values)):
        for fields in others(program, index):
            assert not taken(with_value(program, index, **fields)), f"{program.values[index]} with {fields}"


@pytest.mark.parametrize("name", NAMES)
def test_no_slot_is_dropped_doubled_or_of_another_name(programs: dict[str, Program], name: str) -> None:
    program = programs[name]
    for where in LISTS:
        slots = list(getattr(program, where))
        for i, slot in enumerate(slots):
            if where not in ("outputs", "gradients"):  # those may be fewer
                dropped = with_slots(program, where, slots[:i] + slots[i + 1 :])
                assert not taken(dropped), f"without {slot.name}"
            assert not taken(with_slots(program, where, [*slots, slot])), f"{slot.name} twice"
            again = replace(slot, name=slots[i - 1].name)
            if len(slots) > 1:
                assert not taken(with_slots(program, where, [*slots[:i], again, *slots[i + 1 :]])), again.name


@pytest.mark.parametrize("name", NAMES)
def test_no_slot_is_of_another_kind_or_has_no_content(programs: dict[str, Program], name: str) -> None:
    program = programs[name]
    for i, slot in enumerate(program.stored):
        rest = program.stored
        like = {kind for kind in Kind if kind.is_stored and _lies(kind) == _lies(slot.kind)}
        if slot.operand.value in {value.home for value in program.values}:
            like -= {Kind.CONSTANT}
        if slot.name in {each.name for each in program.gradients}:
            like = {Kind.PARAMETER}
        for kind in Kind:
            if kind not in like and not (kind is Kind.ACCUMULATOR and slot.init == Fill(0)):
                changed = with_slots(program, "stored", [*rest[:i], replace(slot, kind=kind), *rest[i + 1 :]])
                assert not taken(changed), f"{slot.name} as {kind}"
        wrong = [None, *([] if slot.operand.type.dtype.is_float else [Normal(1.0)])]
        wrong += [] if slot.operand.type == STATE else [RandomSeed()]
        wrong += [Fill(1), Normal(1.0)] if slot.kind is Kind.ACCUMULATOR else []
        for init in wrong:
            changed = with_slots(program, "stored", [*rest[:i], replace(slot, init=init), *rest[i + 1 :]])
            assert not taken(changed), f"{slot.name} with {init}"


def _lies(kind: Kind) -> Any:
    return region_of(kind), CATEGORIES[kind]


@pytest.mark.parametrize("name", NAMES)
def test_no_slot_is_a_part_or_another_order_of_its_value(programs: dict[str, Program], name: str) -> None:
    program = programs[name]
    for where in ("inputs", "stored", "ahead"):
        slots = list(getattr(program, where))
        for i, slot in enumerate(slots):
            operand = slot.operand
            shape = operand.type.shape
            changed = [replace(operand, offset=operand.type.dtype.itemsize)]
            if len(shape) > 1 and operand.type.size > max(shape):
                changed.append(replace(operand, strides=operand.strides[::-1]))
                changed.append(replace(operand, type=replace(operand.type, shape=(1, *shape[1:]))))
            for new in changed:
                again = with_slots(program, where, [*slots[:i], replace(slot, operand=new), *slots[i + 1 :]])
                assert not taken(again), f"{slot.name} at {new}"


@pytest.mark.parametrize("name", NAMES)
def test_nothing_is_read_as_of_another_type_than_it_was_written(programs: dict[str, Program], name: str) -> None:
    program = programs[name]
    for i, call in enumerate(program.calls):
        for side in ("inputs", "outputs"):
            for k, operand in enumerate(getattr(call, side)):
                other = "int32" if operand.type.dtype.name != "int32" else "float32"
                new = replace(operand, type=replace(operand.type, dtype=fp.graph.as_dtype(other)))
                operands = (*getattr(call, side)[:k], new, *getattr(call, side)[k + 1 :])
                calls = (*program.calls[:i], replace(call, **{side: operands}), *program.calls[i + 1 :])
                read = side == "inputs" or program.readers[operand.value] or len(program.producers[operand.value]) > 1
                size = other in ("int32", "float32") and operand.type.dtype.itemsize != 4
                if read or size:
                    assert not taken(replace(program, calls=calls)), f"{call.node}: {new}"


def test_an_accumulator_must_change_in_both_halves(programs: dict[str, Program]) -> None:
    for name in ("first half", "second half"):
        program = programs[name]
        kept = {slot.operand.value for slot in program.stored if slot.kind is Kind.ACCUMULATOR}
        for index, value in enumerate(program.values):
            if value.home in kept:
                loose = replace(value, home=-1, region=ARENA, role=Role.TRANSIENT, category=Category.GRADIENTS)
                values = (*program.values[:index], loose, *program.values[index + 1 :])
                assert not taken(replace(program, values=values)), value.name


def test_the_first_value_may_be_a_home() -> None:
    graph = fp.graph.parse_graph(
        """graph %g
parameter %w: float32[4] = fill(1.0)
%n: float32[4] = map(exprs=('(a0 * 0.5)',)) [%w] as %n
update %w = %n
"""
    )
    program = fp.lower(graph)
    assert program.values[program.calls[0].outputs[0].value].home == 0
    assert taken(program)


def test_magnitudes_without_their_weight_or_of_another_count_are_refused() -> None:
    def model(x: fp.Tensor) -> fp.Tensor:
        return fp.nn.linear(fp.nn.linear(x, 4, bias=False, name="one"), 3, bias=False, name="two")

    program = fp.compile(fp.lora(fp.trace(model, fp.spec((2, 5))), 2, targets=["*"], dora=True)).program
    assert taken(program)
    other = {"one": "two", "two": "one"}
    for i, slot in enumerate(program.stored):
        module, _, rest = slot.name.partition(".")
        if rest == "weight":
            renamed = replace(slot, name=f"{module}.other")
            assert not taken(with_slots(program, "stored", [*program.stored[:i], renamed, *program.stored[i + 1 :]]))
    swapped = [
        replace(slot, name=f"{other[module]}.lora_magnitude_vector") if rest == "lora_magnitude_vector" else slot
        for slot in program.stored
        for module, _, rest in [slot.name.partition(".")]
    ]
    assert not taken(with_slots(program, "stored", swapped))
