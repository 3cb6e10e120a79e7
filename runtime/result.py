"""What a step returns, and a step that has begun."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from foreplan.runtime.kernel import Run


@dataclass(frozen=True)
class Result:
    """The results of one step: copies, which the next step does not change.

    Attributes:
        loss: the loss, or its mean over the micro-batches; None where the program has none.
        outputs: by name; those of micro-batches one behind the other along a leading axis.
        gradients: by name, of parameters where the program does not update them, and of the inputs asked for.
        metrics: by name, those that `Session.evaluate` was asked for.
    """

    loss: float | None = None
    outputs: dict[str, np.ndarray] = field(default_factory=dict)
    gradients: dict[str, np.ndarray] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)


@dataclass(eq=False)
class Begun:
    """A step that has begun; a card may still have all of its work to do.

    Attributes:
        waits: calls that wait for the results.
        read: the arrays that results are copied into.
        loss: likewise; None where the program has none.
        result: what the step returns, once it is done.
    """

    waits: list[Run]
    read: list[np.ndarray]
    loss: np.ndarray | None
    result: Result | None = None
