"""What a plan for a card was made without."""

from __future__ import annotations

from foreplan.lower.program import Call, Program
from foreplan.runtime.cuda.libraries.cudnn import missing
from foreplan.runtime.cuda.table import ATTENTION, CONVOLUTIONS, FAMILIES, OWN, PACKED


def lacking(program: Program) -> str:
    """The library that is not installed here, so that foreplan's own kernels were planned in its place, for people;
    empty where none is.
    """
    if not any(_is_cudnns(call) for call in program.calls) or not missing():
        return ""
    return (
        "cuDNN is not installed here, so convolutions and attention are planned with foreplan's own kernels: they are "
        "slower, and take other workspace"
    )


def _is_cudnns(call: Call) -> bool:
    """Whether cuDNN might have had a kernel for it."""
    family = FAMILIES.get(call.op.name)
    if family is None or call.kernel != OWN:
        return False
    narrow = call.inputs[0].type.dtype.itemsize == 2
    return CONVOLUTIONS in family.libraries or (narrow and not {ATTENTION, PACKED}.isdisjoint(family.libraries))
