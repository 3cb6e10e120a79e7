"""Whether all ranks of a job are about to run the same step."""

from __future__ import annotations

import hashlib

from foreplan.base.errors import SessionError
from foreplan.lower.program import Program
from foreplan.lower.stage_times import messages_of, unmatched
from foreplan.planner.plan import Plan
from foreplan.runtime.processes import versions_here
from foreplan.runtime.update import Update
from foreplan.runtime.world.agreement import agree
from foreplan.runtime.world.world import ALONE, World, world_here
from foreplan.version import VERSION

_ADVICE = "all ranks must compile one model with the same options, or read one plan file, and bind it alike"


def check_alike(program: Program, plan: Plan, update: Update | None, seed: int, way: str = "") -> World:
    """The ranks that run a step, after a check that it is the same on all of them, or that stages fit one another. All
    ranks do it at the same time.

    Args:
        update: the other half of a step that accumulates gradients.
        way: how it runs, where this must be the same on all of them.

    Raises:
        SessionError: there are more ranks or fewer than it was planned for; or one has another model, plan, version,
            seed or way: says which; or it is no stage that belongs on this rank.
        TargetError: see `foreplan.runtime.ranks.current`.
    """
    if program.ranks == 1:
        return ALONE
    world = world_here()
    step = digest_of(program, plan)
    if program.is_stage:
        step = f"{program.model} on {program.target}, with {program.of_stage} ranks in each stage"
    inputs = (*program.inputs, *(update.program.inputs if update else ()))
    inputs = () if program.is_stage else inputs  # which differ from stage to stage
    facts: dict[str, object] = {"the number of ranks that it was planned for": program.ranks}
    facts |= {"the version of foreplan": VERSION, "the seed": seed, "the way to run": way}
    facts |= {f"the version of {name}": version for name, version in versions_here().items()}
    facts |= {f"the default of {slot.name!r}": str(slot.init) for slot in inputs if slot.init is not None}
    facts |= {"the number of micro-batches": update.micro_batches if update else 1, "the step": step}
    facts |= {"the update": digest_of(update.program, update.plan) if update else "nothing"}
    agree(world, "the step that they bind", facts, _ADVICE)
    groups = world.size if program.loss is None else program.ranks  # of inference, each may work by itself
    if groups % program.ranks or groups != world.size:
        raise SessionError(
            f"the step was planned for {program.ranks} ranks, and this job has {world.size}: start as many processes "
            f"(mpirun -n {program.ranks} …), or compile it with ranks={world.size}"
        )
    if program.is_stage and (wrong := _unfitting(world, program, plan)):
        raise SessionError(
            f"stages do not fit one another: {wrong}. Each rank compiles the same model with the same options, and "
            f"with its own stage: ranks 0 to {program.of_stage - 1} with stage=0, and so on"
        )
    for group in sorted(set().union(*world.gather(program.groups, "the groups of ranks"))):
        if group.ranks > 1:  # in one order on all ranks: those of another stage may ask for others first
            world.group(group.ranks, group.stride)
    return world


def _unfitting(world: World, program: Program, plan: Plan) -> str:
    """What is wrong with the stages that ranks are about to run, for people; empty: nothing is."""
    told = world.gather((program.stage, digest_of(program, plan), messages_of(program, plan)), "the stages")
    for rank, (stage, digest, _) in enumerate(told):
        place, number = divmod(rank, program.of_stage)
        if stage != place:
            return f"rank {rank} has stage {stage} instead of stage {place}"
        if digest != told[rank - number][1]:
            return f"rank {rank} has another plan of stage {stage} than rank {rank - number}"
    return unmatched([messages for _, _, messages in told[:: program.of_stage]])


def digest_of(program: Program, plan: Plan) -> str:
    """Of what each rank runs, and of the types of what it is given."""
    calls = (f"{call.op} {call.kernel} {call.inputs} {call.outputs}" for call in program.calls)
    slots = (f"{slot.name} {slot.operand} {slot.kind}" for slot in (*program.inputs, *program.stored))
    text = "\n".join((program.model, program.target, *slots, *calls, repr(plan.steps)))
    return hashlib.sha256(text.encode()).hexdigest()[:16]
