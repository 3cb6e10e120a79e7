"""Running averages of weights, which an optimizer with `ema` keeps: where they lie, and what they hold."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import numpy as np

from foreplan.base.errors import SessionError
from foreplan.graph import Kind
from foreplan.lower.program import Program
from foreplan.runtime.engine import Place
from foreplan.runtime.turn import Turn
from foreplan.runtime.world import ALONE, World
from foreplan.runtime.world.places import own_parts
from foreplan.runtime.world.stages import stages_of


def averages_of(program: Program, places: Mapping[str, Place], world: World = ALONE) -> dict[str, Place]:
    """The places of averages, by the weight's name. Before the first update there are none.

    Args:
        world: the ranks, all of which call this at the same time. A stage that trains nothing keeps none, and others
            do.

    Raises:
        SessionError: no stage keeps averages.
    """
    found = {weight: places[name] for weight, name in names_of_averages(program).items()}
    count = program.step_count
    if not keeps_averages(program, world):
        raise SessionError(
            f"the step of {program.model!r} keeps no averages of weights: give its optimizer a decay, such as ema=0.999"
        )
    return found if count is not None and int(places[count.name].read()) else {}


def keeps_averages(program: Program, world: World = ALONE) -> bool:
    """Whether a program keeps averages, or that of another stage; all ranks call it at the same time."""
    own = bool(names_of_averages(program))
    return any(stages_of(world, program).gather(own)) if program.is_stage else own


def names_of_averages(program: Program) -> dict[str, str]:
    """What the averages that a program keeps are called, by the weight's name; empty: it keeps none."""
    weights = {slot.name for slot in program.tensors if slot.kind is Kind.PARAMETER}
    states = [slot.name for slot in program.tensors if slot.kind is Kind.STATE]
    found = [(own[1], name) for name in states if (own := re.fullmatch(r"(.+)/ema(\.\d+)?", name))]
    return {weight: name for weight, name in found if weight in weights}


@contextmanager
def exchanged(averages: Mapping[str, Place], places: Mapping[str, Place], turn: Turn) -> Iterator[None]:
    """Let weights hold their averages until the block ends; others may take their turn within it. Each rank copies what
    it holds.
    """
    pairs = [own_parts(places[name], average) for name, average in averages.items()]
    held = [pair for pair in pairs if pair is not None]
    with turn.lock:
        weights = [weight.read().copy() for weight, _ in held]
    try:
        with turn.lock:
            for weight, average in held:
                weight.write(average.read())
        yield
    finally:
        with turn.lock:
            for (weight, _), array in zip(held, weights):
                weight.write(array)


def read_averages(averages: Mapping[str, Place], weights: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Weights by name, those that have an average as that, in their own types."""
    return {
        name: averages[name].read().astype(array.dtype) if name in averages else array
        for name, array in weights.items()
    }
