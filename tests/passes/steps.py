"""Training steps of graphs that tests write down, by the passes of the list."""

from __future__ import annotations

from collections.abc import Iterable

from foreplan.graph import DType, Graph
from foreplan.graph.types import FLOAT32
from foreplan.passes import (
    Accumulation,
    Fission,
    Settings,
    Stage,
    list_without,
    run_passes,
    simplified,
    updating,
    with_same_stored,
)
from foreplan.passes.optimizer import Optimizer


def training_step(
    graph: Graph, optimizer: Optimizer | None = None, dtype: DType = FLOAT32, without: Iterable[str] = ()
) -> Graph:
    """Of a forward graph with its loss, in training form."""
    consume = None if optimizer is None else updating(optimizer)
    settings = Settings(trains=True, consume=consume, dtype=dtype, fission=Fission.CHANNELS)
    return run_passes(graph, settings, (Stage.MEMORY, Stage.TRAINING), passes=list_without(without))


def halves(graph: Graph, optimizer: Optimizer) -> tuple[Graph, Graph]:
    """The body of a step over micro-batches, and the update after them."""
    accumulation = Accumulation()
    settings = Settings(trains=True, consume=accumulation.consume, accumulation=accumulation)
    body = run_passes(graph, settings, (Stage.MEMORY, Stage.TRAINING))
    return with_same_stored(body, simplified(accumulation.update(body, updating(optimizer))))
