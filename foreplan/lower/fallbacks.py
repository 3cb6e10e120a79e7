"""Which nodes of a program run NumPy's kernels, because the engine has none for them."""

from __future__ import annotations

from dataclasses import dataclass

from foreplan.lower.program import Program
from foreplan.lower.targets import engine_info


@dataclass(frozen=True, slots=True)
class Fallback:
    """An op that runs NumPy's kernel.

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
    if not engine_info(program.target).falls_back:
        return ()
    found: dict[str, list[str]] = {}
    for i, call in enumerate(program.calls):
        if call.kernel == "reference" and i not in program.copies:
            found.setdefault(call.op.name, []).append(call.node)
    made = [Fallback(op, len(nodes), tuple(dict.fromkeys(nodes))) for op, nodes in found.items()]
    return tuple(sorted(made, key=lambda each: (-each.count, each.op)))


def note_of(found: tuple[Fallback, ...], target: str) -> str:
    """A sentence for people; none if nothing was found."""
    if not found:
        return ""
    listed = ", ".join(f"{each.count:,} {each.op}" for each in found)
    return f"NumPy's kernels run what the target {target} has none of its own for: {listed}"
