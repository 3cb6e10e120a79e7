"""A debug mode: which tensor of a run is the first that holds nan, and which the first that holds an infinity."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from foreplan.lower.program import Call, Operand

if TYPE_CHECKING:
    from foreplan.runtime.bound_program import BoundProgram
    from foreplan.runtime.session import Session


def not_finite(session: Session, batches: Iterable[Mapping[str, Any]]) -> str:
    """Run steps until a tensor holds nan, and say which, for people; else the first infinity; empty: there is none.

    Args:
        session: whose weights change with each step.
        batches: of the steps, as `step` takes them.
    """
    for name, array in session.stored.items():
        if _holds(array, np.isnan):
            return f"{name!r} holds nan before the first step"
    infinite = ""
    for number, batch in enumerate(batches, 1):
        halves = [half for half in (session._body, session._update) if half is not None]
        watches = {half: NanWatch(half) for half in halves}
        with session._turn.lock:
            session._finish(session._begin(session._parts(batch), watches))
        found = next((watch.nan for watch in watches.values() if watch.nan), "")
        infinite = infinite or next((f"{w.infinite} in step {number}" for w in watches.values() if w.infinite), "")
        if found:
            before = f"; before it, {infinite} was infinite" if infinite else ""
            return f"the first tensor that holds nan is {found} in step {number}{before}"
    return f"the first tensor that is infinite is {infinite}" if infinite else ""


class NanWatch:
    """Watches a run.

    Attributes:
        nan: the first result that holds nan, for people; empty: none has.
        infinite: likewise the first that holds an infinity.
    """

    def __init__(self, half: BoundProgram) -> None:
        self.half = half
        self.nan = self.infinite = ""

    def before(self, step: int) -> None:
        """Do nothing: an instruction may write over what it reads, so results are looked at alone."""

    def after(self, step: int, seconds: float) -> None:
        """Look at the results of an instruction."""
        if self.nan:
            return
        program, planned = self.half.program, self.half.plan.steps[step]
        action, call = program.actions[planned.action], program.calls[planned.action]
        written = dict(zip(action.writes, planned.writes))
        for operand in call.outputs:
            if operand.value not in written or operand.holds is not None or not operand.type.dtype.is_float:
                continue
            array = self.half.bound.place(operand, written[operand.value]).read()
            if not self.nan and _holds(array, np.isnan):
                self.nan = _named(program.values[operand.value].name, operand, call)
            elif not self.infinite and _holds(array, np.isinf):
                self.infinite = _named(program.values[operand.value].name, operand, call)


def _named(name: str, operand: Operand, call: Call) -> str:
    where = f", {call.source}" if call.source else ""
    return f"{name!r}: {operand.type} ({call.op.name} of {call.node!r}{where})"


def _holds(array: np.ndarray, of: np.ufunc) -> bool:
    return bool(of(array).any()) if array.dtype.kind in "fV" and array.dtype.itemsize > 1 else False
