"""Narrow parameters → float32 parameters, read through a conversion."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from foreplan.base.errors import UnsupportedError
from foreplan.graph import Array, Graph, Node, Value
from foreplan.ops.map import convert
from foreplan.passes.base import Pass
from foreplan.passes.rewrite import builder_for


@dataclass(frozen=True)
class MasterWeights(Pass, requires=("forward", "floating-point weights"), ensures=("forward", "wide weights")):
    """The graph with float32 master weights in the place of float16 and bfloat16 parameters.

    An update of a thousandth of a weight is lost in bfloat16, which has eight significant bits: the weight never moves
    (Micikevicius et al., 2018, arXiv:1710.03740, section 3.1). What is computed stays narrow.

    Requires: a forward graph that is about to be differentiated. Ensures: parameters of the same names, in float32, and
    a note where there are any that were narrow; frozen weights stay narrow.
    """

    def _run(self, graph: Graph) -> Graph:
        narrow = [value for value in graph.parameters if value.dtype.is_narrow]
        if not narrow:
            return graph
        if written := [value.name for value in narrow if value in graph.updates]:
            raise UnsupportedError(
                f"the forward pass writes {written[0]!r}, which is trained in float32 and read in {narrow[0].dtype}; "
                "keep it in float32"
            )
        b = builder_for(graph)
        wide = {value: _widened(value) for value in narrow}
        b.stored = [wide.get(value, value) for value in graph.stored]
        now = {value: convert(b, wide[value], value.dtype) for value in narrow}
        for node in graph.nodes:
            inputs = tuple(now.get(value, value) for value in node.inputs)
            b.append(Node(node.op, inputs, node.outputs, node.name, node.source), inferred=True)
        types = " and ".join(sorted({value.dtype.name for value in narrow}))
        b.note(f"{len(narrow)} parameters of {types} are trained in float32, as updates would be lost to rounding")
        outputs = {name: now.get(value, value) for name, value in graph.outputs.items()}
        return b.finish(outputs, graph.updates, graph.loss, graph.gradients)


master_weights = MasterWeights()


def _widened(value: Value) -> Value:
    """The same parameter in float32."""
    dtype, init = value.dtype.wide, value.init
    if isinstance(init, Array):
        init = Array(init.array.astype(dtype.numpy))
    return dataclasses.replace(value, type=value.type.with_dtype(dtype), init=init)
