"""The largest batch with which a step fits a memory, recomputing where that helps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from foreplan.compiled import Compiled
from foreplan.errors import DoesNotFitError, UnsupportedError
from foreplan.graph import Graph
from foreplan.lower.outside import Use, beside
from foreplan.lower.targets import engine_info
from foreplan.outside import REST
from foreplan.pareto import affordable, largest
from foreplan.units import format_bytes

SCOUTS = (1, 8)  # batches that show what a sample takes
MOST = 1 << 16  # no larger batch is tried


def batch_of(graph: Graph) -> int | None:
    """The batch of a model: the extent of the first axis of every input without a default; None where they differ."""
    given = [value for value in graph.inputs if value.init is None]
    extents = {value.type.shape[0] if value.type.shape else None for value in given}
    return extents.pop() if len(extents) == 1 else None


def counted_bytes(compiled: Compiled) -> int:
    """What a step takes of the memory that a budget limits: all of it on a card, the arena on the host."""
    on_card = engine_info(compiled.program.target).on_card
    return compiled.memory.peak if on_card else compiled.arena_bytes


def needed_bytes(compiled: Compiled, memory: int) -> int:
    """What a step takes of a memory, to find a batch by: without the rest of the arena's last page, since that does not
    grow with the batch; and yet above the memory where the step does not fit.
    """
    counted = counted_bytes(compiled)
    rest = sum(part.nbytes for part in compiled.memory.outside if part.name == REST)
    smooth = counted - rest if engine_info(compiled.program.target).on_card else counted
    return smooth if counted <= memory else max(smooth, memory + 1)


@dataclass(frozen=True)
class Trial:
    """A batch that was tried.

    Attributes:
        needed: bytes of the smallest plan found, as `needed_bytes` has them; at most the memory where one fits.
        step: the step that fits, with its plan; None: none does.
    """

    needed: int
    step: Compiled | None


class Trials:
    """Batches tried against a memory.

    Attributes:
        tried: by batch.
    """

    def __init__(
        self,
        compile_at: Callable[[int], Compiled],
        memory: int,
        share: float | None = None,
        told: Callable[[str], None] = lambda text: None,
    ) -> None:
        """Nothing is tried yet.

        Args:
            compile_at: the step at a batch, with nothing recomputed that its options do not name.
            memory: bytes, of the whole card or of the arena on the host.
            share: of the time of the fastest kernels without recomputation, what may be added, such as 0.05; None: any.
            told: is given a line for each batch that was tried.
        """
        self.compile_at, self.memory, self.share, self.told = compile_at, memory, share, told
        self.tried: dict[int, Trial] = {}
        self._compiled: dict[int, Compiled] = {}

    def largest(self, first: int | None = None) -> int:
        """The largest batch found that fits; the next larger one was tried and does not, or is beyond MOST. 0: not even
        one sample does.

        Args:
            first: the batch to try first.
        """
        small, large = (needed_bytes(self._compile(batch), self.memory) for batch in SCOUTS)
        slope = max((large - small) // (SCOUTS[1] - SCOUTS[0]), 1)
        fixed = max(small - slope * SCOUTS[0], 0)
        about = max((self.memory - fixed) // slope, 1)
        if self.share != 0 and not self._compile(SCOUTS[0]).options.checkpoint:
            about *= 2  # what the planner may recompute takes about half
        return largest(self.needed, self.memory, min(first or about, MOST), fixed)

    def needed(self, batch: int) -> int:
        """Bytes of the smallest plan found, at most the memory where a plan within the limits fits."""
        if batch > MOST:
            return self.memory + 1
        if batch not in self.tried:
            try:
                found = self._try(self._compile(batch))
            except UnsupportedError as error:  # no kernel takes tensors of that size
                found = Trial(self.memory + 1, None)
                self.told(f"batch {batch:,}: {error}")
            else:
                fits = "fits" if found.step else f"needs {format_bytes(found.needed)}"
                self.told(f"batch {batch:,} {fits}")
            self.tried[batch] = found
        return self.tried[batch].needed

    def _compile(self, batch: int) -> Compiled:
        if batch not in self._compiled:
            self._compiled[batch] = self.compile_at(batch)
        return self._compiled[batch]

    def _try(self, compiled: Compiled) -> Trial:
        needed = needed_bytes(compiled, self.memory)
        if needed <= self.memory:
            return Trial(needed, compiled)
        if self.share == 0 or compiled.options.checkpoint:
            return Trial(needed, None)
        update, program = compiled.update, compiled.program
        other = None if update is None else (update.program, update.plan)
        curve = affordable(program, self.share)
        try:
            found = curve.within(self.memory, beside(program, Use(other=other)))
        except DoesNotFitError as error:
            return Trial(needed_bytes(replace(compiled, plan=error.plan), self.memory), None)
        step, smallest = (replace(compiled, plan=plan) for plan in (found, curve.plan(len(curve) - 1)))
        needed = needed_bytes(step, self.memory)
        if needed > self.memory:  # the other half does not fit
            return Trial(needed, None)
        return Trial(min(needed, needed_bytes(smallest, self.memory)), step)
