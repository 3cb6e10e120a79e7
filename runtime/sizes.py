"""Batches of other sizes: programs that run in a session's memory, for `evaluate` and for smaller batches of a step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from typing import Any

from foreplan.base.arguments import flag
from foreplan.base.errors import InputError, SessionError, UnsupportedError, UsageError
from foreplan.lower.program import Program, Slot
from foreplan.planner import Plan
from foreplan.runtime.beside import Metrics, Programs
from foreplan.runtime.inputs import check_inputs, smaller
from foreplan.runtime.result import Result
from foreplan.runtime.session_state import SessionState


class Sizes(SessionState):
    """The part of a session that takes batches of other sizes."""

    _inputs: Mapping[str, Slot]
    _beside: Programs[Sizes] | None

    def step(self, inputs: Mapping[str, Any] | None = None) -> Result:
        """See `Session.step`."""
        raise NotImplementedError

    def _bound_beside(self, program: Program, plan: Plan) -> Sizes:
        """A session of another program of the same model, in this one's memory."""
        raise NotImplementedError

    def _drop_beside(self, session: Any) -> None:
        """Such a session is no longer kept."""
        raise NotImplementedError

    def _refuse_if_taking(self) -> None:
        """Refuse a step within the making of a batch."""
        raise NotImplementedError

    def evaluate(
        self,
        inputs: Mapping[str, Any],
        *,
        outputs: Iterable[str] | None = None,
        metrics: Metrics = (),
        ema: bool = False,
    ) -> Result:
        """What the model gives for some samples, in inference form, and how good that is. Nothing that the session
        keeps changes: weights, running statistics, random state and optimizer state stay as they are.

        The samples may be more or fewer than those of a step, along one axis of each input. For each number of them a
        program is compiled when it is first asked for; the last 32 are kept. It reads the weights where they lie, and
        runs in the arena of the step, within which it is planned; `Compiled.evaluation` tells its memory before. Its
        own constants are added to `allocated_bytes`.

        Args:
            inputs: arrays by name, as `step` takes them, without an axis for micro-batches. Without the inputs of the
                loss, such as `target`, there is no loss.
            outputs: names of what is returned, as in `compile`; None: all outputs of the model.
            metrics: names of `foreplan.metrics`, or a mapping from names to metrics, losses, or functions like a loss.
                A function is compiled once as long as it is the same object: define it before the loop of epochs.
            ema: evaluate with the averages of weights that the optimizer keeps.

        Returns:
            The outputs; with targets, also the loss and the metrics. They are those of all given samples together, as
            the loss takes their mean, and not means over batches.

        Raises:
            InputError: a wrong array.
            UsageError: the session's step came from a plan file or is one of several ranks; there is no such output or
                metric, or a metric without targets.
            UnsupportedError: the model does not show how it computes another number of samples; names the node, and
                what to do.
            DoesNotFitError: it needs more than the arena has.
            SessionError: a step was interrupted, or the optimizer keeps no averages.
        """
        if self._beside is None:
            raise SessionError("only a session of a compiled step evaluates: make it with compile(…).bind()")
        if not isinstance(inputs, Mapping):
            raise InputError(f"evaluate takes arrays by name, and got {type(inputs).__name__}")
        self._refuse_if_taking()
        with self._turn.lock, self.averaged() if flag("ema", ema) else nullcontext():
            self._settle()
            self._refuse_if_interrupted()
            made, session = self._beside.evaluation(inputs, outputs, metrics, self._bound_beside, self._drop_beside)
            idle = {
                name for name, slot in self._inputs.items() if slot.init is not None and name not in session._inputs
            }
            return made.result(session.step({name: array for name, array in inputs.items() if name not in idle}))

    def _is_smaller(self, inputs: Any) -> bool:
        """Whether a batch has fewer samples than the step takes, and the session may have a step for it."""
        return self._beside is not None and self._beside.trains and smaller(self.program, inputs) is not None

    def _of_size(self, inputs: Mapping[str, Any]) -> Sizes:
        """The session of this step for a smaller batch, which is compiled for the first one.

        Raises:
            InputError: there is no such step; says why.
            DoesNotFitError: see `evaluate`.
        """
        shapes = smaller(self.program, inputs)
        assert self._beside is not None and shapes is not None
        self._refuse_if_taking()
        self._settle()
        self._refuse_if_broken()
        try:
            return self._beside.step(shapes, self._bound_beside)
        except (UnsupportedError, UsageError, SessionError) as error:
            try:
                check_inputs(self._inputs, inputs)
            except InputError as wrong:
                raise InputError(f"{wrong}. A smaller batch has no step of its own: {error}") from None
            raise
