"""All stages of a step: each compiled, and their plans run against each other by predicted times."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from foreplan.base.errors import DoesNotFitError
from foreplan.compiler import api
from foreplan.compiler.compiled import Compiled
from foreplan.compiler.step_graphs import layout_of
from foreplan.graph import Graph
from foreplan.lower.stage_times import StagesRun, run_stages
from foreplan.options import Options
from foreplan.passes.stages import Layout


@dataclass(frozen=True)
class Staged:
    """A training step in stages (pipeline parallelism): what the ranks of each run, and when.

    Attributes:
        layout: where the model is cut.
        steps: the compiled step of each stage, with its own plan.
        options: what they were compiled with, whatever their `stage`.
    """

    layout: Layout
    steps: tuple[Compiled, ...]
    options: Options

    @staticmethod
    def of(graph: Graph, options: Options) -> Staged:
        """All stages of a model.

        Args:
            options: with `stages`; `stage` means nothing here. A budget is that of each stage.

        Raises:
            UsageError: options do not go with stages, or the model has fewer operations than stages.
            DoesNotFitError: a stage does not meet the budget; says which.
        """
        layout = layout_of(graph, options)
        return Staged(layout, tuple(_compiled(graph, options)), options)

    @cached_property
    def run(self) -> StagesRun:
        """A step, by predicted times.

        Raises:
            PlanError: stages would wait for one another for ever.
        """
        return run_stages([(step.program, step.plan) for step in self.steps])

    def estimate(self) -> dict[str, Any]:
        """What `foreplan estimate --json` prints; sizes in bytes, times in seconds."""
        run = self.run
        return {
            "model": self.steps[0].program.model,
            "target": self.steps[0].program.target,
            "mode": "training",
            "stages": len(self.steps),
            "accumulate": self.options.accumulate,
            "ranks": self.options.ranks,
            "tensor": self.options.tensor,
            "shard": self.options.shard,
            "predicted_seconds": run.nanoseconds / 1e9,
            "bubble_ratio": run.bubble,
            "slowest_stage": run.slowest,
            "peak_bytes": max(step.memory.peak for step in self.steps),
            "by_stage": [self._of_stage(stage) for stage in range(len(self.steps))],
        }

    def _of_stage(self, stage: int) -> dict[str, Any]:
        step, time = self.steps[stage], self.run.stages[stage]
        figures, own = step.estimate(), self.layout.owned[stage]
        names = ("peak_bytes", "arena_bytes", "lower_bound_bytes", "categories", "outside", "plan_seconds")
        return {
            "stage": stage,
            "first": own[0].name,
            "last": own[-1].name,
            "parameters": figures["weights"]["trained"]["numbers"],
            **{name: figures[name] for name in names},
            **step.verdict.to_json(),
            "sent_bytes": time.sent,
            "messages": time.messages,
            "exchanged_bytes": time.exchanged,
            "busy_seconds": time.busy / 1e9,
            "end_seconds": time.end / 1e9,
        }


def _compiled(graph: Graph, options: Options) -> Iterator[Compiled]:
    """Each stage."""
    for stage in range(options.stages):
        try:
            yield api.compile_with(graph, replace(options, stage=stage))
        except DoesNotFitError as error:
            error.args = (f"stage {stage} of {options.stages}: {error}",)
            raise
