"""Models and training steps → ONNX files.

emitter, table   ONNX nodes under construction, and the table of translations
ops/, expressions  the translations, one file a family
graph            a graph as an ONNX model: what ONNX lacks is decomposed first
forms            what of a model is written, with its inputs and outputs
source           an imported model as its file had it, with other weights
metadata         what viewers show of values and nodes: offsets, lifetimes
save             the file, and a file of weights beside it where they are large
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType

import numpy as np

from foreplan.base.errors import UsageError
from foreplan.export.metadata import Facts, add_metadata
from foreplan.graph import Graph, Value

_NO_FACTS: Facts = MappingProxyType({})
FORMS = ("model", "graph", "step")
_NO_GRAPH = "a plan file has no graph to write: compile the model itself, or use `foreplan export MODEL`"
_NO_STEP = "a step that accumulates gradients is two graphs: compile it with accumulate=1 to write it as one"


def write_onnx(
    path: str,
    form: str,
    model: Graph | None,
    step: Graph | None,
    held: Mapping[str, np.ndarray],
    values: Facts = _NO_FACTS,
    nodes: Facts = _NO_FACTS,
) -> list[Path]:
    """Write a model, or the step that trains it, as an ONNX file.

    Args:
        path: of the file.
        form: one of FORMS: see `foreplan.runtime.session.Session.to_onnx`.
        model: as it was compiled; None where it is not known.
        step: the whole step; None where it is not known, or in two halves.
        held: the contents of what a session keeps; without adapters where a model that has some is written as it was.
        values, nodes: what the metadata of a step says of each, by name.

    Returns:
        The files: the model's, and one beside it if large weights are there.

    Raises:
        UsageError: what is asked for is not known.
        UnsupportedError: it cannot be said in standard ONNX; names the node.
        ModelError: the file that the model came from is needed, and is gone or another one.
    """
    from foreplan.export.forms import model_form, step_form
    from foreplan.export.save import save_model
    from foreplan.export.source import InIntegers, first_content, in_type, source_form
    from foreplan.frontend.onnx.origin import Origin

    graph = step if form == "step" else model
    if graph is None:
        raise UsageError(_NO_STEP if model is not None else _NO_GRAPH)
    if form == "model" and isinstance(graph.origin, Graph) and [*graph.origin.outputs] == [*graph.outputs]:
        graph = graph.origin
    origin, held = graph.origin, InIntegers(graph, held)
    if form == "model" and isinstance(origin, Origin) and origin.outputs == tuple(graph.outputs):
        return save_model(path, *source_form(graph, origin, held), origin.external)
    proto, plain = (step_form if form == "step" else model_form)(graph)
    if form == "step":
        add_metadata(proto, plain, values, nodes)
    named = {tensor.name for tensor in proto.graph.initializer if not tensor.raw_data}
    filled = [value for value in (*plain.inputs, *plain.stored) if value.name in named]

    def content(value: Value) -> np.ndarray:
        return in_type(value.name, value.dtype, held) if value.name in held else first_content(value)

    return save_model(path, proto, {value.name: partial(content, value) for value in filled})
