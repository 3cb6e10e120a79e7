"""Graph → Program: the planner's problem for one target, with what each action runs."""

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
