"""Offload: actions that copy activations to host memory and back, beside those that compute them."""

from __future__ import annotations

from dataclasses import replace

from foreplan.lower.program import ARENA, HOST, WITH_HOST, Call, Operand, Program
from foreplan.lower.segments import backward_actions
from foreplan.lower.target import Candidate, Target
from foreplan.ops.map import COPY
from foreplan.planner.problem import Action, Role, Value

LEAST = 1 << 16  # bytes; what is smaller is not worth an instruction


def with_host(program: Program, target: Target) -> Program:
    """The program with a region of host memory, and with a copy there and a copy back for each large value of the
    forward pass that the backward pass reads. The planner may use them instead of keeping or recomputing the value.

    References: Rhu et al., "vDNN: Virtualized Deep Neural Networks for Scalable, Memory-Efficient Neural Network
    Design", MICRO 2016, for copying what the backward pass reads; Beaumont et al., NeurIPS 2021, for doing it beside
    recomputation.
    """
    backward = backward_actions(program)
    values, actions, calls = list(program.values), list(program.actions), list(program.calls)
    for v, value in enumerate(program.values):
        if value.role is not Role.TRANSIENT or value.region != ARENA or value.nbytes < LEAST:
            continue
        if value.kept or value.copy_of >= 0:  # its name says what becomes of it
            continue
        if backward.isdisjoint(program.readers[v]) or not backward.isdisjoint(program.producers[v]):
            continue
        here = next(x for x in program.calls[program.producers[v][0]].outputs if x.value == v)
        there = replace(here, value=len(values))
        values.append(Value(f"{value.name}/host", value.nbytes, value.alignment, HOST, value.category))
        for name, source, result in ((f"{value.name}/offload", here, there), (f"{value.name}/fetch", there, here)):
            kernel = target.kernels(COPY, [source.window], [result.window])[0]
            actions.append(copy_action(name, source, result, kernel, target))
            calls.append(Call(COPY, kernel.name, (source,), (result,), name))
    return replace(program, values=tuple(values), actions=tuple(actions), calls=tuple(calls), regions=WITH_HOST)


def copy_action(name: str, source: Operand, result: Operand, kernel: Candidate, target: Target) -> Action:
    """A copy between the device and the host, at the speed of the target's bus."""
    nanoseconds = target.profile.bus_nanoseconds(source.type.nbytes)
    cost = COPY.cost([source.type], [result.type])
    return Action(
        name,
        reads=(source.value,),
        writes=(result.value,),
        workspace=kernel.workspace,
        workspace_region=ARENA,
        flops=cost.flops,
        nbytes=cost.nbytes,
        nanoseconds=nanoseconds,
    )
