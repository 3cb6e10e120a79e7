"""Graph → Program: the planner's problem for one target, with what each action runs.

`foreplan.lower` names this package and the stage; calling the package runs the stage.
"""

import sys
from types import ModuleType

from foreplan.graph import Graph
from foreplan.lower.lower import TARGETS, lower, target_named
from foreplan.lower.program import Call, Operand, Program, Slot
from foreplan.lower.target import DeviceProfile, Kernel, Target

__all__ = [
    "TARGETS",
    "Call",
    "DeviceProfile",
    "Kernel",
    "Operand",
    "Program",
    "Slot",
    "Target",
    "lower",
    "target_named",
]


class _Stage(ModuleType):
    """A package that is called like its one function."""

    def __call__(
        self, graph: Graph, target: str | Target = "numpy", *, offload: bool = False, tune: bool = False
    ) -> Program:
        return lower(graph, target, offload=offload, tune=tune)


sys.modules[__name__].__class__ = _Stage
