"""Graph → Program: the planner's problem for one target, with what each action runs.

`foreplan.lower` names this package and the stage; calling the package runs the stage.
"""

import sys
from types import ModuleType

from foreplan.graph import Graph
from foreplan.lower.lower import WORKSPACE, lower
from foreplan.lower.program import Call, Operand, Program, Slot
from foreplan.lower.target import Candidate, DeviceProfile, Target
from foreplan.lower.targets import ENGINES, EngineInfo, engine_info, target_named

__all__ = [
    "WORKSPACE",
    "Call",
    "ENGINES",
    "DeviceProfile",
    "EngineInfo",
    "Candidate",
    "Operand",
    "Program",
    "Slot",
    "Target",
    "engine_info",
    "lower",
    "target_named",
]


class _Stage(ModuleType):
    """A package that is called like its one function."""

    def __call__(
        self,
        graph: Graph,
        target: str | Target = "numpy",
        *,
        offload: bool = False,
        prefetch: bool = False,
        tune: bool = False,
        workspace: int | str = WORKSPACE,
    ) -> Program:
        return lower(graph, target, offload=offload, prefetch=prefetch, tune=tune, workspace=workspace)


sys.modules[__name__].__class__ = _Stage
