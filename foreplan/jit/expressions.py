"""Expressions of Python as instructions."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Sequence
from typing import Any

import llvmlite.ir as ir
import numpy as np

from foreplan.jit.builder import BIT, I8, I64, POINTER
from foreplan.jit.source import MISSING
from foreplan.jit.types import BOOL, INT64, ArrayType, NoneType, TupleType, Type, word_count
from foreplan.jit.values import (
    Array,
    Fixed,
    Instructions,
    Number,
    Record,
    Tuple,
    Untranslatable,
    Value,
    as_index,
    common,
    constant,
    memory,
    register,
)

_OPERATORS: dict[type, str] = {
    ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/", ast.FloorDiv: "//", ast.Mod: "%", ast.BitAnd: "&",
    ast.BitOr: "|", ast.BitXor: "^", ast.LShift: "<<", ast.RShift: ">>", ast.Eq: "==", ast.NotEq: "!=", ast.Lt: "<",
    ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">=", ast.Is: "is", ast.IsNot: "is not",
}  # fmt: skip
_UNARY: dict[type, Callable[[Any], Any]] = {
    ast.Not: operator.not_, ast.USub: operator.neg, ast.UAdd: operator.pos, ast.Invert: operator.invert,
}  # fmt: skip


class Expressions(Instructions):
    """Translates expressions; a translation of a function says what its names and calls stand for."""

    def variable(self, name: str) -> Value | None:
        """The value of a local variable; None if there is none of this name."""
        raise NotImplementedError

    def variable_type(self, name: str) -> Type | None:
        """The type of a local variable; None if there is none of this name."""
        raise NotImplementedError

    def outer(self, name: str) -> Any:
        """What a name stands for outside the function, or MISSING."""
        raise NotImplementedError

    def called(self, function: Any, arguments: Sequence[Value], named: dict[str, Value]) -> Value:
        """The result of a call."""
        raise NotImplementedError

    def value(self, node: ast.expr) -> Value:
        """What an expression gives."""
        known = self.known(node)
        if known is not MISSING:
            return Fixed(known)
        translate: Callable[[Any], Value] | None = getattr(self, f"_{type(node).__name__.lower()}", None)
        if translate is None:
            raise Untranslatable(f"an expression of the kind {type(node).__name__}")
        return translate(node)

    def known(self, node: ast.expr) -> Any:
        """What an expression gives, where that is known when the function is compiled; else MISSING."""
        if isinstance(node, ast.Constant):
            return node.value
        if isinstance(node, ast.Name):
            local = self.variable_type(node.id)
            return self.outer(node.id) if local is None else (None if local == NoneType() else MISSING)
        if isinstance(node, ast.Attribute):
            return self._known_attribute(node)
        if isinstance(node, ast.Tuple):
            items = [self.known(each) for each in node.elts]
            return MISSING if any(item is MISSING for item in items) else tuple(items)
        if isinstance(node, ast.UnaryOp):
            found = self.known(node.operand)
            return found if found is MISSING else _UNARY[type(node.op)](found)
        if isinstance(node, ast.BinOp):
            left, right = self.known(node.left), self.known(node.right)
            return MISSING if left is MISSING or right is MISSING else self._folded(node.op, left, right)
        if isinstance(node, ast.BoolOp):
            return self._known_either(node)
        if isinstance(node, ast.Compare) and len(node.ops) == 1:
            left, right = self.known(node.left), self.known(node.comparators[0])
            if isinstance(node.ops[0], ast.Is | ast.IsNot):
                if left is MISSING:  # what is no constant is not None
                    return isinstance(node.ops[0], ast.IsNot)
                return (left is right) == isinstance(node.ops[0], ast.Is)
            if left is not MISSING and right is not MISSING:
                return self._folded(node.ops[0], left, right)
        return MISSING

    def _folded(self, op: ast.AST, left: Any, right: Any) -> Any:
        return self.binary(_OPERATORS[type(op)], Fixed(left), Fixed(right)).value  # type: ignore[union-attr]

    def _known_attribute(self, node: ast.Attribute) -> Any:
        outside = self.known(node.value)
        if outside is not MISSING:
            return getattr(outside, node.attr)
        type = self.type_at(node.value)
        if node.attr == "dtype":
            found = self.value(node.value) if type is None else type
            return found.dtype if isinstance(found, ArrayType | Number) else MISSING
        if isinstance(type, TupleType) and type.items[_place(type, node.attr)] == NoneType():
            return None
        return MISSING

    def type_at(self, node: ast.expr) -> Type | None:
        """The type of a local variable, or of a field of one; None of any other expression."""
        if isinstance(node, ast.Name):
            return self.variable_type(node.id)
        if isinstance(node, ast.Attribute) and isinstance(type := self.type_at(node.value), TupleType) and type.names:
            return type.items[_place(type, node.attr)]
        return None

    def _known_either(self, node: ast.BoolOp) -> Any:
        """True and False decide, whatever else there is."""
        decides = isinstance(node.op, ast.Or)
        found = [self.known(each) for each in node.values]
        if found[0] is not MISSING and bool(found[0]) == decides:
            return decides
        return MISSING if any(each is MISSING for each in found) else found[-1]

    # Numbers

    def _binop(self, node: ast.BinOp) -> Value:
        return self.binary(_OPERATORS[type(node.op)], self.value(node.left), self.value(node.right))

    def _unaryop(self, node: ast.UnaryOp) -> Value:
        if isinstance(node.op, ast.Not):
            return Number(BOOL, self.b.not_(self.truth(self.value(node.operand))))
        operand = self.value(node.operand)
        if isinstance(node.op, ast.UAdd):
            return operand
        return self.negated(operand) if isinstance(node.op, ast.USub) else self.inverted(operand)

    def _compare(self, node: ast.Compare) -> Value:
        if len(node.ops) == 1:
            return self.binary(_OPERATORS[type(node.ops[0])], self.value(node.left), self.value(node.comparators[0]))
        return self._as_bit(node)

    def _boolop(self, node: ast.BoolOp) -> Value:
        return self._as_bit(node)

    def _as_bit(self, node: ast.expr) -> Value:
        """A condition as a number: 1 where it holds, else 0."""
        yes, no, after = (self.b.function.append_basic_block() for _ in range(3))
        self.branch(node, yes, no)
        for block in (yes, no):
            self.b.position_at_end(block)
            self.b.branch(after)
        self.b.position_at_end(after)
        found = self.b.phi(BIT)
        found.add_incoming(ir.Constant(BIT, 1), yes)
        found.add_incoming(ir.Constant(BIT, 0), no)
        return Number(BOOL, found)

    def branch(self, node: ast.expr, yes: ir.Block, no: ir.Block) -> None:
        """Go on at one block if a condition holds, and at another if not. Of `and`, `or` and `a < b < c` no more is
        computed than what decides.
        """
        if isinstance(node, ast.BoolOp):
            for each in node.values[:-1]:
                following = self.b.function.append_basic_block()
                self.branch(each, *((following, no) if isinstance(node.op, ast.And) else (yes, following)))
                self.b.position_at_end(following)
            self.branch(node.values[-1], yes, no)
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            self.branch(node.operand, no, yes)
        elif isinstance(node, ast.Compare) and len(node.ops) > 1:
            left = self.value(node.left)
            for op, each in zip(node.ops[:-1], node.comparators):
                right, following = self.value(each), self.b.function.append_basic_block()
                self.b.cbranch(self.truth(self.binary(_OPERATORS[type(op)], left, right)), following, no)
                self.b.position_at_end(following)
                left = right
            last = self.binary(_OPERATORS[type(node.ops[-1])], left, self.value(node.comparators[-1]))
            self.b.cbranch(self.truth(last), yes, no)
        else:
            self.b.cbranch(self.truth(self.value(node)), yes, no)

    def _ifexp(self, node: ast.IfExp) -> Value:
        known = self.known(node.test)
        if known is not MISSING:
            return self.value(node.body if known else node.orelse)
        blocks = [self.b.function.append_basic_block() for _ in range(2)]
        after = self.b.function.append_basic_block()
        self.branch(node.test, *blocks)
        values, ends = [], []
        for block, each in zip(blocks, (node.body, node.orelse)):
            self.b.position_at_end(block)
            value = self.value(each)
            values.append(value.items if isinstance(value, Tuple) else (value,))
            ends.append(self.b.block)
        if len(values[0]) != len(values[1]):
            raise Untranslatable("tuples of different lengths")
        dtypes = [common(pair) for pair in zip(*values)]
        found = []
        for end, items in zip(ends, values):
            self.b.position_at_end(end)
            found.append([self.number(item, dtype).value for item, dtype in zip(items, dtypes)])
            self.b.branch(after)
        self.b.position_at_end(after)
        chosen = []
        for dtype, pair in zip(dtypes, zip(*found)):
            phi = self.b.phi(register(dtype))
            for end, value in zip(ends, pair):
                phi.add_incoming(value, end)
            chosen.append(Number(dtype, phi))
        return Tuple(tuple(chosen)) if isinstance(node.body, ast.Tuple) else chosen[0]

    # Tuples, records and arrays

    def _tuple(self, node: ast.Tuple) -> Value:
        return Tuple(tuple(self.value(each) for each in node.elts))

    def _name(self, node: ast.Name) -> Value:
        found = self.variable(node.id)
        if found is None:
            raise Untranslatable(f"{node.id} is not known")
        return found

    def _attribute(self, node: ast.Attribute) -> Value:
        base = self.value(node.value)
        if isinstance(base, Record):
            return self.field(base, _place(base.type, node.attr))
        if isinstance(base, Array):
            if node.attr == "size":
                return Number(INT64, self.size(base))
            if node.attr == "shape":
                return Tuple(tuple(Number(INT64, extent) for extent in base.shape))
            if node.attr == "ndim":
                return Fixed(base.type.ndim)
        raise Untranslatable(f"the attribute {node.attr}")

    def field(self, record: Record, place: int) -> Value:
        """A field of a record, read from its table, which stays as it is while compiled code runs."""
        at = sum(map(word_count, record.type.items[:place]))
        return self.read(record.type.items[place], record.address, at)

    def read(self, type: Any, table: ir.Value, at: int) -> Value:
        """A value in a table, from its first number on."""

        def word(index: int, kind: ir.Type = I64) -> ir.Value:
            place = self.b.gep(table, [at + index], source_etype=I64)
            found = self.b.load(place, typ=kind)
            found.set_metadata("invariant.load", self.b.module.add_metadata([]))
            return found

        if isinstance(type, NoneType):
            return Fixed(None)
        if isinstance(type, TupleType):
            if type.names:
                return Record(type, self.b.gep(table, [at], source_etype=I64))
            items = []
            for item in type.items:
                items.append(self.read(item, table, at))
                at += word_count(item)
            return Tuple(tuple(items))
        if not isinstance(type, ArrayType):
            return self.from_word(word(0), type)
        shape = tuple(word(1 + i) for i in range(type.ndim))
        strides = () if type.dense else tuple(word(1 + type.ndim + i) for i in range(type.ndim))
        return Array(type, word(0, POINTER), shape, strides)

    def size(self, array: Array) -> ir.Value:
        """How many elements an array has."""
        size = array.shape[0]
        for extent in array.shape[1:]:
            size = self.b.mul(size, extent)
        return size

    def _subscript(self, node: ast.Subscript) -> Value:
        base = self.value(node.value)
        if isinstance(base, Array):
            part = self.part(base, node.slice)
            return self.load(part) if isinstance(part, Place) else part
        at = self.value(node.slice)
        if isinstance(base, Fixed):
            return self._of_constants(base.value, at)
        if isinstance(base, Number) or not isinstance(at, Fixed):
            raise Untranslatable("an item of what has none, or a field by a number that is not known")
        return base.items[at.value] if isinstance(base, Tuple) else self.field(base, at.value)

    def _of_constants(self, numbers: Any, at: Value) -> Value:
        """A number of a tuple of constants, by its index."""
        if isinstance(at, Fixed):
            return Fixed(numbers[at.value])
        dtype = common([Fixed(number) for number in numbers])
        type = ir.ArrayType(memory(dtype), len(numbers))
        table = ir.GlobalVariable(self.b.module, type, self.b.module.get_unique_name("numbers"))
        table.global_constant, table.linkage = True, "internal"
        table.initializer = ir.Constant(type, [constant(number, dtype) for number in numbers])
        place = self.b.gep(table, [0, as_index(self, at)])
        return Number(dtype, self.b.load(place))

    def part(self, array: Array, index: ast.expr) -> Place | Array:
        """The place of an element, or a view."""
        entries = index.elts if isinstance(index, ast.Tuple) else [index]
        data, dense, steps = array.data, array.type.dense, self.strides(array)
        shape: list[ir.Value] = []
        strides: list[ir.Value] = []
        for axis, entry in enumerate(entries):
            dense = dense and not shape
            if isinstance(entry, ast.Slice):
                at, high = self.bounds(entry, array.shape[axis])
                shape.append(self.b.sub(high, at))
                strides.append(steps[axis])
            else:
                at = as_index(self, self.value(entry))
                self.check(at, array.shape[axis])
            if array.type.dense and axis == array.type.ndim - 1:
                data = self.b.gep(data, [at], inbounds=True, source_etype=memory(array.type.dtype))
            else:
                data = self.b.behind(data, self.b.mul(at, steps[axis]), inbounds=True)
        rest = range(len(entries), array.type.ndim)
        shape += [array.shape[axis] for axis in rest]
        strides += [steps[axis] for axis in rest]
        if not shape:
            return Place(array.type.dtype, data)
        type = ArrayType(array.type.dtype, len(shape), dense)
        return Array(type, data, tuple(shape), () if dense else tuple(strides), array.own)

    def strides(self, array: Array) -> Sequence[ir.Value]:
        """The bytes from an element to the next one, along each axis."""
        if not array.type.dense:
            return array.strides
        strides = [ir.Constant(I64, array.type.dtype.itemsize)]
        for extent in reversed(array.shape[1:]):
            strides.insert(0, self.b.mul(strides[0], extent))
        return strides

    def bounds(self, slice: ast.Slice, extent: ir.Value) -> tuple[ir.Value, ir.Value]:
        """Where a slice begins and ends, within an axis; neither may be negative."""
        if slice.step is not None:
            raise Untranslatable("a slice with a step")
        low, high = ir.Constant(I64, 0), extent
        if slice.upper:
            high = self.b.least(as_index(self, self.value(slice.upper)), extent)
        if slice.lower:
            low = self.b.least(as_index(self, self.value(slice.lower)), extent)
        return low, self.b.select(self.b.icmp_signed("<", high, low), low, high)

    def check(self, at: ir.Value, extent: ir.Value) -> None:
        """End the function with an error if an index is not within an axis; only where indices are checked."""
        raise NotImplementedError

    def load(self, place: Place) -> Number:
        """The element at a place."""
        found = self.b.load(place.address, typ=memory(place.dtype))
        return Number(place.dtype, self.b.trunc(found, BIT) if place.dtype == BOOL else found)

    def store(self, place: Place, value: Value) -> None:
        """Write a number to a place."""
        x = self.number(value, place.dtype).value
        self.b.store(self.b.zext(x, I8) if place.dtype == BOOL else x, place.address)

    def _call(self, node: ast.Call) -> Value:
        if any(isinstance(each, ast.Starred) for each in node.args):
            raise Untranslatable("a call with *")
        arguments = [self.value(each) for each in node.args]
        named = {str(each.arg): self.value(each.value) for each in node.keywords}
        function = self.known(node.func)
        if function is not MISSING:
            return self.called(function, arguments, named)
        if isinstance(node.func, ast.Attribute):
            return self.called(node.func.attr, [self.value(node.func.value), *arguments], named)
        raise Untranslatable("a call of what is not known")


def operator_of(node: ast.operator) -> str:
    """An operator as it is written."""
    return _OPERATORS[type(node)]


class Place:
    """The address of an element."""

    def __init__(self, dtype: np.dtype[Any], address: ir.Value) -> None:
        self.dtype, self.address = dtype, address


def _place(type: TupleType, name: str) -> int:
    if name not in type.names:
        raise Untranslatable(f"a field {name}: there are {', '.join(type.names)}")
    return type.names.index(name)
