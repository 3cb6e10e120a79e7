"""An imported model as its file had it, with the weights that a session holds."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from foreplan.base.errors import UnsupportedError
from foreplan.base.units import listed
from foreplan.export.save import Contents
from foreplan.frontend.onnx.nested_tensors import graph_at
from foreplan.frontend.onnx.origin import OTHERWISE, Origin
from foreplan.frontend.onnx.tensors import dtype_of
from foreplan.graph import DType, Graph, Kind, Value, as_dtype
from foreplan.graph.init import generator_for
from foreplan.passes.quantised_weights import schemes

if TYPE_CHECKING:
    import onnx


def source_form(graph: Graph, origin: Origin, held: Mapping[str, np.ndarray]) -> tuple[onnx.ModelProto, Contents]:
    """The file of an imported graph, and the contents of those of its initializers that are to be written.

    Nodes, names, opsets, metadata and types are the file's. A weight goes back under its name, in the file's element
    type: an initializer, or what a Constant holds or a ConstantOfShape fills, also of a branch or a loop's body.

    Raises:
        UnsupportedError: a weight that has changed is none of these, or is too large for the file's type.
        ModelError: a tensor that the session does not hold is in a file that is gone, or is another one by now.
    """
    proto = origin.model()
    stored = {value.name: value for value in graph.stored}
    weights = {name for name, value in stored.items() if value.kind is not Kind.STATE and name in held}
    placed = {tensor.name for tensor in proto.graph.initializer}
    for node in proto.graph.node:
        if len(node.output) == 1 and node.output[0] in weights and _fill_node(node, stored[node.output[0]], held):
            placed.add(node.output[0])
    placed |= {
        name for name in weights - placed if name in origin.places and _fill_place(proto, origin, stored[name], held)
    }
    lost = [name for name in weights - placed if _has_changed(stored[name], held)]
    if lost:
        shown = listed(map(repr, sorted(lost)), 5)
        raise UnsupportedError(
            f"{origin.label}: the file has no place for {shown}: a function of the model holds what has become several "
            f"weights; {OTHERWISE}"
        )
    return proto, _contents(proto, origin, stored, weights, held)


def _contents(
    proto: onnx.ModelProto,
    origin: Origin,
    stored: Mapping[str, Value],
    weights: Collection[str],
    held: Mapping[str, np.ndarray],
) -> Contents:
    """What initializers will hold; tensors within nodes are filled at once."""
    nested = [tensor for tensor in _nested(proto) if tensor.data_location == tensor.EXTERNAL]
    outside = [tensor for tensor in proto.graph.initializer if tensor.data_location == tensor.EXTERNAL]
    unheld = [*nested, *(tensor for tensor in outside if tensor.name not in stored)]
    if unheld:
        origin.check_file(unheld[0].name)
    contents: dict[str, partial[np.ndarray]] = {}
    for tensor in proto.graph.initializer:
        name = tensor.name
        if name in weights:
            contents[name] = partial(in_type, name, as_dtype(dtype_of(tensor.data_type, name)), held)
        elif tensor.data_location == tensor.EXTERNAL:
            known = stored.get(name)
            contents[name] = partial(first_content, known) if known else partial(origin.content, _copied(tensor))
        if name in contents:
            _clear(tensor)
    for tensor in nested:
        array = origin.content(tensor)
        _clear(tensor)
        tensor.raw_data = array.tobytes()
    return contents


def first_content(value: Value) -> np.ndarray:
    """What a stored value holds before the first step."""
    assert value.init is not None
    array = np.empty(value.shape, value.dtype.numpy)
    value.init.fill(array, generator_for(0, value.name))
    return array


class InIntegers(Mapping[str, np.ndarray]):
    """What a session holds, with integers for the weights that the model has in integers; made when they are asked for.

    Args:
        model: whose integers tell how they stand for weights.
        held: what the session holds.
    """

    def __init__(self, model: Graph, held: Mapping[str, np.ndarray]) -> None:
        self.held = held
        self.schemes = {value.name: (scheme, value.type) for value, scheme in schemes(model).items()}

    def __getitem__(self, name: str) -> np.ndarray:
        array = self.held[name]
        if name not in self.schemes or array.dtype.kind in "iu":
            return array
        scheme, type = self.schemes[name]
        return scheme.codes(array, type)

    def __contains__(self, name: object) -> bool:
        return name in self.held

    def __iter__(self) -> Iterator[str]:
        return iter(self.held)

    def __len__(self) -> int:
        return len(self.held)


def in_type(name: str, dtype: DType, held: Mapping[str, np.ndarray]) -> np.ndarray:
    """A weight that a session holds in its element type in the model; narrow ones are trained in float32.

    Raises:
        UnsupportedError: a number is too large for the type.
    """
    array = held[name]
    if array.dtype == dtype.numpy:
        return array
    with np.errstate(over="ignore"):
        narrow = array.astype(dtype.numpy)
    if not np.array_equal(np.isfinite(narrow.astype(array.dtype)), np.isfinite(array)):
        raise UnsupportedError(
            f"weight {name!r} holds {np.abs(array[np.isfinite(array)]).max():.3g}, and its type in the model, {dtype}, "
            "has no number as large: make the model in float32, and train that"
        )
    return narrow


def _fill_node(node: onnx.NodeProto, value: Value, held: Mapping[str, np.ndarray]) -> bool:
    """Write a weight that a node holds into it; False: it is none of a kind that holds one."""
    from onnx.helper import make_attribute, make_tensor

    if node.op_type not in ("Constant", "ConstantOfShape") or node.domain not in ("", "ai.onnx"):
        return False
    if node.op_type == "ConstantOfShape" and not _has_changed(value, held):
        return True
    given = next((a.t.data_type for a in node.attribute if a.name == "value"), 0) or 1
    array = in_type(value.name, as_dtype(dtype_of(given, value.name)), held)
    del node.attribute[:], node.input[:]
    node.op_type = "Constant"
    node.attribute.append(make_attribute("value", make_tensor("", given, value.shape, array.tobytes(), raw=True)))
    return True


def _fill_place(proto: onnx.ModelProto, origin: Origin, value: Value, held: Mapping[str, np.ndarray]) -> bool:
    """Write a weight that a branch or a loop's body holds into it."""
    path, key = origin.places[value.name]
    graph = graph_at(proto.graph, path)
    if isinstance(key, int):
        return _fill_node(graph.node[key], value, held)
    (tensor,) = (each for each in graph.initializer if each.name == key)
    array = in_type(value.name, as_dtype(dtype_of(tensor.data_type, key)), held)
    _clear(tensor)
    tensor.raw_data = array.tobytes()
    return True


def _has_changed(value: Value, held: Mapping[str, np.ndarray]) -> bool:
    first = first_content(value)
    return not np.array_equal(held[value.name].astype(first.dtype), first, equal_nan=True)


def _copied(tensor: onnx.TensorProto) -> onnx.TensorProto:
    copy = type(tensor)()
    copy.CopyFrom(tensor)
    return copy


def _clear(tensor: onnx.TensorProto) -> None:
    """Leave the name, type and shape of a tensor, and what is said about it."""
    for field in ("raw_data", "float_data", "int32_data", "int64_data", "double_data", "uint64_data"):
        tensor.ClearField(field)
    tensor.ClearField("external_data")
    tensor.ClearField("data_location")


def _nested(proto: onnx.ModelProto) -> Iterator[onnx.TensorProto]:
    """Tensors that nodes hold, and those of graphs within nodes."""
    nodes = [*proto.graph.node, *(node for function in proto.functions for node in function.node)]
    while nodes:
        node = nodes.pop()
        for attribute in node.attribute:
            if attribute.HasField("t"):
                yield attribute.t
            yield from attribute.tensors
            for graph in (*([attribute.g] if attribute.HasField("g") else []), *attribute.graphs):
                yield from graph.initializer
                nodes += graph.node
