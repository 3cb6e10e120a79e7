"""Why a step needs the memory that it needs, and what would change that: computed."""

from __future__ import annotations

from foreplan.compiler.compiled import Compiled
from foreplan.fit.changes import changes
from foreplan.planner import explain as stages_of
from foreplan.report.explanation import Explanation, Rebuild
from foreplan.report.peak_words import largest_at_peak
from foreplan.report.timeline import Timeline


def explain(step: Compiled, rebuild: Rebuild | None = None) -> Explanation:
    """The explanation of a step. Every figure is computed: it takes some times as long as compiling.

    Args:
        step: from `compile` or `load_plan`.
        rebuild: the model for a batch; None: nothing is said of other batches.
    """
    program, plan = step.highest
    memory, timeline = step.memory, Timeline.of(program, plan)
    held = largest_at_peak(memory, timeline)
    return Explanation(memory, timeline, held, stages_of(program, plan), changes(step, rebuild))
