"""Narrow arithmetic with wide master weights: which values of a training step or a forward pass are narrow.

Parameters, statistics, optimizer state and everything a user gives or gets stay float32; images, hidden states and
their gradients are of a narrow type, so that they take half the bytes, and contractions read parameters through a
conversion (Micikevicius et al., 2018, arXiv:1710.03740; in bfloat16 Kalamkar et al., 2019, arXiv:1905.12322).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from foreplan.base.arguments import choice
from foreplan.graph import Builder, DType, Graph, Node, Op, Value
from foreplan.graph.types import DTYPES, FLOAT32
from foreplan.ops.expr import Arg, Call, subexpressions
from foreplan.ops.map import Map, elementwise, rounded
from foreplan.passes.base import Pass
from foreplan.passes.rewrite import replaced, rewrite

PRECISIONS: Mapping[str, DType] = {"float32": FLOAT32, "bf16": DTYPES["bfloat16"], "fp16": DTYPES["float16"]}


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
            passes = not _turns(node.op) if isinstance(node.op, Map) else node.op.keeps_precision
            if passes and not asked.isdisjoint(node.outputs):
                asked.update(node.inputs)
            computes = isinstance(node.op, Map) or node.op.wide_form is not None
            if passes and not computes and not read.isdisjoint(node.outputs):
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
        if isinstance(node.op, Map):
            return self.map(b, node, tuple(self.twins.get(x, x) for x in inputs))
        if node.op.keeps_precision:
            return self.passing(b, node, inputs)
        count = self.narrow_inputs(node)
        changed = [
            (self.narrow if i < count else self.wide)(b, x) if old.dtype == FLOAT32 else x
            for i, (old, x) in enumerate(zip(node.inputs, inputs))
        ]
        op, base = self.summing(node, changed, self.asked), node.op.accumulates
        if op == op.wide_form and 0 < base < len(changed):  # a sum is of one type
            changed[base] = self.wide(b, inputs[base])
        return None if tuple(changed) == inputs == node.inputs else replaced(b, node, op, changed)

    def summing(self, node: Node, inputs: Sequence[Value], asked: set[Value]) -> Op:
        """The node's op for these inputs: in its wide form, if its result is a sum that nothing asks for narrow."""
        y, wide = node.outputs[0], node.op.wide_form
        if wide is None or y.dtype != FLOAT32 or self.is_narrow(y, asked):
            return node.op
        return wide if node.op.wide_sum([value.type for value in inputs]) == 0 else node.op

    def narrow_inputs(self, node: Node) -> int:
        """How many of the first inputs are narrow in the node's narrow form; 0 if it has none here."""
        if not node.op.narrow or node in self.last:
            return 0
        base = node.op.accumulates
        return node.op.narrow + (0 < base < len(node.inputs) and node.inputs[base].type == node.outputs[0].type)

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
        if any(self.twins.get(x, x).dtype == self.dtype for x in inputs):
            inputs = tuple(self.narrow(b, x) if x.dtype == FLOAT32 else x for x in inputs)
        op = self.summing(node, inputs, self.read_narrow)
        made = None if inputs == node.inputs else replaced(b, node, op, inputs)
        if node.op.is_view and len(inputs) == 1:
            self.views[(made or node.outputs)[0]] = (node.op, inputs[0])
        return made

    def narrow(self, b: Builder, x: Value) -> Value:
        """A value in the narrow type. A view is taken of the converted value; of a part of a value only the part is
        converted.
        """
        if x.dtype == self.dtype:
            return x
        if x in self.twins:
            return self.twins[x]
        op, source = self.views.get(x, (None, x))
        if op is not None and x.type.size >= source.type.size:
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
    """Nodes that are float32 at the end of a model, whose results go only into the loss or other results of a step."""
    found: set[Node] = set()
    for node in reversed(graph.nodes):
        if node.op.narrow and not node.op.wide_at_end:
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
