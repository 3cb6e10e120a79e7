"""One bit an element of activations of which the backward pass asks a yes-or-no question."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from foreplan.graph import Builder, Graph, Node, Value
from foreplan.graph.types import BOOL
from foreplan.graph.value import Kind
from foreplan.ops.bits import MaskedMap, PackBits
from foreplan.ops.expr import Arg, Call, Const, Expr, infer_dtypes, subexpressions, substitute, used_args
from foreplan.ops.map import Map
from foreplan.passes.base import Pass
from foreplan.passes.rewrite import rewrite

MASKED_BYTES = 1 << 16  # smaller activations are not worth the mask's own action


@dataclass(frozen=True)
class PackMasks(Pass, requires=("plain ops",), ensures=("plain ops", "live"), optional=True):
    """Ask yes-or-no questions of an activation early, and keep the answers, one bit an element.

    ReLU's derivative asks whether its output is above zero. Where no other gradient reads that output (a pooling with
    saved indices follows, or a concatenation that copies it), the forward pass asks, and the answer is kept in the
    output's place, a 32nd of the bytes. Where a weight gradient reads it too, the backward pass asks before that, so
    that the output is dead, and its bytes free, when its own gradient is made.

    Requires: a whole training step. Ensures: the same results, bit for bit; activations below `MASKED_BYTES` stay.
    """

    def _run(self, graph: Graph) -> Graph:
        conditions = {value: found for value in graph.producer if (found := _condition(graph, value)) is not None}
        if not conditions:
            return graph
        kept = {value for value in conditions if not _has_other_gradients(graph, value)}
        masks: dict[Value, Value] = {}

        def pack(b: Builder, value: Value) -> None:
            masks[value] = b.apply(PackBits(str(conditions[value])), value, name=f"{value.name}/mask")

        def replace(b: Builder, node: Node, inputs: tuple[Value, ...]) -> Sequence[Value] | None:
            read = [value for value in dict.fromkeys(node.inputs) if value in conditions] if _is_gradient(node) else []
            for value in read:
                if value not in masks:
                    pack(b, value)
            for value in read:
                if map := _asking(node, value):
                    return _masked(b, map, inputs, map.inputs.index(value), masks[value], conditions[value])
            made = [value for value in node.outputs if value in kept]
            if not made:
                return None
            b.append(Node(node.op, inputs, node.outputs, node.name, node.source))
            for value in made:
                pack(b, value)
            return node.outputs

        return rewrite(graph, replace)


pack_masks = PackMasks()


def _is_gradient(node: Node) -> bool:
    return node.outputs[0].kind is Kind.GRADIENT


def _asking(node: Node, value: Value) -> Node[Map] | None:
    """The node, if it is a backward map that only asks yes-or-no questions of a value."""
    map = node.of(Map) if _is_gradient(node) and node.inputs.count(value) == 1 else None
    fits = map and map.outputs[0].shape == value.shape and _questions(map, map.inputs.index(value)) is not None
    return map if fits else None


def _condition(graph: Graph, value: Value) -> Expr | None:
    """The one question that the backward pass asks of an activation, over a0; None if there is none."""
    if value.kind is not Kind.ACTIVATION or value.type.nbytes < MASKED_BYTES or value.type.size % 8:
        return None
    if value in graph.returned:
        return None
    found: set[Expr] = set()
    for node in graph.readers[value]:
        if map := _asking(node, value):
            found |= _questions(map, map.inputs.index(value)) or set()
    return found.pop() if len(found) == 1 else None


def _has_other_gradients(graph: Graph, value: Value) -> bool:
    """Whether a backward node reads a value, itself or through views, for more than yes-or-no questions."""
    return any(
        _has_other_gradients(graph, node.outputs[0]) if node.op.is_view else _is_gradient(node)
        for node in graph.readers[value]
        if not _asking(node, value)
    )


def _questions(node: Node[Map], index: int) -> set[Expr] | None:
    """The boolean parts of a map's expressions that read input `index` alone, over a0; None if it is read otherwise."""
    types = infer_dtypes([value.dtype for value in node.inputs], *node.op.parsed)
    found: set[Expr] = set()
    seen: set[Expr] = set()
    left = list(node.op.parsed)
    while left:
        expr = left.pop()
        if expr == Arg(index):
            return None
        if expr in seen or not isinstance(expr, Call):
            continue
        seen.add(expr)
        if types[expr] == BOOL and used_args(expr) == (index,):
            found.add(substitute(expr, [Arg(0)] * len(node.inputs)))
        else:
            left += expr.args
    return found


def _masked(
    b: Builder, node: Node[Map], inputs: tuple[Value, ...], index: int, mask: Value, condition: Expr
) -> Sequence[Value]:
    """The map with the mask as its first input and the activation gone."""
    others = [i for i in range(len(inputs)) if i != index]
    places = {old: Arg(new) for new, old in enumerate(others, 1)}
    answers: dict[Expr, Expr] = {substitute(condition, [Arg(index)]): Arg(0)}
    for part in subexpressions(*node.op.parsed):  # parts stand before what they are part of
        if isinstance(part, Arg) and part.index in places:
            answers[part] = places[part.index]
        elif isinstance(part, Call) and part not in answers and all(arg in answers for arg in part.args):
            answers[part] = Call(part.function, tuple(answers[arg] for arg in part.args))
        elif isinstance(part, Const):
            answers[part] = part
    exprs = tuple(str(answers[expr]) for expr in node.op.parsed)
    return b.node(MaskedMap(exprs), mask, *(inputs[i] for i in others), name=f"{node.name}/masked")
