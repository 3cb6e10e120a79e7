"""Training steps of graphs that tests write down, by the passes of the list."""

from __future__ import annotations

from foreplan.compiler.pipeline import passes_of_training
from foreplan.compiler.step_graphs import uses_of
from foreplan.graph import DType, Graph
from foreplan.graph.types import FLOAT32
from foreplan.options import Options
from foreplan.passes import PRECISIONS, Accumulation, simplified, split_channels, updating, with_same_stored, without
from foreplan.passes.optimizer import Optimizer
from foreplan.passes.pipeline import Stage, of_stages, run_passes
from foreplan.passes.ranks import GradientUses

MADE = (Stage.MEMORY, Stage.TRAINING)


def training_step(
    graph: Graph, optimizer: Optimizer | None = None, dtype: DType = FLOAT32, left_out: tuple[str, ...] = ()
) -> Graph:
    """Of a forward graph with its loss, in training form."""
    (precision,) = (name for name, each in PRECISIONS.items() if each == dtype)
    options = Options(optimizer=optimizer, precision=precision, passes=without(*left_out), target="numpy")
    return run_passes(graph, of_stages(passes_of_training(options, [split_channels], uses_of(options)), MADE))


def halves(graph: Graph, optimizer: Optimizer) -> tuple[Graph, Graph]:
    """The body of a step over micro-batches, and the update after them."""
    accumulation = Accumulation()
    uses = GradientUses(updating(optimizer), accumulation.consume, updating(optimizer))
    entries = passes_of_training(Options(optimizer=optimizer, target="numpy"), (), uses, accumulation)
    body = run_passes(graph, of_stages(entries, MADE))
    return with_same_stored(body, simplified(accumulation.update(body, uses.of_sums)))
