"""Biases of zeros that the exporter has left out: they are there again, and trained like any other.

`torch.onnx.export(…, dynamo=True)` drops the bias of a product or convolution if it is zero, as it is in fresh modules.
The sign is a Gemm, Conv or ConvTranspose without a bias, whose metadata name a parameter in the bias's place that no
node reads. The node reads an initializer of zeros under that name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from foreplan.base.units import listed
from foreplan.frontend.onnx.module.draft import Draft
from foreplan.frontend.onnx.module.signature import Call

if TYPE_CHECKING:
    import onnx

# Part of a call's name → the place of the bias among the tensors that it reads, and how many these are with it. A batch
# normalisation with this call is folded into the op: the bias is then what it adds.
_CALLS = {"aten.linear": (2, (3,)), "aten.conv": (2, (3,)), "aten.addmm": (0, (3,)), "batch_norm": (2, (3, 5))}
_OPS = ("Gemm", "Conv", "ConvTranspose")


def restore_omitted_biases(draft: Draft) -> None:
    """Give each product and convolution the bias that its call names, if no node reads it: it has zeros alone."""
    held, signature = draft.floats(), draft.exporter.signature
    read = {name for node in draft.graph.node for name in node.input}
    read.update(source for sources in draft.exporter.sources.values() for source in sources)
    found = {}
    for index, node in enumerate(draft.graph.node):
        call = Call.of(node)
        if node.op_type not in _OPS or call is None or any(node.input[2:]) or len(node.input) < 2:
            continue
        places = (place for name, (place, counts) in _CALLS.items() if name in call.op and len(call.args) in counts)
        target = next((signature.targets.get(call.args[place], "") for place in places), "")
        if target not in read and signature.kinds.get(target) == "PARAMETER" and node.input[1] in held:
            found[index] = target
    if not found:
        return
    graph = draft.change()
    for index, target in found.items():
        del graph.node[index].input[2:]
        graph.node[index].input.append(target)
        if target not in held:
            held[target] = _zeros(graph, target, held[graph.node[index].input[1]], graph.node[index])
    shown = listed(map(repr, dict.fromkeys(found.values())), 3)
    draft.notes.append(f"the exporter has left out biases of zeros; {shown} are there again")


def _zeros(graph: onnx.GraphProto, name: str, weight: onnx.TensorProto, node: onnx.NodeProto) -> onnx.TensorProto:
    """A bias for a weight."""
    numbers: Mapping[str, int] = {each.name: each.i for each in node.attribute}
    if node.op_type == "Gemm":
        extent = weight.dims[0 if numbers.get("transB") else 1]
    else:
        extent = weight.dims[0] if node.op_type == "Conv" else weight.dims[1] * numbers.get("group", 1)
    new = graph.initializer.add(name=name, data_type=weight.data_type, dims=[extent])
    new.raw_data = bytes(extent * _width(weight))
    return new


def _width(tensor: onnx.TensorProto) -> int:
    """The bytes of an element."""
    from onnx import helper

    return int(helper.tensor_dtype_to_np_dtype(tensor.data_type).itemsize)
