"""Programs of graphs that tests write as text, and their actions as lines."""

from __future__ import annotations

from foreplan.graph import parse_graph
from foreplan.lower import Program, lower
from foreplan.planner import check_problem


def lowered(text: str) -> Program:
    program = lower(parse_graph("graph %g\n" + text))
    check_problem(program)
    return program


def actions(program: Program) -> list[str]:
    """Each action as `op: reads -> writes`, with the overwrites it may (?) or must (!) do."""
    names = [value.name for value in program.values]
    lines = []
    for action, call in zip(program.actions, program.calls):
        pairs = "".join(
            f" {names[action.writes[p.write]]}{'!' if p.required else '?'}{names[action.reads[p.read]]}"
            for p in action.overwrites
        )
        reads, writes = (" ".join(names[v] for v in ids) for ids in (action.reads, action.writes))
        lines.append(f"{call.op.name}: {reads} -> {writes}{pairs}{' effect' if action.effect else ''}")
    return lines
