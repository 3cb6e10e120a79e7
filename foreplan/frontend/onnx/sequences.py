"""Sequences of tensors that are known at import: lists that nodes make, change and read, of which nothing is left."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from foreplan.frontend.onnx.node import OnnxNode, Operand
from foreplan.frontend.onnx.tensors import Constant, from_array
from foreplan.graph import Value
from foreplan.ops.join import concat, split
from foreplan.ops.shape import reshape


@dataclass(frozen=True)
class Tensors:
    """A sequence: the tensors in it, in order."""

    items: tuple[Operand, ...]

    def replaced(self, now: Mapping[Value, Value]) -> Tensors:
        """With other values in the place of some."""
        return Tensors(tuple(now.get(item, item) if isinstance(item, Value) else item for item in self.items))


Given = Operand | Tensors | None


def _construct(n: OnnxNode, given: list[Given]) -> Tensors:
    return Tensors(tuple(_tensor(n, given, i) for i in range(len(given))))


def _empty(n: OnnxNode, given: list[Given]) -> Tensors:
    return Tensors(())


def _insert(n: OnnxNode, given: list[Given]) -> Tensors:
    """Before the tensor at a place; behind the last one where none is given."""
    items = list(_sequence(n, given).items)
    place = int(n.known_scalar(2)) if len(given) > 2 and given[2] is not None else len(items)
    if not -len(items) <= place <= len(items):
        raise n.fail(f"place {place} is outside of a sequence of {len(items)}")
    items.insert(place, _tensor(n, given, 1))
    return Tensors(tuple(items))


def _erase(n: OnnxNode, given: list[Given]) -> Tensors:
    items = list(_sequence(n, given).items)
    place = _place(n, given, 1, len(items)) if len(given) > 1 and given[1] is not None else len(items) - 1
    if not items:
        raise n.fail("it takes a tensor out of an empty sequence")
    return Tensors((*items[:place], *items[place + 1 :]))


def _at(n: OnnxNode, given: list[Given]) -> Operand:
    items = _sequence(n, given).items
    return items[_place(n, given, 1, len(items))]


def _length(n: OnnxNode, given: list[Given]) -> Operand:
    return from_array(n.output_names[0], np.array(len(_sequence(n, given).items), np.int64))


def _concat(n: OnnxNode, given: list[Given]) -> Operand:
    items = _sequence(n, given).items
    if not items:
        raise n.fail("it joins the tensors of an empty sequence")
    new_axis, rank = bool(n.integer("new_axis", 0)), len(items[0].type.shape)
    axis = n.axis(n.integer("axis"), rank + new_axis)
    known = [item.array for item in items if isinstance(item, Constant) and item.is_foldable]
    if len(known) == len(items):
        arrays = [array for array in known if array is not None]
        return from_array(n.output_names[0], np.stack(arrays, axis) if new_axis else np.concatenate(arrays, axis))
    values = [n.as_value(item) for item in items]
    if new_axis:
        values = [reshape(n.b, value, (*value.shape[:axis], 1, *value.shape[axis:])) for value in values]
    return concat(n.b, values, axis)


def _split(n: OnnxNode, given: list[Given]) -> Tensors:
    """Parts of given sizes, of one size but for the last, or of size 1."""
    shape = n.shape(0)
    axis = n.axis(n.integer("axis", 0), len(shape))
    extent, keep = shape[axis], True
    if not n.has(1):
        sizes, keep = [1] * extent, bool(n.integer("keepdims", 1))
    elif n.shape(1):
        sizes = n.known_ints(1)
    else:
        size = int(n.known_scalar(1))
        if size < 1:
            raise n.fail(f"it splits into parts of size {size}")
        sizes = [min(size, extent - start) for start in range(0, extent, size)]
    if n.batch is not None and n.has(1) and n.batch.carries(n, 0, axis):
        raise n.batch.fixed(n, f"it splits the batch into {sizes}")
    if sum(sizes) != extent or any(size < 0 for size in sizes):
        raise n.misshapen(f"{sizes} do not add up to axis {axis} of {n.type(0)}")
    operand = n.operand(0)
    if isinstance(operand, Constant) and operand.is_foldable:
        assert operand.array is not None
        parts = np.split(operand.array, np.cumsum(sizes)[:-1], axis) if sizes else []
        arrays = [part if keep else part.squeeze(axis) for part in parts]
        return Tensors(tuple(from_array(f"{n.output_names[0]}.{i}", array) for i, array in enumerate(arrays)))
    values = split(n.b, n.value(0), sizes, axis)
    if not keep:
        values = [reshape(n.b, value, (*shape[:axis], *shape[axis + 1 :])) for value in values]
    return Tensors(tuple(values))


def _has_element(n: OnnxNode, given: list[Given]) -> Operand:
    """Whether anything is given: what is optional is so in the file, and known at import."""
    return from_array(n.output_names[0], np.array(any(each is not None for each in given)))


def _element(n: OnnxNode, given: list[Given]) -> Operand | Tensors:
    if not given or given[0] is None:
        raise n.fail("it takes an element out of nothing")
    return given[0]


def _sequence(n: OnnxNode, given: list[Given]) -> Tensors:
    first = given[0] if given else None
    if not isinstance(first, Tensors):
        raise n.fail("its input 0 must be a sequence, and is a tensor")
    return first


def _tensor(n: OnnxNode, given: list[Given], index: int) -> Operand:
    found = given[index] if index < len(given) else None
    if found is None or isinstance(found, Tensors):
        raise n.fail(f"its input {index} must be a tensor, and is {'missing' if found is None else 'a sequence'}")
    return found


def _place(n: OnnxNode, given: list[Given], index: int, length: int) -> int:
    """A known place in a sequence, counted from 0; a negative one counts from the end."""
    place = int(n.known_scalar(index))
    if not -length <= place < length:
        raise n.fail(f"place {place} is outside of a sequence of {length}")
    return place % length


SEQUENCES: dict[str, Callable[[OnnxNode, list[Given]], Operand | Tensors]] = {
    "SequenceConstruct": _construct,
    "SequenceEmpty": _empty,
    "SequenceInsert": _insert,
    "SequenceErase": _erase,
    "SequenceAt": _at,
    "SequenceLength": _length,
    "ConcatFromSequence": _concat,
    "SplitToSequence": _split,
    "OptionalHasElement": _has_element,
    "OptionalGetElement": _element,
}


def translate_sequence(n: OnnxNode, given: list[Given]) -> Operand | Tensors | None:
    """What a node gives that makes or reads a sequence; None: it does neither.

    Args:
        n: the node; its inputs that are sequences look as if they were left out.
        given: its inputs, sequences among them.
    """
    if n.op_type in SEQUENCES:
        return SEQUENCES[n.op_type](n, given)
    if n.op_type == "Identity" and any(isinstance(each, Tensors) for each in given):
        return _sequence(n, given)
    return None
