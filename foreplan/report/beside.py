"""A step as eager PyTorch runs it, beside its plan."""

from __future__ import annotations

from typing import Any, Protocol


class Beside(Protocol):
    """PyTorch's step and the plan of the same step, phase by phase; print it."""

    @property
    def eager(self) -> Any:
        """The step as PyTorch runs it: a `foreplan.eager.Eager`."""

    @property
    def rows(self) -> tuple[Any, ...]:
        """All phases of PyTorch's loop, each a `foreplan.eager.result.Row`."""

    def as_json(self) -> dict[str, Any]:
        """The same for programs, in bytes."""
