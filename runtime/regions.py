"""The memory of a session, region by region: taken from another session, or allocated."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from foreplan.base.errors import DoesNotFitError, SessionError
from foreplan.base.units import align_up, format_bytes
from foreplan.graph.flat import Flat
from foreplan.graph.shard import Sharded
from foreplan.lower.program import ARENA, PARAMETERS, STATE, Operand, Program
from foreplan.lower.targets import engine_info
from foreplan.planner.plan import Plan
from foreplan.runtime.engine import Memory


def shared(
    heights: Sequence[int], theirs: Sequence[Memory] | None, state: bool = False
) -> tuple[dict[int, Memory], list[int]]:
    """The device regions that another session already has, and the heights of those to allocate.

    Args:
        heights: of the regions of a plan.
        theirs: the regions of the session to share with, if there is one.
        state: whether what it keeps from step to step is shared, too.
    """
    taken: dict[int, Memory] = {}
    if theirs is not None:
        whole, height = theirs[PARAMETERS], heights[PARAMETERS]
        taken[PARAMETERS] = whole[:height] if len(whole) > height else whole
        if state:
            taken[STATE] = theirs[STATE]
        if len(theirs[ARENA]) >= heights[ARENA]:
            taken[ARENA] = theirs[ARENA][: heights[ARENA]]
    return taken, [0 if i in taken else height for i, height in enumerate(heights)]


def allocated(
    allocate: Callable[[Sequence[int]], Sequence[Memory]], heights: Sequence[int], what: str
) -> Sequence[Memory]:
    """Memory of these heights.

    Raises:
        DoesNotFitError: there is none.
    """
    try:
        return allocate(heights)
    except MemoryError:
        total = sum(heights)
        raise DoesNotFitError(
            f"there is no memory for {what} of {format_bytes(total)}", needed=total, capacity=0, lower_bound=total
        ) from None


def check_sharing(mine: tuple[Program, Plan], theirs: tuple[Program, Plan], height: int) -> None:
    """Check that one session can use the parameters of another in place. The other may have more of them behind these,
    such as those of its loss.

    Args:
        height: of the first one's region of parameters.

    Raises:
        SessionError: they lie in another kind of memory, or differ.
    """
    programs = [program for program, _ in (mine, theirs)]
    on_card = [engine_info(program.target).on_card for program in programs]
    if on_card[0] != on_card[1]:
        raise SessionError(
            f"a session on {programs[0].target} and one on {programs[1].target} cannot share parameters: they lie on "
            "the card in one, and in host memory in the other"
        )
    own, other = _parameters(*mine), _parameters(*theirs)
    wrong = [name for name, place in own.items() if other.get(name) != place]
    if not wrong and len(own) < len(other) and height > _end(*mine):
        wrong = [name for name in other if name not in own]  # they lie where this program computes something
    if wrong:
        found, wanted = (each.get(wrong[0], ("missing", 0))[0] for each in (own, other))
        elsewhere = ", at another place: compile both from one model" if found == wanted else ""
        elsewhere = ": compile it without prepack" if " in the blocks " in found + wanted else elsewhere
        if any(isinstance(slot.init, Flat | Sharded) for slot in theirs[0].stored):
            elsewhere = (
                ", whose ranks hold parts or rows of several: compile the first with share=the step of the other"
            )
        raise SessionError(
            f"{programs[0].model!r} and {programs[1].model!r} cannot share parameters: {wrong[0]!r} is {found} in one "
            f"and {wanted} in the other{elsewhere}"
        )


def check_state(mine: tuple[Program, Plan], theirs: tuple[Program, Plan]) -> None:
    """Check that one program keeps from step to step what another one does, and where it does.

    Raises:
        SessionError: it does not.
    """
    own, other = (
        {
            slot.name: (slot.kind, _lies(slot.operand), dict(plan.starts)[slot.operand.value], str(slot.init))
            for slot in program.stored
            if program.values[slot.operand.value].region == STATE
        }
        for program, plan in (mine, theirs)
    )
    if own != other or mine[1].heights[STATE] != theirs[1].heights[STATE]:
        names = [name for name in {**own, **other} if own.get(name) != other.get(name)]
        what = f" {names[0]!r}" if names else " what they keep"
        raise SessionError(
            f"steps of {mine[0].model!r} with batches of two sizes do not keep{what} in the same way: "
            "leave that batch out, or fill it up with other samples"
        )


def _end(program: Program, plan: Plan) -> int:
    """Where the values end that a program stores in the region of parameters."""
    starts = dict(plan.starts)
    own = [slot.operand.value for slot in program.stored if program.values[slot.operand.value].region == PARAMETERS]
    return align_up(max((starts[value] + program.values[value].nbytes for value in own), default=0), program.unit)


def _lies(operand: Operand) -> str:
    """Type and layout of a stored value, for people."""
    return f"{operand.type}{f' in the blocks {operand.blocks}' if operand.blocks else ''}"


def _parameters(program: Program, plan: Plan) -> dict[str, tuple[str, int]]:
    """Type and place of each stored value in the region of parameters."""
    starts = dict(plan.starts)
    return {
        slot.name: (_lies(slot.operand), starts[slot.operand.value])
        for slot in program.stored
        if program.values[slot.operand.value].region == PARAMETERS
    }
