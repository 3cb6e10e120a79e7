"""Tensors that an exporter has merged because their first contents are equal, such as scales of normalisations, made
many again: each is trained by itself, as in the module.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from foreplan.frontend.onnx.contents import is_one_number
from foreplan.frontend.onnx.roles import Exporter
from foreplan.frontend.onnx.tensors import FLOATS
from foreplan.graph.names import Names
from foreplan.units import listed

if TYPE_CHECKING:
    import onnx

# Op → the inputs that a module fills with zeros or ones when it is made: scales, shifts, statistics and biases.
_FRESH: dict[str, tuple[int, ...]] = {
    "LayerNormalization": (1, 2),
    "GroupNormalization": (1, 2),
    "InstanceNormalization": (1, 2),
    "RMSNormalization": (1,),
    "BatchNormalization": (1, 2, 3, 4),
    "Conv": (2,),
    "ConvTranspose": (2,),
    "Gemm": (2,),
}
_STATISTICS = {3: "running_mean", 4: "running_var"}


def untied(graph: onnx.GraphProto, exporter: Exporter) -> tuple[onnx.GraphProto, Exporter, list[str]]:
    """The graph in which merged tensors are as many as in the module, what the exporter tells of them, and a note for
    people; else the graph itself.

    PyTorch's exporters merge equal initializers. TorchScript's leaves an Identity of the name that is lost; the other
    one leaves nothing. What is taken for merged there has zeros or ones alone, one axis, and several readers in places
    that a module fills so when it is made.
    """
    if not exporter.is_torch:
        return graph, exporter, []
    held = {tensor.name: tensor for tensor in graph.initializer if tensor.data_type in FLOATS}
    named = [i for i, node in enumerate(graph.node) if _renames(node, held, exporter)]
    merged = list(_merged(graph, held, exporter))
    if not named and not merged:
        return graph, exporter, []
    made = type(graph)()
    made.CopyFrom(graph)
    names = Names(name for node in graph.node for name in (*node.input, *node.output))
    names.take(tensor.name for tensor in graph.initializer)
    kinds = dict(exporter.kinds)
    fresh = []
    for index in named:
        (source,), (name,) = graph.node[index].input, graph.node[index].output
        _copy(made, held[source], name)
        fresh.append(name)
    for index, slot in merged:
        node = made.node[index]
        source = node.input[slot]
        name = names.claim(_name(node, slot))
        _copy(made, held[source], name)
        if source in kinds:
            kinds[name] = kinds[source]
        node.input[slot] = name
        fresh.append(name)
    for index in reversed(named):
        del made.node[index]
    shown = listed(map(repr, fresh), 3)
    note = f"the exporter has merged tensors that were equal; {shown} have their own content again"
    return made, replace(exporter, kinds=kinds), [note]


def _renames(node: onnx.NodeProto, held: dict[str, onnx.TensorProto], exporter: Exporter) -> bool:
    """Whether a node gives a tensor of the file under the name of another one of the module."""
    if node.op_type != "Identity" or len(node.input) != 1 or len(node.output) != 1:
        return False
    return node.input[0] in held and exporter.names_module(node.output[0]) and exporter.names_module(node.input[0])


def _merged(graph: onnx.GraphProto, held: dict[str, onnx.TensorProto], exporter: Exporter) -> Iterator[tuple[int, int]]:
    """All readers but the first of tensors that are merged: node and input."""
    readers: dict[str, list[tuple[int, int]]] = {}
    for index, node in enumerate(graph.node):
        for slot, name in enumerate(node.input):
            if name in held:
                readers.setdefault(name, []).append((index, slot))
    for name, places in readers.items():
        if len(places) < 2 or len(held[name].dims) != 1:
            continue
        usual = all(slot in _FRESH.get(graph.node[index].op_type, ()) for index, slot in places)
        if usual and is_one_number(held[name], exporter.path):
            yield from places[1:]


def _name(node: onnx.NodeProto, slot: int) -> str:
    """A name for what a node reads: by that of its scale for statistics, else by its result."""
    last = node.input[slot].rpartition(".")[2]
    if node.op_type == "BatchNormalization" and slot in _STATISTICS:
        return f"{node.input[1].rpartition('.')[0]}.{_STATISTICS[slot]}".lstrip(".")
    return f"{node.output[0]}.{last}"


def _copy(graph: onnx.GraphProto, tensor: onnx.TensorProto, name: str) -> None:
    new = graph.initializer.add()
    new.CopyFrom(tensor)
    new.name = name
