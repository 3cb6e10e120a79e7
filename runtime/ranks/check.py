"""Exchanges in a plan that was read from a file: what arrives is waited for before its bytes serve anything else."""

from __future__ import annotations

from foreplan.base.errors import PlanError
from foreplan.lower.program import Call, Program
from foreplan.ops.collective import Begin, Collective, Finish
from foreplan.planner.plan import Plan


def check_exchanges(program: Program, plan: Plan) -> None:
    """Check that every exchange that a plan begins is finished, once, by an action that also reads what is sent, in the
    same place and not computed again meanwhile; and that groups of ranks make up all of them.

    The verifier then proves that what is sent stays, and that nothing else has the bytes of what arrives until then.

    Raises:
        PlanError: names the node.
    """
    for op in {call.op for call in program.calls_of(Collective)}:
        if program.ranks % (op.ranks * op.stride):
            raise PlanError(f"{program.ranks} ranks are not made up of groups as {op} has them")
    begins = {call.outputs[0].value: call for call in program.calls_of(Begin) if not call.op.wait}
    for action, call in zip(program.actions, program.calls):
        where = f"node {call.node!r}"
        if call.of(Finish):
            first = begins.get(call.inputs[0].value)
            if first is None or first.inputs[0] != call.inputs[1]:
                raise PlanError(f"{where}: waits for no exchange, or for one that sends something else")
            if [(pair.write, pair.read) for pair in action.overwrites] != [(0, 0)]:
                raise PlanError(f"{where}: what arrives does not take the place of what was begun")
            continue
        if any(operand.value in begins for operand in call.inputs):
            raise PlanError(f"{where}: reads what has not arrived")
    under_way: dict[int, Call] = {}
    places: dict[int, set[int]] = {}  # of what is sent, by what arrives; -1: it was made again meanwhile
    for step in plan.steps:
        if not 0 <= step.action < len(program.calls):
            continue  # which the verifier tells
        action, call = program.actions[step.action], program.calls[step.action]
        reads = dict(zip(action.reads, step.reads))
        for value, begun in under_way.items():
            if begun.inputs[0].value in action.writes:
                places[value].add(-1)
        if (begin := call.of(Begin)) and not begin.op.wait:
            if call.outputs[0].value in under_way:
                raise PlanError(f"node {call.node!r}: begins once more what is under way")
            under_way[call.outputs[0].value] = call
            places[call.outputs[0].value] = {reads.get(call.inputs[0].value, 0)}
        elif call.of(Finish):
            value, sent = (operand.value for operand in call.inputs[:2])
            if under_way.pop(value, None) is None:
                raise PlanError(f"node {call.node!r}: waits for what was not begun")
            if places[value] != {reads.get(sent, 0)}:
                raise PlanError(f"node {call.node!r}: {program.values[sent].name!r} was made again while it was sent")
    if under_way:
        raise PlanError(f"node {next(iter(under_way.values())).node!r}: what it begins is never waited for")
