"""A convolution and then a map of its result, where the convolution itself can do nothing more."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from foreplan.cpu import prices
from foreplan.cpu.elementwise import elementwise
from foreplan.cpu.kernel import Kernel, Refused, Run, Windows, one_after_another
from foreplan.cpu.stages import ALIGNMENT, Staged
from foreplan.graph import Window
from foreplan.ops.map import Map
from foreplan.units import align_up


@dataclass(frozen=True)
class Followed:
    """What makes a result, and a map of that and of further inputs.

    Attributes:
        first: writes output 0 of its own, which lies as that of all.
        result: the output of all.
        then: takes it, and the further inputs.
        further: which inputs these are.
        apart: whether it is scratch memory, since a further input may lie where the output goes.
        overwrites: such pairs.
        nanoseconds: predicted.
    """

    first: Staged
    result: Window
    then: Kernel
    further: tuple[int, ...]
    apart: bool
    overwrites: tuple[tuple[int, int], ...]
    nanoseconds: int

    @property
    def workspace(self) -> int:
        """That of the first, and where its result is."""
        return self._start + self.result.type.nbytes if self.apart else self.first.workspace

    @property
    def _start(self) -> int:
        return align_up(self.first.workspace, ALIGNMENT)

    def bind(self, inputs: Sequence[np.ndarray], outputs: Sequence[np.ndarray], workspace: np.ndarray) -> Run:
        """One, then the other."""
        (y,) = outputs
        made = np.ndarray(y.shape, y.dtype, workspace, self._start, y.strides) if self.apart else y
        first = self.first.bind(inputs, [made], workspace)
        return one_after_another(first, self.then.bind([made, *(inputs[i] for i in self.further)], [y], workspace[:0]))


def followed(first: Staged, expr: str, inputs: Windows, further: Sequence[int], y: Window) -> Followed:
    """A convolution, priced, and the map of its result by an expression of that and of some of the inputs.

    Raises:
        Refused: there is no such map, or the result has gaps.
    """
    others = [inputs[i] for i in further]
    whole = [i for i, x in zip(further, others) if x.shape == y.shape]
    then = elementwise(Map((expr,)), [y, *others], [y])
    if first.nanoseconds is None or not y.is_compact or then.workspace:
        raise Refused(f"{expr} of {y.type}")
    nanoseconds = first.nanoseconds + prices.mapped((2 + len(whole)) * y.type.nbytes)
    overwrites = tuple((0, i) for i in whole[:1])
    return Followed(first, y, then, tuple(further), bool(whole), overwrites, nanoseconds)
