"""One import of a model, with what binds its inputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from foreplan.base.patterns import AS_THE_MODEL, Selection
from foreplan.frontend.onnx.batch import Rebatch
from foreplan.frontend.onnx.importer import Importer
from foreplan.frontend.onnx.load import Model
from foreplan.frontend.onnx.origin import Origin
from foreplan.frontend.onnx.shapes import bind_shapes
from foreplan.graph import Graph


def import_model(
    model: Model,
    shapes: Mapping[str, Sequence[int]] | None,
    batch: int | None = None,
    values: Mapping[str, Any] | None = None,
    selection: Selection = AS_THE_MODEL,
) -> Graph:
    """The graph of a model; arguments are those of `from_onnx`.

    Raises:
        Unbound: inputs have open sizes.
        ForeplanError: as `from_onnx`.
    """
    bound = bind_shapes(model, shapes, batch, values)
    rebatch = None
    if bound.exported is not None and batch is not None:
        exported = Importer(model)
        exported.run(bound.exported, bound.values)
        rebatch = Rebatch(bound.old_batch, batch, exported.shapes)
    importer = Importer(model, rebatch, selection)
    graph = importer.run(bound.types, bound.values)
    return replace(
        graph,
        notes=(*bound.notes, *graph.notes),
        origin=Origin.of(model, importer.told, graph, importer.nested.of_stored()),
    )
