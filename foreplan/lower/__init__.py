"""Graph → Program: the planner's problem for one target, with what each action runs.

`foreplan.lower` names this package and the stage; calling the package runs the stage.
"""

import inspect
import sys
from types import ModuleType
from typing import Any

from foreplan.lower.lower import WORKSPACE, lower
from foreplan.lower.program import Call, Operand, Program, Slot
from foreplan.lower.target import Candidate, DeviceProfile, Target
from foreplan.lower.targets import ENGINES, EngineInfo, chosen_target, engine_info, target_named

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
    "chosen_target",
    "engine_info",
    "lower",
    "target_named",
]


class _Stage(ModuleType):
    """A package that is called like its one function."""

    __signature__ = inspect.signature(lower)

    def __call__(self, *args: Any, **named: Any) -> Program:
        return lower(*args, **named)


sys.modules[__name__].__class__ = _Stage
