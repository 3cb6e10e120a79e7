"""What lies outside the arena of a planned step: on a card, or on the host in the process that runs it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

from foreplan.base.outside import Part
from foreplan.lower.program import Program
from foreplan.lower.targets import engine_info, target_named
from foreplan.planner.plan import Plan


@dataclass(frozen=True)
class Use:
    """What a process does with a step, as far as its memory depends on it.

    Attributes:
        compiles: whether it has compiled the step; False: it has loaded the plan from a file. One that compiles counts
            as one that has to plan, whether or not the plan is kept on disk: no run of it holds more.
        other: of a step that accumulates gradients, the other half and its plan.
        returned: bytes of the arrays in one result; None: those of the program's own outputs and gradients.
    """

    compiles: bool = True
    other: tuple[Program, Plan] | None = None
    returned: int | None = None


def outside(program: Program, plan: Plan, use: Use | None = None) -> tuple[Part, ...]:
    """What a session of a planned step holds besides its arena: on its card or, where it runs on the host, in the whole
    process. Nothing is known of targets that are not foreplan's own.

    Raises:
        TargetError: what the user has measured cannot be read.
    """
    info = engine_info(program.target)
    found = info.module("outside").outside(program, plan, use or Use()) if info.package else ()
    return cast(tuple[Part, ...], found)


def beside(program: Program, use: Use | None = None) -> Callable[[Plan], int] | None:
    """What counts toward a budget besides the arena: on a card, the bytes outside the arena that a plan of the program
    comes with. None on the host, where a budget is one of the arena.
    """
    if not engine_info(program.target).on_card:
        return None
    return lambda plan: sum(part.nbytes for part in outside(program, plan, use))


def device_bytes(target: str) -> int | None:
    """The memory of the card that a target names; None for the host, since no target names a machine.

    Raises:
        UsageError, TargetError: there is no such card.
    """
    return target_named(target).profile.memory_bytes if engine_info(target).on_card else None


def lacking(program: Program) -> str:
    """The library that a plan for a card was made without, for people; empty where none is lacking."""
    info = engine_info(program.target)
    return str(info.module("lacking").lacking(program)) if info.on_card else ""


def returned_bytes(program: Program, micro_batches: int = 1) -> int:
    """Bytes of the arrays in one result of a step, which has the outputs of all micro-batches."""
    outputs = sum(slot.operand.type.nbytes for slot in program.outputs)
    return outputs * micro_batches + sum(slot.operand.type.nbytes for slot in program.gradients)
