"""Graph → ONNX: each node by its translation, ops that ONNX lacks decomposed first."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from foreplan.base.errors import ForeplanError, UnsupportedError
from foreplan.export.emitter import Emitter
from foreplan.export.ops import translation_of
from foreplan.frontend.onnx.tensors import ONNX_DTYPES
from foreplan.graph import Graph, Node, Op, TensorType, Value
from foreplan.graph.ir import live_nodes
from foreplan.graph.op import Types, Windows
from foreplan.ops.random import Random
from foreplan.passes.decompose import Decompose
from foreplan.version import VERSION

if TYPE_CHECKING:
    import onnx

OPSET, IR_VERSION = 18, 8


class _Standard:
    """Standard ONNX as a target of `decompose`: it has a kernel for what has a translation."""

    name = "ONNX"

    def kernels(self, op: Op, inputs: Windows, outputs: Windows) -> Sequence[object]:
        """The translation, if there is one for an op on tensors of these types."""
        found = translation_of(op, [window.type for window in inputs])
        return [] if found is None else [found]

    def fuses(self, op: Op, inputs: Types, outputs: Types) -> bool:
        """Never."""
        return False


def onnx_graph(
    graph: Graph, results: Mapping[str, Value], fed: Collection[Value] = (), inputs: Collection[Value] | None = None
) -> tuple[onnx.ModelProto, Graph]:
    """A graph as an ONNX model, whose initializers of stored values have no contents yet.

    Args:
        graph: what to write.
        results: output → value; a value may be an input, a stored one, or several outputs.
        fed: stored values that are inputs too, whose content is their default.
        inputs: those of the graph that are inputs of the model even if nothing reads them; None: all.

    Returns:
        The model, and the graph of decomposed ops that it says. This one has a value for each initializer that is to be
        filled: stored values, and inputs with a default.

    Raises:
        UnsupportedError: standard ONNX has no way to say a node; names it.
    """
    plain = dataclasses.replace(graph, outputs=dict(results), updates={}, loss=None, gradients={})
    _check(live_nodes(plain, plain.results))
    plain = Decompose(_Standard())(plain)
    e, names = _named(plain)
    for node in live_nodes(plain, plain.results):
        _write(e, node, names)
    for name, value in plain.outputs.items():
        if names[value] != name:
            e.copy(names[value], name)
    nodes = _live(e.nodes, plain.outputs)
    read = {name for node in nodes for name in node.input}
    given = [value for value in plain.inputs if inputs is None or value in inputs or value.name in read]
    proto = _header(graph.name)
    proto.graph.node.extend(nodes)
    proto.graph.input.extend(_told(value.name, value) for value in (*given, *fed))
    proto.graph.output.extend(_told(name, value) for name, value in plain.outputs.items())
    held = [value for value in given if value.init is not None]
    held += [value for value in plain.stored if value in fed or value.name in read]
    proto.graph.initializer.extend(_empty(value) for value in held)
    proto.graph.initializer.extend(tensor for tensor in e.constants if tensor.name in read)
    _check_types(proto)
    return proto, plain


def _header(name: str) -> onnx.ModelProto:
    """A model without nodes."""
    import onnx

    proto = onnx.ModelProto(ir_version=IR_VERSION, producer_name="foreplan", producer_version=VERSION)
    proto.opset_import.add(domain="", version=OPSET)
    proto.graph.name = name
    return proto


def _told(name: str, value: Value) -> onnx.ValueInfoProto:
    """An input or an output."""
    from onnx.helper import make_tensor_value_info

    return make_tensor_value_info(name, ONNX_DTYPES[value.dtype.name], value.shape)


def _empty(value: Value) -> onnx.TensorProto:
    """An initializer without its content."""
    import onnx

    return onnx.TensorProto(name=value.name, dims=value.shape, data_type=ONNX_DTYPES[value.dtype.name])


def _named(graph: Graph) -> tuple[Emitter, dict[Value, str]]:
    """The names of all values in ONNX: their own; of a computed result, that of the output."""
    names = {value: value.name for value in (*graph.inputs, *graph.stored)}
    for name, value in graph.outputs.items():
        names.setdefault(value, name)
    e = Emitter((*names.values(), *graph.outputs))
    for node in graph.nodes:
        for value in node.outputs:
            if value not in names:
                names[value] = e.names.claim(value.name)
    return e, names


def _check(nodes: Iterable[Node]) -> None:
    """Refuse what has neither a translation nor a decomposition."""
    for node in nodes:
        if (
            translation_of(node.op, [value.type for value in node.inputs])
            or type(node.op).decompose is not Op.decompose
        ):
            continue
        if isinstance(node.op, Random):
            raise UnsupportedError(
                f"{_where(node)} draws random bits from a seed and a step, as dropout does in training, and standard "
                "ONNX has no op that gives the same ones: export the model, or train without it"
            )
        raise UnsupportedError(f"{_where(node)}: standard ONNX has no op that says {node.op.name}")


def _where(node: Node) -> str:
    return f"node {node.name!r}" + (f" ({node.source})" if node.source else "")


def _write(e: Emitter, node: Node, names: Mapping[Value, str]) -> None:
    """The ONNX nodes of one node, the last of them with its results' names."""
    first, e.scope = len(e.nodes), node.name
    types: list[TensorType] = [value.type for value in node.inputs]
    try:
        made = e.apply(node.op, [names[value] for value in node.inputs], types)
    except ForeplanError as error:
        raise type(error)(f"{_where(node)}: {error}") from None
    own = {name for each in e.nodes[first:] for name in each.output}
    final: dict[str, str] = {}
    copies = []
    for value, name in zip(node.outputs, made, strict=True):
        if name in own and name not in final:
            final[name] = names[value]
        else:
            copies.append((final.get(name, name), names[value]))
    for each in e.nodes[first:]:
        for listed in (each.input, each.output):
            for i, name in enumerate(listed):
                listed[i] = final.get(name, name)
    for source, name in copies:
        e.copy(source, name)


def _live(nodes: Sequence[onnx.NodeProto], results: Iterable[str]) -> list[onnx.NodeProto]:
    """The nodes that results need, in order, without results at their ends that nobody reads."""
    needed, kept = set(results), []
    for node in reversed(nodes):
        if needed.isdisjoint(node.output):
            continue
        while node.output[-1] not in needed:
            del node.output[-1]
        needed.update(node.input)
        kept.append(node)
    return kept[::-1]


def _check_types(proto: onnx.ModelProto) -> None:
    """Refuse a node of types that its op does not take.

    Raises:
        UnsupportedError: there is one; has what ONNX says of it.
    """
    from onnx.shape_inference import InferenceError, infer_shapes

    try:
        infer_shapes(proto, check_type=True, strict_mode=True)
    except InferenceError as error:
        reason = str(error).strip().splitlines()[-1]
        raise UnsupportedError(f"standard ONNX (opset {OPSET}) does not take it: {reason}") from None
