"""Which nodes of a program run other kernels than they might, because the engine has none on this machine."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from foreplan.lower.program import Program
from foreplan.lower.targets import engine_info

REFERENCE = "reference"  # the name of NumPy's kernels
IN_FLOAT32 = " in float32"  # at the end of the names of kernels that copy narrow operands to float32


@dataclass(frozen=True, slots=True)
class Fallback:
    """An op that runs such a kernel.

    Attributes:
        op: its name.
        count: actions that run it.
        nodes: their names, each once, in the program's order.
    """

    op: str
    count: int
    nodes: tuple[str, ...]


def fallbacks(program: Program) -> tuple[Fallback, ...]:
    """The ops of a program that run NumPy's kernels, the most frequent first; none on the engine `numpy`.

    Copies to host memory and back are no ops of the model and do not count.
    """
    return _running(program, REFERENCE) if engine_info(program.target).falls_back else ()


def _running(program: Program, kernels: str, among: Collection[int] | None = None) -> tuple[Fallback, ...]:
    """The ops that run kernels whose names end so, the most frequent first.

    Args:
        among: the actions that count; None: all.
    """
    found: dict[str, list[str]] = {}
    for i, call in enumerate(program.calls):
        if call.kernel.endswith(kernels) and i not in program.copies and (among is None or i in among):
            found.setdefault(call.op.name, []).append(call.node)
    made = [Fallback(op, len(nodes), tuple(dict.fromkeys(nodes))) for op, nodes in found.items()]
    return tuple(sorted(made, key=lambda each: (-each.count, each.op)))


def notes_of(program: Program) -> tuple[str, ...]:
    """A sentence for people about each kind; none of what there is not."""
    notes = []
    if found := fallbacks(program):
        notes.append(f"NumPy's kernels run what the target {program.target} has none of its own for: {_listed(found)}")
    fastest = _fastest(program)
    if found := _running(program, IN_FLOAT32, among=fastest):
        notes.append(
            "copies in float32 may be multiplied, which takes less time here than to multiply bfloat16: "
            f"{_listed(found)}; copies take memory, which a budget limits"
            + "; precision float32 takes less time"
            * (2 * _flops(program, fastest, IN_FLOAT32) > _flops(program, fastest, ""))
        )
    return tuple(notes)


def _fastest(program: Program) -> Collection[int]:
    """Of each node the action that is predicted to be the fastest."""
    found: dict[tuple[int, ...], int] = {}
    for i, action in enumerate(program.actions):
        best = found.setdefault(action.writes, i)
        if action.nanoseconds < program.actions[best].nanoseconds:
            found[action.writes] = i
    return set(found.values())


def _flops(program: Program, among: Collection[int], kernels: str) -> int:
    """Operations of those actions whose kernels' names end so."""
    return sum(program.actions[i].flops for i in among if program.calls[i].kernel.endswith(kernels))


def _listed(found: tuple[Fallback, ...]) -> str:
    return ", ".join(f"{each.count:,} {each.op}" for each in found)
