"""Weights that the exporter has written a second time, transposed or repeated: one again, as in the module.

PyTorch's exporters compute what depends on weights alone. A table that is tied to the matrix of the head is read as it
is and transposed, so that the file has both. The sign is an initializer that the exporter made whose numbers are, all
of them, those of a weight of the module. It is replaced by an Identity, Transpose or Expand of that weight.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from foreplan.base.units import listed
from foreplan.frontend.onnx.module.contents import Layout, first_and_last, layout_in
from foreplan.frontend.onnx.module.draft import Draft
from foreplan.frontend.onnx.module.exporter import Exporter

if TYPE_CHECKING:
    import onnx


def tie_duplicated_weights(draft: Draft) -> None:
    """Compute what the exporter has computed by merely turning or repeating a tensor that the file has too."""
    held = draft.floats()
    found: dict[str, tuple[str, Layout]] = {}
    for name, source in _pairs(held, draft.exporter):
        layout = None if name in found else layout_in(held[source], held[name], draft.exporter.path, whole=True)
        if layout is not None:
            found[name] = source, layout
    if not found:
        return
    graph = draft.change()
    nodes = [_node(draft, graph, held[name], source, layout) for name, (source, layout) in found.items()]
    for tensor in [tensor for tensor in graph.initializer if tensor.name in found]:
        graph.initializer.remove(tensor)
    graph.node.extend(nodes)
    shown = listed([f"{name!r} is {source!r}" for name, (source, _) in found.items()], 3)
    draft.notes.append(f"the exporter has written tensors a second time: {shown}; they are tied, as in the module")


def _pairs(held: Mapping[str, onnx.TensorProto], exporter: Exporter) -> Iterator[tuple[str, str]]:
    """What the exporter made, and what of the module it may be: of what the exporter says, or else of all."""
    made = [name for name in held if exporter.made(name) and math.prod(held[name].dims) > 1]
    by_ends: dict[object, list[str]] = {}
    for name in held if made else ():
        if exporter.names_module(name):
            by_ends.setdefault(first_and_last(held[name], exporter.path), []).append(name)
    for name in made:
        for source in by_ends.get(first_and_last(held[name], exporter.path), ()):
            if source in exporter.sources.get(name, ()) or not exporter.kinds:
                yield name, source


def _node(
    draft: Draft, graph: onnx.GraphProto, tensor: onnx.TensorProto, source: str, layout: Layout
) -> onnx.NodeProto:
    from onnx import helper

    name, own = tensor.name, draft.claim_node(tensor.name)
    if layout is Layout.SAME:
        return helper.make_node("Identity", [source], [name], own)
    if layout is Layout.TRANSPOSED:
        return helper.make_node("Transpose", [source], [name], own, perm=[1, 0])
    shape = draft.claim(f"{name}.shape")
    graph.initializer.append(helper.make_tensor(shape, tensor.INT64, [len(tensor.dims)], tensor.dims))
    return helper.make_node("Expand", [source, shape], [name], own)
