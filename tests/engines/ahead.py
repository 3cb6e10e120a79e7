"""Kernels of tests that are still to run, compiled together: g++ takes four times as long for them one by one.

A test is asked what it will launch by running it on an engine that gathers kernels, and that gives NumPy's results.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from foreplan.graph import Op
from foreplan.runtime.cuda.launch import Instruction, Source
from tests.engines.engine import Engine, Windows, widened
from tests.gpu import check as gpu
from tests.gpu.compiled import TOGETHER, compile_all, not_kept
from tests.kernels import expected

_asked: set[pytest.Item] = set()  # tests that were


@dataclass(frozen=True)
class Gathering(Engine):
    """The card that is not there, which runs nothing.

    Attributes:
        instructions: of all kernels that would run.
    """

    instructions: list[Instruction] = field(default_factory=list)

    def check(
        self, op: Op, *inputs: np.ndarray, windows: Windows = None, wide: Iterable[int] = (), **more: object
    ) -> None:
        """Gather all kernels of an op."""
        self._gather(op, *self.given(op, inputs, windows, wide))

    def run(
        self, op: Op, inputs: Sequence[np.ndarray], windows: Windows = None, over: tuple[int, int] | None = None
    ) -> list[np.ndarray]:
        """Gather them, and give what NumPy's kernel does."""
        given, windows = self.given(op, inputs, windows)
        self._gather(op, given, windows)
        return expected(op, [widened(x) for x in given])

    def _gather(self, op: Op, given: Sequence[np.ndarray], windows: Windows) -> None:
        for kernel in gpu.kernels(op, given, windows)[0].values():
            self.instructions.extend(kernel.instructions)


def compile_ahead(item: pytest.Item) -> None:
    """Compile what this test and those behind it launch, as far as they take no fixture but the engine. What cannot be
    compiled is left to the test that needs it.
    """
    if item in _asked:
        return
    items, sources = item.session.items, set()
    for each in items[items.index(item) :]:
        given = each.callspec.params if isinstance(each, pytest.Function) and hasattr(each, "callspec") else {}
        engine = given.get("engine")
        if isinstance(engine, Engine) and engine.name == "cuda" and each not in _asked:
            _asked.add(each)
            sources |= _launched(each.function, given)
        if len(sources) >= TOGETHER:
            break
    with contextlib.suppress(AssertionError):
        compile_all(sources)


def _launched(test: Callable[..., None], given: Mapping[str, Any]) -> set[Source]:
    """What a test launches and is not kept yet, as far as it comes with NumPy's results."""
    engine = Gathering("cuda", gpu.results, gpu.run, given["engine"].dtype)
    with contextlib.suppress(Exception, pytest.skip.Exception), np.errstate(all="ignore"):
        test(**{**given, "engine": engine})
    return not_kept(engine.instructions)
