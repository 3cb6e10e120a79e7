"""Every error foreplan raises for a person to read: one root, few leaves, numbers kept as fields."""

from __future__ import annotations

from typing import Any


class ForeplanError(Exception):
    """The root: its message says what is wrong, where, and what to do about it.

    Attributes:
        exit_code: what the command line exits with (1 a check failed, 2 wrong use, 3 does not fit).
    """

    exit_code = 2

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickled by message and fields, and not by arguments of `__init__`: errors cross from process to process."""
        return _revived, (type(self), self.args, self.__dict__)


def _revived(kind: type[ForeplanError], args: tuple[Any, ...], fields: dict[str, Any]) -> ForeplanError:
    """An error as it was pickled."""
    error = kind.__new__(kind, *args)
    error.__dict__.update(fields)
    return error


class UsageError(ForeplanError):
    """An argument, option or name that foreplan cannot take."""


class ModelError(ForeplanError):
    """A model file or graph that is broken or holds what foreplan cannot compile; names the node."""


class UnsupportedError(ModelError):
    """An op, attribute, opset or data-dependent shape that has no kernel and no decomposition."""


class ValueNeededError(UnsupportedError):
    """A shape, or another thing that is fixed at import, that a model computes from values of its inputs.

    Attributes:
        inputs: names of the inputs that it depends on; `from_onnx(…, values=…)` may give their values.
    """

    def __init__(self, message: str, inputs: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.inputs = inputs


class ShapeError(ModelError):
    """Shapes or dtypes that are unbound, or contradict each other; names the node and both sides."""


class TraceError(ModelError):
    """Python code that cannot be traced, such as `if` on a traced value; names the line."""


class InputError(ForeplanError):
    """A wrong array given to a step: its name, what was expected and what came."""


class TargetError(ForeplanError):
    """A target that this machine cannot plan or run for: its library is missing or too old; says how to get it."""


class PlanError(ForeplanError):
    """A plan or plan file that must not run: damaged, edited, or made for something else."""

    exit_code = 1


class VerificationError(PlanError):
    """The verifier refused a plan; names the step and the two values that collide."""


class DoesNotFitError(ForeplanError):
    """A capacity or budget that cannot be met.

    Attributes:
        needed: bytes of the smallest plan found: of its arena; of the whole card where the budget was one of a card.
        capacity: bytes that were allowed, or are free; 0 where an allocation failed and that is not known.
        lower_bound: bytes that no arena of this schedule can go below.
        plan: that smallest `Plan`, where there is one to look at.
        advice: what to try next, a line each.
    """

    exit_code = 3

    def __init__(
        self,
        message: str,
        *,
        needed: int,
        capacity: int,
        lower_bound: int,
        plan: Any = None,
        advice: tuple[str, ...] = (),
    ) -> None:
        super().__init__(message)
        self.needed = needed
        self.capacity = capacity
        self.lower_bound = lower_bound
        self.plan = plan
        self.advice = advice


class SessionError(ForeplanError):
    """A session that cannot run, load or save; says what state it is left in."""
