"""Narrow arithmetic with wide master weights: which values of a training step or a forward pass are narrow.

Parameters, statistics, optimizer state and everything a user gives or gets stay float32; images, hidden states and
their gradients are of a narrow type, so that they take half the bytes, and contractions read parameters through a
conversion (Micikevicius et al., 2018, arXiv:1710.03740; in bfloat16 Kalamkar et al., 2019, arXiv:1905.12322).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from foreplan.base.arguments import choice
from foreplan.graph import Builder, DType, Graph, Node, Op, Value
from foreplan.graph.types import DTYPES, FLOAT32
from foreplan.ops.attention.ops import Attention
from foreplan.ops.collective import AllGather, OwnPart
from foreplan.ops.conv.ops import Conv, ConvDataGrad
from foreplan.ops.expr import Arg, Call, subexpressions
from foreplan.ops.index import Gather
from foreplan.ops.index_elements import GatherElements
from foreplan.ops.join import Concat, Pad, Unslice
from foreplan.ops.linear_cross_entropy import LinearCrossEntropy
from foreplan.ops.loss import CrossEntropy
from foreplan.ops.map import Map, elementwise, rounded
from foreplan.ops.matmul import MatMul
from foreplan.ops.norm.batch import BatchNorm, BatchNormTrain, ChannelMoments
from foreplan.ops.norm.rows import LayerNorm, RMSNorm
from foreplan.ops.norm.sync import BatchNormSync
from foreplan.ops.pool import AvgPool, MaxPool
from foreplan.ops.reduce import Reduce
from foreplan.ops.shape import Slice
from foreplan.ops.softmax import LogSoftmax, Softmax
from foreplan.passes.base import Pass
from foreplan.passes.rewrite import replaced, rewrite

PRECISIONS: Mapping[str, DType] = {"float32": FLOAT32, "bf16": DTYPES["bfloat16"], "fp16": DTYPES["float16"]}

# Ops with a narrow form, and how many inputs, the first ones, are narrow in it; the others are float32.
_NARROW: dict[type[Op], int] = {
    Conv: 2,
    ConvDataGrad: 2,
    MatMul: 2,
    BatchNorm: 1,
    BatchNormTrain: 1,
    BatchNormSync: 1,
    ChannelMoments: 1,
    LayerNorm: 1,
    RMSNorm: 1,
    Softmax: 1,
    LogSoftmax: 1,
    CrossEntropy: 1,
    LinearCrossEntropy: 2,
    Attention: 3,
}
# Ops that leave elements as they are: narrow if anything that they read is.
_PASSING: tuple[type[Op], ...] = (MaxPool, AvgPool, Concat, Pad, Unslice, Gather, AllGather, OwnPart)
# Ops that belong to the loss where nothing but the loss reads what they give.
_ENDING: tuple[type[Op], ...] = (Map, Reduce, Gather, GatherElements, Softmax, LogSoftmax, Concat, Pad)


def narrow_type(precision: str) -> DType:
    """The element type that a precision computes with: float32, or a narrower one.

    Raises:
        UsageError: there is no such precision; lists those there are.
    """
    return PRECISIONS[choice("precision", precision, PRECISIONS)]


@dataclass(frozen=True)
class WithPrecision(Pass, requires=("forward", "plain ops", "no loops"), ensures=("forward",)):
    """A forward graph with narrow values where they may be narrow, and float32 elsewhere.

    Contractions, normalisations, softmax and attention read and write narrow tensors; maps write them where one of
    those reads the result, and compute in float32 themselves. Sums are float32 in every kernel. Parameters, what is
    computed from them alone, statistics, tables of embeddings, ops without a narrow form, and what the loss computes
    are float32; so are inputs and whatever is returned. Each reader converts for itself, so that gradients are
    added up in float32; `share_common` then joins the conversions.

    Requires: a simplified forward graph; of a training step right before it is differentiated. Ensures: the same
    inputs, stored values and results, of the same types; for float32 the graph itself.
    """

    dtype: DType

    def _run(self, graph: Graph) -> Graph:
        return graph if self.dtype == FLOAT32 else _Narrowing(graph, self.dtype).run()


class _Narrowing:
    """One rewriting: what was decided beforehand, and the narrow twins of wide values."""

    def __init__(self, graph: Graph, dtype: DType) -> None:
        self.graph, self.dtype = graph, dtype
        self.last = _last_nodes(graph)
        self.data = _reached(graph)
        self.asked, self.read_narrow = self.find_asked()
        self.twins: dict[Value, Value] = {}  # a narrow value's conversion to float32 → the value
        self.views: dict[Value, tuple[Op, Value]] = {}

    def run(self) -> Graph:
        return rewrite(self.graph, self.replace)

    def find_asked(self) -> tuple[set[Value], set[Value]]:
        """Values that an op with a narrow form reads, directly or through maps and sums."""
        asked: set[Value] = set()
        read: set[Value] = set()
        for node in reversed(self.graph.nodes):
            narrow = node.inputs[: self.narrow_inputs(node)]
            asked.update(narrow)
            read.update(narrow)
            if node in self.last:
                continue
            passes = isinstance(node.op, _PASSING) or node.op.is_view
            computes = isinstance(node.op, Reduce) or (isinstance(node.op, Map) and not _turns(node.op))
            if (passes or computes) and not asked.isdisjoint(node.outputs):
                asked.update(node.inputs)
            if passes and not read.isdisjoint(node.outputs):
                read.update(node.inputs)
        return asked, read

    def replace(self, b: Builder, node: Node, inputs: tuple[Value, ...]) -> Sequence[Value] | None:
        made = self.compute(b, node, inputs)
        if made is None:
            return None
        for i, (old, new) in enumerate(zip(node.outputs, made)):
            if old in self.graph.returned and new.dtype != old.dtype:
                made[i] = self.cast(b, new, old.dtype)
                self.twins[made[i]] = new
        return made

    def compute(self, b: Builder, node: Node, inputs: tuple[Value, ...]) -> list[Value] | None:
        """The node's outputs in the new graph; None: as they are."""
        count = self.narrow_inputs(node)
        if isinstance(node.op, Map | Reduce):
            inputs = tuple(self.twins.get(x, x) for x in inputs)
        if isinstance(node.op, Map):
            return self.map(b, node, inputs)
        if isinstance(node.op, Reduce):
            reduction = dataclasses.replace(node.op, wide=not self.is_narrow(node.outputs[0], self.read_narrow))
            return None if inputs[0].dtype != self.dtype else replaced(b, node, reduction, inputs)
        if isinstance(node.op, _PASSING) or node.op.is_view:
            return self.passing(b, node, inputs)
        changed = [
            (self.narrow if i < count else self.wide)(b, x) if old.dtype == FLOAT32 else x
            for i, (old, x) in enumerate(zip(node.inputs, inputs))
        ]
        op = node.op
        if isinstance(op, MatMul):
            (y,) = node.outputs
            op = dataclasses.replace(op, wide=changed[0].dtype == self.dtype and not self.is_narrow(y, self.asked))
            if op.wide and len(changed) > 2:  # a sum is of one type
                changed[2] = self.wide(b, inputs[2])
        return None if tuple(changed) == inputs == node.inputs else replaced(b, node, op, changed)

    def narrow_inputs(self, node: Node) -> int:
        """How many of the first inputs are narrow in the node's narrow form; 0 if it has none here."""
        if type(node.op) not in _NARROW or node in self.last:
            return 0
        added = node.op.accumulates and len(node.inputs) > 2 and node.inputs[2].type == node.outputs[0].type
        return _NARROW[type(node.op)] + bool(added)

    def is_narrow(self, value: Value, asked: set[Value]) -> bool:
        """Whether the result of a map, a reduction or a product is narrow."""
        return value.dtype == FLOAT32 and value in self.data and value in asked

    def map(self, b: Builder, node: Node, inputs: tuple[Value, ...]) -> list[Value] | None:
        """Computed in float32; each result narrow where it may be."""
        assert isinstance(node.op, Map)
        dtypes = [
            self.dtype if node not in self.last and self.is_narrow(value, self.asked) else value.dtype
            for value in node.outputs
        ]
        if inputs == node.inputs and dtypes == [value.dtype for value in node.outputs]:
            return None
        exprs = rounded(node.op.parsed, [value.dtype for value in inputs], dtypes)
        return replaced(b, node, Map(tuple(map(str, exprs))), inputs)

    def passing(self, b: Builder, node: Node, inputs: tuple[Value, ...]) -> list[Value] | None:
        if isinstance(node.op, Gather):
            inputs = (self.twins.get(inputs[0], inputs[0]), inputs[1])
        elif any(self.twins.get(x, x).dtype == self.dtype for x in inputs):
            inputs = tuple(self.narrow(b, x) if x.dtype == FLOAT32 else x for x in inputs)
        made = None if inputs == node.inputs else replaced(b, node, node.op, inputs)
        if node.op.is_view and len(inputs) == 1:
            self.views[(made or node.outputs)[0]] = (node.op, inputs[0])
        return made

    def narrow(self, b: Builder, x: Value) -> Value:
        """A value in the narrow type. A view is taken of the converted value; of a part of a value only the part is
        converted."""
        if x.dtype == self.dtype:
            return x
        if x in self.twins:
            return self.twins[x]
        if x in self.views and not isinstance(self.views[x][0], Slice):
            op, source = self.views[x]
            return b.apply(op, self.narrow(b, source), name=f"{x.name}/{self.dtype}")
        return self.cast(b, x, self.dtype)

    def wide(self, b: Builder, x: Value) -> Value:
        """A value in float32."""
        return x if x.dtype == FLOAT32 else self.cast(b, x, FLOAT32)

    def cast(self, b: Builder, x: Value, dtype: DType) -> Value:
        return elementwise(b, Arg(0), x, dtype=dtype, name=f"{x.name}/{dtype}")


def _turns(op: Map) -> bool:
    """Whether a map reads angles, of which rounding leaves little: it errs by a part of the angle, whole turns too."""
    parts = subexpressions(*op.parsed)
    return any(isinstance(part, Call) and part.function in ("sin", "cos", "tan") for part in parts)


def _last_nodes(graph: Graph) -> set[Node]:
    """Maps, sums, views and the like, and softmax, whose results go only into the loss or other results of a step."""
    found: set[Node] = set()
    for node in reversed(graph.nodes):
        if not isinstance(node.op, _ENDING) and not node.op.is_view:
            continue
        read = [reader for value in node.outputs for reader in graph.readers[value]]
        if all(reader in found for reader in read) and (read or not graph.returned.isdisjoint(node.outputs)):
            found.add(node)
    return found


def _reached(graph: Graph) -> set[Value]:
    """The values that depend on an input of the step."""
    found = set(graph.inputs)
    for node in graph.nodes:
        if not found.isdisjoint(node.inputs):
            found.update(node.outputs)
    return found
