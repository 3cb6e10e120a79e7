"""Who judges a case. To add an engine is to add a line here, and a module that says when a result is right."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from random import Random

from tests.sweep.case import Case
from tests.sweep.judges import card, cpu, cuda, declaration, decomposition, gradient, numpy, options, step, types
from tests.sweep.table import Entry


def _drawn(entry: Entry, rng: Random) -> Case:
    return entry.draw(rng)


def _every(entry: Entry, name: str) -> bool:
    return True


def _nothing_more() -> None:
    """NumPy is there."""


def _one_by_one(cases: Iterable[Case], one: bool = False) -> None:
    """What a case needs is not made faster for many."""


@dataclass(frozen=True)
class Judge:
    """One of them.

    Attributes:
        judge: raises AssertionError where something is wrong with a case; gives how many kernels it asked.
        draw: a case for it.
        serves: whether it judges an op of this name at all.
        require: skips the test where the engine's library is not installed.
        prepare: makes what many cases need at once, or one kernel of each; what it was not given is made when it is
            judged.
        judge_one: as `judge`, by one of a case's kernels, which the case says, so that more cases can be drawn; None:
            there is but one.
    """

    judge: Callable[[Case], int]
    draw: Callable[[Entry, Random], Case] = _drawn
    serves: Callable[[Entry, str], bool] = _every
    require: Callable[[], None] = _nothing_more
    prepare: Callable[[Iterable[Case], bool], None] = _one_by_one
    judge_one: Callable[[Case], int] | None = None


JUDGES = {
    "numpy": Judge(numpy.judge),
    "declaration": Judge(declaration.judge),
    "decomposition": Judge(decomposition.judge, serves=decomposition.serves),
    "types": Judge(types.judge),
    "gradient": Judge(gradient.judge, gradient.draw, gradient.serves),
    "cpu": Judge(cpu.judge, cpu.draw, serves=cpu.serves, require=cpu.require, judge_one=cpu.judge_one),
    "cuda": Judge(
        cuda.judge,
        cuda.draw,
        serves=cuda.serves,
        require=cuda.require,
        prepare=cuda.prepare,
        judge_one=cuda.judge_one,
    ),
    "card": Judge(card.judge, card.draw, serves=cuda.serves, require=card.require, judge_one=card.judge_one),
}

# Of drawn steps, by their text.
WHOLE: dict[str, Callable[[str], int]] = {"step": step.judge, "options": options.judge}
