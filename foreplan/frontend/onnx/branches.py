"""Branches on a condition that is computed from data: both are computed, and one is selected.

What a branch reads from outside, or holds itself, gets a gradient only where the branch is taken. The gradient is
selected, not multiplied by zero: a NaN or an infinity within the branch that is not taken stays there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import numpy as np

from foreplan.base.errors import ShapeError, UnsupportedError, ValueNeededError
from foreplan.frontend.onnx.builder import sources_of
from foreplan.frontend.onnx.node import OnnxNode, Operand, binding
from foreplan.frontend.onnx.sequences import Tensors
from foreplan.frontend.onnx.tensors import Constant
from foreplan.graph import Builder, Kind, Value
from foreplan.graph.types import DType
from foreplan.ops.expr import call, where
from foreplan.ops.map import elementwise
from foreplan.ops.marks import StraightThrough
from foreplan.ops.norm.batch import BatchNorm
from foreplan.ops.shape import reshape

State = Operand | Tensors
# (the attribute of a branch, the name in front of its own, whether it is taken) → its outputs
Branch = Callable[[str, str, Value], list[State]]


class Guards:
    """Tensors as branches read them: as they are, with a gradient only where the branch is taken."""

    def __init__(self) -> None:
        self._made: dict[tuple[Value, Value], Value] = {}
        self._conditions: dict[str, Value] = {}
        self._renamed: dict[Value, Value] = {}  # what is held here → itself, or what has taken its place

    def read(self, b: Builder, found: State, taken: Value) -> State:
        """A tensor that nodes within a branch read.

        Args:
            b: where nodes are added.
            found: made outside of the branch, or stored. A constant is guarded when it is stored.
            taken: whether the branch is taken, one truth value.
        """
        if isinstance(found, Tensors):
            return Tensors(tuple(self.value(b, x, taken) if isinstance(x, Value) else x for x in found.items))
        return self.value(b, found, taken) if isinstance(found, Value) else found

    def value(self, b: Builder, found: Value, taken: Value) -> Value:
        """As `read`, of one value."""
        if not _has_gradient(found.type.dtype) or found.kind is Kind.BUFFER:
            return found
        if (found, taken) not in self._made:
            through = elementwise(b, lambda c, x: where(c, x, 0.0), taken, found)
            self._made[found, taken] = self._held(b.apply(StraightThrough(), found, through))
        return self._now(self._made[found, taken])

    def chosen_by(self, node: str, condition: Value) -> None:
        """Note for people that a node computes both of its branches."""
        self._conditions[node] = self._held(condition)

    def rename(self, now: Mapping[Value, Value]) -> None:
        """Follow values that have got other names."""
        for old in now.keys() & self._renamed.keys():
            self._renamed[old] = self._held(now[old])

    def _held(self, value: Value) -> Value:
        self._renamed[value] = value
        return value

    def _now(self, value: Value) -> Value:
        while self._renamed[value] is not value:
            value = self._renamed[value]
        return value

    def notes(self, b: Builder) -> list[str]:
        """The note that nodes compute both branches."""
        if not self._conditions:
            return []
        inputs = sources_of(b, *map(self._now, self._conditions.values()))
        less = f"; with {binding(inputs)} one is chosen once" if _may_be_bound(inputs) else ""
        first, *others = self._conditions
        more = f" (and of {len(others)} more)" if others else ""
        keep = any(isinstance(node.op, BatchNorm) and node.op.frozen for node in b.nodes)
        kept = "; batch normalisation in them keeps its running statistics in training, and uses them" if keep else ""
        return [f"{first}{more}: its condition is computed from data, so each step computes both branches{less}{kept}"]


def _has_gradient(dtype: DType) -> bool:
    return dtype.is_float and not dtype.is_storage


def kept_where(b: Builder, taken: Value | None, updates: Mapping[Value, Value]) -> dict[Value, Value]:
    """What nodes within a branch change, which changes only where it is taken."""
    if taken is None:
        return dict(updates)
    return {old: elementwise(b, where, taken, new, old) for old, new in updates.items()}


def select(n: OnnxNode, name: str, walk: Branch) -> list[State]:
    """The outputs of an If, whose branches give tensors of the same types.

    Args:
        n: the node.
        name: of the node, in front of those in its branches.
        walk: adds the nodes of a branch.

    Raises:
        ValueNeededError: one branch cannot be computed, or they give tensors of other shapes or types.
    """
    holds = truth(n, n.operand(0), "its condition")
    otherwise = elementwise(n.b, partial(call, "not"), holds)
    taken = (both(n.b, holds, n.taken), both(n.b, otherwise, n.taken))
    results = []
    for branch, each in zip(("then", "else"), taken):
        try:
            results.append(walk(f"{branch}_branch", f"{name}/{branch}/", each))
        except (ShapeError, UnsupportedError) as error:
            raise _refused(n, f"cannot: {error}") from None
    if len(results[0]) != len(results[1]):
        raise n.fail(f"its branches must give as many tensors, and give {len(results[0])} and {len(results[1])}")
    n.both = holds
    return [_selected(n, holds, i, *pair) for i, pair in enumerate(zip(*results))]


def truth(n: OnnxNode, condition: Operand, what: str) -> Value:
    """A condition of data, as one truth value without axes."""
    if condition.type.size != 1 or condition.type.dtype.name != "bool":
        raise n.misshapen(f"{what} must be one truth value, and is {condition.type}")
    return reshape(n.b, n.as_value(condition), ())


def both(b: Builder, one: Value, other: Value | None) -> Value:
    """Whether both hold; None always does."""
    return one if other is None else elementwise(b, partial(call, "and"), one, other)


def kept(n: OnnxNode, going: Value, new: State, old: State) -> State:
    """What a loop carries behind a step: the new, unless the loop has ended before.

    Raises:
        UnsupportedError: they have other types or shapes, or are sequences.
    """
    if isinstance(new, Tensors) or isinstance(old, Tensors) or new.type != old.type:
        raise n.unsupported(
            "data end it, and what it carries changes its type or shape, or is a sequence; give it an end"
        )
    return elementwise(n.b, where, going, n.as_value(new), n.as_value(old))


def _selected(n: OnnxNode, holds: Value, index: int, one: State, other: State) -> State:
    if isinstance(one, Tensors) and isinstance(other, Tensors) and len(one.items) == len(other.items):
        return Tensors(tuple(_of_two(n, holds, index, *pair) for pair in zip(one.items, other.items)))
    if isinstance(one, Tensors) or isinstance(other, Tensors):
        raise _refused(n, f"must give sequences of one length as output {index}, and do not")
    return _of_two(n, holds, index, one, other)


def _of_two(n: OnnxNode, holds: Value, index: int, one: Operand, other: Operand) -> Operand:
    if one.type != other.type:
        raise _refused(n, f"give {one.type} and {other.type} as output {index}, where a plan needs one type and shape")
    if all(isinstance(each, Constant) and each.is_foldable for each in (one, other)):
        arrays = [np.asarray(each.array) for each in (one, other) if isinstance(each, Constant)]
        if arrays[0].tobytes() == arrays[1].tobytes():
            return one
    return elementwise(n.b, where, holds, n.as_value(one), n.as_value(other))


def _refused(n: OnnxNode, reason: str) -> ValueNeededError:
    """The error for branches that are not both computed: with the inputs whose values choose one."""
    whence, inputs = n.whence(n.operand(0))
    remedy = "write the branch that is meant in the place of the node, or branches that give tensors of one shape"
    if _may_be_bound(inputs):
        remedy = f"where the input is the same in every step, give it with {binding(inputs)}; else {remedy}"
    message = f"{n.where}: its condition {whence}, so both branches are computed and one is selected, but they {reason}"
    return ValueNeededError(f"{message}; {remedy}", tuple(value.name for value in inputs))


def _may_be_bound(inputs: Sequence[Value]) -> bool:
    """Whether inputs look like settings: all are integers, truth values or single numbers."""
    return bool(inputs) and all(value.type.size == 1 or not value.dtype.is_float for value in inputs)
