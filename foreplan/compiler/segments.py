"""Recomputation by hand: the plan of a step that recomputes the named segments, and nothing else."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from foreplan.base.errors import UsageError
from foreplan.graph import Graph
from foreplan.graph.origin import ModuleOrigin
from foreplan.lower.program import Program
from foreplan.lower.segments import find_segments, forward_actions
from foreplan.options import Options
from foreplan.planner import Plan
from foreplan.planner.recompute.segments import plan_segments

RECOMPUTES = "recomputed, as the module's own torch.utils.checkpoint has it: {}; checkpoint=[] recomputes nothing"
NOT_RECOMPUTED = "nothing is recomputed, though the module calls torch.utils.checkpoint: {}"


def own_segments(graph: Graph, options: Options) -> tuple[str, ...]:
    """What a PyTorch module recomputes itself, where no option says what a training step recomputes."""
    says = options.checkpoint is not None or options.budget is not None or options.activations or options.offload
    trains = options.loss is not None or graph.loss is not None
    if says or not trains or options.remat != "auto" or not isinstance(graph.origin, ModuleOrigin):
        return ()
    return graph.origin.segments


def plan_checkpoints(program: Program, entries: Sequence[str]) -> Plan:
    """The lowest plan found that recomputes the segments that entries name, verified.

    Args:
        program: a training step.
        entries: see `foreplan.lower.segments.find_segments`.

    Raises:
        UsageError: an entry names nothing, or only values not needed again; segments overlap; there is no loss.
    """
    segments = find_segments(program, entries)
    found = plan_segments(program, [segment.actions for segment in segments], forward_actions(program))
    runs = Counter(step.action for step in found.steps)
    again = {segment.entry for segment in segments if any(runs[action] > 1 for action in segment.actions)}
    if idle := [entry for entry in entries if entry not in again]:
        raise UsageError(
            f"checkpoint {idle[0]!r} recomputes nothing: all its results are read outside of it, or not by the "
            "backward pass; name a larger part of the model"
        )
    return found
