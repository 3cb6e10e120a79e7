"""Who judges a case. To add an engine is to add a line here, and a module that says when a result is right."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from random import Random
from typing import Any

from tests.sweep.case import Case
from tests.sweep.draws import drawn
from tests.sweep.judges import (
    boxes,
    card,
    cpu,
    cuda,
    declaration,
    decomposition,
    facts,
    gradient,
    numpy,
    onnx,
    options,
    shards,
    step,
    types,
)
from tests.sweep.table import ENTRIES, Entry


def _every(entry: Entry, name: str) -> bool:
    return True


def _nothing_more() -> None:
    """NumPy is there."""


@dataclass(frozen=True)
class Judge:
    """One of them.

    Attributes:
        ask: raises AssertionError where something is wrong with a case, or with those of its kernels that it is given;
            gives how many kernels it asked.
        kernels: all kernels that there are for a case; None: a case is asked as it is.
        drawing: a case for it; None: any, or one that has a kernel, if one of a few draws has.
        serves: whether it judges an op of this name at all.
        require: skips the test where the engine's library is not installed.
        compile: makes what many kernels need at once; what it was not given is made when it is asked.
    """

    ask: Callable[..., int]
    kernels: Callable[[Case], Iterable[Any]] | None = None
    drawing: Callable[[Entry, Random], Case] | None = None
    serves: Callable[[Entry, str], bool] = _every
    require: Callable[[], None] = _nothing_more
    compile: Callable[[Iterable[Any]], None] | None = None

    def draw(self, entry: Entry, rng: Random) -> Case:
        """A case for it."""
        if self.drawing is not None:
            return self.drawing(entry, rng)
        found = self.kernels
        return entry.draw(rng) if found is None else entry.served(rng, lambda case: any(True for _ in found(case)))

    def judge(self, case: Case, one: bool = False) -> int:
        """As `ask`, by all kernels of a case or by one, which the case says."""
        return self.ask(case) if self.kernels is None else self.ask(case, self._chosen(case, one))

    def prepare(self, cases: Iterable[Case], one: bool = False) -> None:
        """Make what the kernels need by which many cases are judged, where that is faster than one by one."""
        if self.compile is not None:
            self.compile(kernel for case in cases for kernel in self._chosen(case, one))

    def _chosen(self, case: Case, one: bool) -> Iterable[Any]:
        assert self.kernels is not None
        found = self.kernels(case)
        return case.one_of(found) if one else found


JUDGES = {
    "numpy": Judge(numpy.judge),
    "declaration": Judge(declaration.judge),
    "decomposition": Judge(decomposition.judge, serves=decomposition.serves),
    "boxes": Judge(boxes.judge, serves=boxes.serves),
    "shards": Judge(shards.judge, serves=boxes.serves),
    "types": Judge(types.judge),
    "facts": Judge(facts.judge),
    "gradient": Judge(gradient.judge, drawing=gradient.draw, serves=gradient.serves),
    "onnx": Judge(onnx.judge, drawing=onnx.draw, serves=onnx.serves),
    "cpu": Judge(cpu.judge, cpu.kernels, serves=cpu.serves, require=cpu.require),
    "cuda": Judge(cuda.judge, cuda.kernels, serves=cuda.serves, require=cuda.require, compile=cuda.compile_kernels),
    "card": Judge(card.judge, card.kernels, serves=cuda.serves, require=card.require),
}


def judge_draws(name: str, op: str, draws: int) -> None:
    """As `python -m tests.sweep --op OP --judge NAME --draws DRAWS`: the same cases in every run."""
    judge = JUDGES[name]
    judge.require()
    cases = [judge.draw(ENTRIES[op], drawn(op, 0, number)) for number in range(draws)]
    judge.prepare(cases)
    asked = 0
    for number, case in enumerate(cases):
        try:
            asked += judge.judge(case)
        except Exception as error:
            error.add_note(f"draw {number}; the case, for tests/sweep/found:\n{case}")
            raise
    assert asked, f"nothing was judged: no draw has what the judge {name} asks; docs/adding-an-op.md says what that is"


# Of drawn steps, by their text.
WHOLE: dict[str, Callable[[str], int]] = {"step": step.judge, "options": options.judge}
