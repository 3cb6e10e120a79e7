"""What PyTorch's exporter writes, put as a model means it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import onnx

CASTS = ("Cast", "CastLike")
CLOSE = 1e-6  # of two probabilities that are the same, one of them in float32


def without_false_biases(proto: onnx.ModelProto) -> None:
    """Take the biases of zeros from convolutions that have none in PyTorch. For three axes the exporter gives them a
    shape that is none of a bias.
    """
    makers = _makers(proto)
    for node in proto.graph.node:
        if node.op_type == "Conv" and len(node.input) > 2:
            maker = makers.get(node.input[2])
            zeros = _constant(makers, maker.input[0]) if maker is not None and maker.op_type == "Expand" else None
            if zeros is not None and not zeros.any():
                del node.input[2:]


def draws(proto: onnx.ModelProto) -> bool:
    """Whether there are random numbers but for those of Dropout nodes."""
    return any(node.op_type.startswith(("Random", "Bernoulli")) for node in proto.graph.node)


def with_dropouts(proto: onnx.ModelProto) -> None:
    """Write noise that is 1 / p with probability p, else 0, as the dropout of ones: so training alone draws it.

    That is what the exporter makes of dropout in place, of whole channels, and of stochastic depth. Draws that anything
    else reads stay: a dropout would draw others.
    """
    from onnx import helper, numpy_helper

    makers, readers, gone = _makers(proto), _readers(proto), set[str]()
    found = {node.output[0]: _noise(makers, readers, node) for node in proto.graph.node if node.op_type == "Div"}
    nodes: list[onnx.NodeProto] = []
    for node in proto.graph.node:
        chain = found.get(node.output[0])
        if chain is None:
            nodes.append(node)
            continue
        like, p, drawn = chain
        gone |= drawn
        y = node.output[0]
        one, ratio = (numpy_helper.from_array(np.array(x, np.float32)) for x in (1, 1 - p))
        nodes += [
            helper.make_node("Constant", [], [f"{y}/one"], value=one),
            helper.make_node("CastLike", [f"{y}/one", like], [f"{y}/alike"]),
            helper.make_node("Shape", [like], [f"{y}/shape"]),
            helper.make_node("Expand", [f"{y}/alike", f"{y}/shape"], [f"{y}/ones"]),
            helper.make_node("Constant", [], [f"{y}/ratio"], value=ratio),
            helper.make_node("Dropout", [f"{y}/ones", f"{y}/ratio"], [y], name=node.name),
        ]
    kept = [node for node in nodes if gone.isdisjoint(node.output)]
    del proto.graph.node[:]
    proto.graph.node.extend(kept)


def _noise(
    makers: Mapping[str, onnx.NodeProto], readers: Mapping[str, int], node: onnx.NodeProto
) -> tuple[str, float, set[str]] | None:
    """Of a node that divides such draws by their probability, which nothing else reads: what their shape is of, the
    probability, and the results of the nodes that draw.
    """
    number = makers.get(node.input[0]) if node.op_type == "Div" else None
    less = makers.get(number.input[0]) if number is not None and number.op_type in CASTS else None
    drawn = makers.get(less.input[0]) if less is not None and less.op_type == "Less" else None
    if number is None or less is None or drawn is None or drawn.op_type != "RandomUniformLike":
        return None
    p, divisor = _constant(makers, less.input[1]), _constant(makers, node.input[1])
    if p is None or divisor is None or p.size != 1 or divisor.size != 1 or abs(p.item() - divisor.item()) > CLOSE:
        return None
    private = {node.input[0]: 1, number.input[0]: 1, less.input[0]: 1}
    cast = makers.get(less.input[1])
    if cast is not None and cast.op_type == "CastLike" and cast.input[1] == less.input[0]:  # of p to the type drawn
        private |= {less.input[0]: 2, less.input[1]: 1}
    if any(readers[name] != count for name, count in private.items()):
        return None
    return drawn.input[0], float(divisor.item()), set(private)


def _constant(makers: Mapping[str, onnx.NodeProto], name: str) -> np.ndarray | None:
    """The value of a constant, behind casts too."""
    from onnx import numpy_helper

    node = makers.get(name)
    while node is not None and node.op_type in CASTS:
        node = makers.get(node.input[0])
    for each in node.attribute if node is not None and node.op_type == "Constant" else ():
        if each.name == "value":
            return numpy_helper.to_array(each.t)
        if each.name == "value_float":
            return np.array(each.f, np.float32)
    return None


def _makers(proto: onnx.ModelProto) -> dict[str, onnx.NodeProto]:
    return {name: node for node in proto.graph.node for name in node.output}


def _readers(proto: onnx.ModelProto) -> Counter[str]:
    """How often each result is read, also within the bodies of conditions and loops."""
    found, pending = Counter[str](), [proto.graph]
    while pending:
        graph = pending.pop()
        found.update(value.name for value in graph.output)
        for node in graph.node:
            found.update(node.input)
            pending += [body for each in node.attribute for body in (each.g, *each.graphs) if body.node or body.output]
    return found
