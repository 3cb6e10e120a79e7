"""Facts about values and nodes as metadata of an ONNX model, which runtimes pass over.

Netron 9.3 shows the metadata of nodes and not that of values, but it shows what describes a value. So a value's facts
are its description too.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from foreplan.graph import Graph, Value

if TYPE_CHECKING:
    import onnx

Facts = Mapping[str, Mapping[str, int | str]]  # by name
PREFIX = "plan."


def add_metadata(proto: onnx.ModelProto, graph: Graph, values: Facts, nodes: Facts) -> None:
    """Write facts beside the values and nodes of a model that was made from a graph.

    Metadata of values and nodes is part of ONNX from IR version 10 on; older readers do not see it.

    Args:
        values: by name; those that the model has no more are left out.
        nodes: by name; each holds for all ONNX nodes that one of the graph became.
    """
    from onnx.helper import make_tensor_value_info

    from foreplan.frontend.onnx.tensors import ONNX_DTYPES

    types: dict[str, Value] = {value.name: value for node in graph.nodes for value in node.outputs}
    told = {each.name: each for each in (*proto.graph.input, *proto.graph.output)}
    for node in proto.graph.node:
        _add(node, nodes.get(_scope(node.name, nodes), {}))
        for name in node.output:
            if name in values and name not in told and name in types:
                value = types[name]
                proto.graph.value_info.append(make_tensor_value_info(name, ONNX_DTYPES[value.dtype.name], value.shape))
                told[name] = proto.graph.value_info[-1]
    for name, each in told.items():
        facts = values.get(name, {})
        _add(each, facts)
        each.doc_string = ", ".join(f"{key} {fact}" for key, fact in facts.items())


def _scope(name: str, known: Facts) -> str:
    """The innermost scope of a node's name that is known."""
    while name and name not in known:
        name = name.rpartition("/")[0]
    return name


def _add(each: onnx.NodeProto | onnx.ValueInfoProto, facts: Mapping[str, int | str]) -> None:
    for key, fact in facts.items():
        each.metadata_props.add(key=PREFIX + key, value=str(fact))
