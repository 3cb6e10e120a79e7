"""Measures the memory outside the arena on the card in this machine: `foreplan devices --calibrate`."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Mapping, Sequence
from itertools import cycle, islice
from types import MappingProxyType
from typing import Protocol

from foreplan import models
from foreplan.base.calibration import Calibration
from foreplan.base.errors import TargetError
from foreplan.base.units import align_up
from foreplan.compiler import api
from foreplan.frontend import losses
from foreplan.graph import Op, Window
from foreplan.lower.program import HOST
from foreplan.lower.target import Candidate
from foreplan.passes.optimizer import Nesterov
from foreplan.runtime.cuda.calibration import CARDS, LIBRARIES, libraries_of
from foreplan.runtime.cuda.engine import CudaBound, CudaEngine
from foreplan.runtime.cuda.libraries.driver import Card
from foreplan.runtime.cuda.outside import PAGE
from foreplan.runtime.cuda.target import CudaTarget

MODEL = "resnet18:batch=4,size=64"  # whose training step is measured
NODES = 1 << 14  # of the graph that is measured: many, since memory comes in pages
STEPS = 100  # steps in which the memory may not change


class CardMemory(Protocol):
    """What the driver says of all cards of a machine; `foreplan.runtime.cuda.libraries.nvml.Nvml` does."""

    def used(self) -> Sequence[int]:
        """Bytes of each card's memory that are taken, by all processes."""

    def place_of(self, bus: str) -> int:
        """Which card has this address on the PCI bus."""


class _Preferring(CudaTarget):
    """The card in this machine, with one library's kernels where it has some, and foreplan's own elsewhere."""

    def __init__(self, library: str) -> None:
        super().__init__("")
        self.library = library

    def kernels(self, op: Op, inputs: Sequence[Window], outputs: Sequence[Window]) -> Sequence[Candidate]:
        """See `CudaTarget`."""
        found = super().kernels(op, inputs, outputs)
        theirs = [kernel for kernel in found if _library_of(kernel.name) == self.library]
        return theirs or [kernel for kernel in found if not _library_of(kernel.name)]


def _library_of(kernel: str) -> str:
    """The library of a kernel; empty: it is foreplan's own."""
    return next(iter(libraries_of([kernel])), "")


def calibrate(watched: CardMemory, opened: Callable[[], Card], versions: Mapping[str, str]) -> Calibration:
    """Measure the memory that a process holds on a card besides its arena, in this order: its context; a training step
    with foreplan's own kernels; the same with those of each installed library; a graph.

    The process must not have used the card before, and nothing else may use it meanwhile.

    Args:
        watched: memory as nvidia-smi shows it.
        opened: opens the card.
        versions: of libraries; they identify the calibration.

    Raises:
        TargetError: there is no card to run on, or the figures measured are impossible.
    """
    idle = watched.used()
    card = opened()
    place = watched.place_of(card.bus)

    def used() -> int:
        gc.collect()
        card.synchronize()
        return watched.used()[place]

    start = used()
    step, arena = _bound(card, "")
    _run(step, 2)
    figures = {"context_bytes": start - idle[place], "code_bytes": used() - start - arena}
    for library in LIBRARIES:
        before = used()
        with contextlib.suppress(TargetError):  # it is not installed
            figures[f"{library}_bytes"] = _kept(card, library, used) - before
    before = used()
    replay = card.captured(islice(cycle(step.calls), NODES))
    replay()
    figures["graph_bytes_per_launch"] = (used() - before + NODES - 1) // NODES
    before = used()
    _run(step, STEPS)
    if (changed := used() - before) or min(figures.values()) < 0 or not figures["context_bytes"]:
        found = ", ".join(f"{name} = {nbytes}" for name, nbytes in figures.items())
        raise TargetError(
            f"a card cannot be calibrated while anything else uses it, this process included: its memory changed by "
            f"{changed} bytes in {STEPS} steps that allocate nothing, and what was measured is {found}; nvidia-smi "
            f"shows who uses it"
        )
    return Calibration(CARDS, card.title, MappingProxyType(dict(versions)), MappingProxyType(figures))


def _kept(card: Card, library: str, used: Callable[[], int]) -> int:
    """The memory that is taken after a step that prefers a library has run, without its arena."""
    step, arena = _bound(card, library)
    _run(step, 2)
    return used() - arena


def _bound(card: Card, library: str) -> tuple[CudaBound, int]:
    """A training step with an arena of zeros, and the memory that it takes.

    Raises:
        TargetError: a library is preferred that is not installed.
    """
    graph = models.build(MODEL)
    step = api.compile(graph, losses.cross_entropy, Nesterov(0.1), target=_Preferring(library))
    if library not in {_library_of(step.program.calls[each.action].kernel) for each in step.plan.steps}:
        raise TargetError(f"no kernel of the step is one of {library}")
    engine = CudaEngine("cuda", card, capture=False)
    regions = engine.allocate(step.plan.heights[:HOST])
    bound = engine.bind(step.program, step.plan, regions)
    for region in regions:
        region.fill(0)
    return bound, align_up(step.arena_bytes, PAGE)


def _run(step: CudaBound, times: int) -> None:
    for _ in range(times):
        step.run()
