"""The engines with kernels of their own, as the tests of this folder know them: each case runs on every one of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from foreplan.graph import Op, Window
from tests.cpu import check as cpu
from tests.gpu import check as gpu
from tests.sweep.judges import JUDGES

Windows = Sequence[Window] | None


@dataclass(frozen=True)
class Engine:
    """How an engine's kernels are run, in poisoned memory whose surroundings are watched.

    Attributes:
        check: asserts that every kernel of an op gives what NumPy's does; of an op, its inputs, and by name `rtol`,
            `atol`, `windows` (how inputs lie) and `over` (an output and the input whose bytes it takes).
        run: what the first kernel gives; of an op, its inputs, `windows` and `over`.
    """

    name: str
    check: Callable[..., None]
    run: Callable[..., list[np.ndarray]]

    def check_over(self, op: Op, given: Sequence[np.ndarray], *over: tuple[int, int] | None, **more: float) -> None:
        """Assert it for each way in which an output takes an input's bytes; None: in its own."""
        for each in over:
            self.check(op, *given, over=each, **more)

    def check_lying(self, op: Op, *given: np.ndarray, ways: Sequence[Windows], **more: float) -> None:
        """Assert it for each way in which inputs lie; None: in C order."""
        for windows in ways:
            self.check(op, *given, windows=windows, **more)


ENGINES = {each.name: each for each in (Engine("cpu", cpu.check, cpu.run), Engine("cuda", gpu.check, gpu.run))}


def require(name: str) -> None:
    """Skip where an engine's kernels cannot run: without oneDNN, or without a compiler that stands in for CUDA's."""
    JUDGES[name].require()
