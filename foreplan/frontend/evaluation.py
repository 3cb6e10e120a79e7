"""A model with what it is measured by: its loss and metrics become outputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from foreplan.base.errors import UsageError
from foreplan.frontend.losses import attach_loss
from foreplan.frontend.metrics import named
from foreplan.graph import Graph

LOSS = "loss"


def with_metrics(
    graph: Graph, loss: Callable[..., Any] | str | None, metrics: Mapping[str, Callable[..., Any] | str]
) -> Graph:
    """The graph in inference form, whose outputs are `loss` and the metrics by name; the model's own are left out.

    Args:
        graph: a model; with a loss already where `loss` is None.
        loss: see `foreplan.compile`.
        metrics: name → one of `foreplan.metrics` or `foreplan.losses`, by itself or by name, or a function like a loss.

    Raises:
        UsageError: there is no loss, or a metric has the name of the loss.
        ShapeError, TraceError: see `attach_loss`.
    """
    if loss is None and graph.loss is None:
        raise UsageError("what is evaluated has a loss: pass loss=, for example losses.cross_entropy")
    own = graph.outputs
    measured = graph if loss is None else attach_loss(graph, loss)
    found = {LOSS: measured.loss}
    for name, metric in metrics.items():
        if name in found:
            raise UsageError(f"a metric cannot be called {name!r}: that is the loss")
        each = named(metric) if isinstance(metric, str) else metric
        measured = attach_loss(replace(measured, loss=None, outputs=own), each)
        found[name] = measured.loss
    results = {name: value for name, value in found.items() if value is not None}
    return replace(measured, loss=None, outputs=results)
