"""A function in Python as a function of LLVM's intermediate representation, for arguments of some types.

A variable keeps the type of what it is given first. Arrays that a function makes end with it; made again at the same
place, the earlier one ends there.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import llvmlite.ir as ir

from foreplan.jit.builder import I32, I64, Builder
from foreplan.jit.calls import Calls, Made
from foreplan.jit.expressions import Place, operator_of
from foreplan.jit.source import MISSING, Source, makes_arrays, tree_of
from foreplan.jit.types import INT64, Type
from foreplan.jit.values import (
    Array,
    Fixed,
    Number,
    Tuple,
    Untranslatable,
    Value,
    memory,
    parts_of,
    put_together,
    type_of_value,
)


@dataclass
class Variable:
    """A local variable: its type, and the memory of its parts."""

    type: Type
    cells: list[ir.Value]
    own: bool


@dataclass
class Module:
    """A module, and the functions in it.

    Attributes:
        checked: whether a function ends with an error where an index is not within its axis.
    """

    checked: bool
    module: ir.Module = field(default_factory=ir.Module)
    made: dict[Any, Made] = field(default_factory=dict)

    def function(self, source: Source, types: tuple[Type, ...], flags: tuple[str, ...] = ()) -> Made:
        """A function for arguments of some types; `flags` are its caller's, which it takes if it is inline."""
        flags = flags if source.inline else source.fastmath
        found = self.made.get((source, types, flags))
        if found is None:
            found = self.made[source, types, flags] = Translation(self, source, types, flags).made()
        return found


class Translation(Calls):
    """Translates one function."""

    def __init__(self, module: Module, source: Source, types: tuple[Type, ...], flags: tuple[str, ...]) -> None:
        self.module, self.source, self.checked = module, source, module.checked
        self.tree, self.above = tree_of(source)
        self.line = self.above + 1
        self.may_fail = module.checked or makes_arrays(source)
        parts = [part for type in types for part in parts_of(type)]
        kind = ir.FunctionType(ir.VoidType(), parts)
        self.function = ir.Function(module.module, kind, module.module.get_unique_name(source.name))
        self.function.linkage = "internal"
        self.function.attributes.add("nounwind")
        if source.inline:
            self.function.attributes.add("alwaysinline")
        self.entry = Builder(self.function.append_basic_block())
        super().__init__(Builder(self.function.append_basic_block()), flags)
        self.begin, self.end = self.b.block, self.function.append_basic_block()
        self.variables: dict[str, Variable] = {}
        self.arrays = []
        self.loops: list[tuple[ir.Block, ir.Block]] = []  # where `continue` and `break` lead to
        self.result: Type | None = None
        self.results: list[ir.Value] = []
        self.returns = False
        self.status = self.entry.alloca(I32)
        self.entry.store(ir.Constant(I32, 0), self.status)
        names = [argument.arg for argument in self.tree.args.args]
        if len(names) != len(types):
            raise TypeError(f"{source.name} takes {len(names)} arguments, and {len(types)} are given")
        registers = iter(self.function.args)
        for name, type in zip(names, types):
            self.assign(name, put_together(type, registers))

    def made(self) -> Made:
        """The function, whole.

        Raises:
            TypeError: it does what compiled functions cannot.
        """
        try:
            if self.body(self.tree.body):
                if self.result is not None:
                    raise Untranslatable("the end is reached without a result, and elsewhere there is one")
                self.b.branch(self.end)
        except Untranslatable as error:
            where = f"{self.source.function.__code__.co_filename}:{self.line}: in {self.source.name}"
            raise TypeError(f"{where}: {error}") from error
        self.entry.branch(self.begin)
        b = Builder(self.end)
        for cell in self.arrays:
            b.named("free", ir.VoidType(), b.load(cell))
        found = [b.load(cell) for cell in (*([self.status] if self.may_fail else []), *self.results)]
        kind = ir.VoidType()
        if len(found) > 1:
            kind = ir.LiteralStructType([value.type for value in found])
            whole: ir.Value = ir.Constant(kind, ir.Undefined)
            for i, value in enumerate(found):
                whole = b.insert_value(whole, value, i)
            b.ret(whole)
        elif found:
            kind = found[0].type
            b.ret(found[0])
        else:
            b.ret_void()
        # The type of the result is known only now.
        type = ir.FunctionType(kind, self.function.ftype.args)
        self.function.ftype, self.function.type = type, type.as_pointer()
        self.function.return_value = ir.values.ReturnValue(self.function, kind)
        return Made(self.function, self.result, self.may_fail)

    def translated(self, source: Source, types: tuple[Type, ...]) -> Made:
        """Another function, for arguments of some types."""
        return self.module.function(source, types, self.flags)

    def variable(self, name: str) -> Value | None:
        """The value of a local variable; None if there is none of this name."""
        found = self.variables.get(name)
        if found is None:
            return None
        return put_together(found.type, [self.b.load(cell) for cell in found.cells], own=found.own)

    def variable_type(self, name: str) -> Type | None:
        """The type of a local variable; None if there is none of this name."""
        return self.variables[name].type if name in self.variables else None

    def outer(self, name: str) -> Any:
        """What a name stands for outside the function, or MISSING."""
        return MISSING if name in self.source.function.__code__.co_varnames else self.source.outer(name)

    def assign(self, name: str, value: Value) -> None:
        """Let a local variable have a value."""
        found = self.variables.get(name)
        if found is None:
            type = type_of_value(value)
            found = self.variables[name] = Variable(type, [self.entry.alloca(x) for x in parts_of(type)], False)
        found.own |= isinstance(value, Array) and value.own
        for part, cell in zip(self.as_type(value, found.type, name), found.cells):
            self.b.store(part, cell)

    def body(self, statements: Sequence[ast.stmt]) -> bool:
        """Translate statements; whether the end of them is reached."""
        for each in statements:
            self.line = self.above + each.lineno
            translate: Callable[[Any], bool] | None = getattr(self, f"_{type(each).__name__.lower()}", None)
            if translate is None:
                raise Untranslatable(f"a statement of the kind {type(each).__name__}")
            if not translate(each):
                return False
        return True

    def _pass(self, node: ast.Pass) -> bool:
        return True

    def _expr(self, node: ast.Expr) -> bool:
        if not isinstance(node.value, ast.Constant):
            self.value(node.value)
        return True

    def _assign(self, node: ast.Assign) -> bool:
        value = self.value(node.value)
        for target in node.targets:
            self._give(target, value)
        return True

    def _give(self, target: ast.expr, value: Value) -> None:
        if isinstance(target, ast.Name):
            self.assign(target.id, value)
        elif isinstance(target, ast.Tuple):
            items = value.items if isinstance(value, Tuple) else [Fixed(item) for item in value.value]  # type: ignore[union-attr]
            if len(items) != len(target.elts):
                raise Untranslatable(f"{len(items)} values for {len(target.elts)} names")
            for each, item in zip(target.elts, items):
                self._give(each, item)
        elif isinstance(target, ast.Subscript):
            base = self.value(target.value)
            if not isinstance(base, Array):
                raise Untranslatable("an item of what is no array")
            part = self.part(base, target.slice)
            if isinstance(part, Place):
                self.store(part, value)
            else:
                self.fill(part, value)
        else:
            raise Untranslatable("an assignment to what is no variable and no element")

    def _augassign(self, node: ast.AugAssign) -> bool:
        if isinstance(node.target, ast.Name):
            whole = ast.BinOp(ast.Name(node.target.id, ast.Load()), node.op, node.value)
            self.assign(node.target.id, self.value(whole))
            return True
        if not isinstance(node.target, ast.Subscript):
            raise Untranslatable("an assignment to what is no variable and no element")
        base = self.value(node.target.value)
        place = self.part(base, node.target.slice) if isinstance(base, Array) else None
        if not isinstance(place, Place):
            raise Untranslatable("arithmetic of whole arrays")
        self.store(place, self.binary(operator_of(node.op), self.load(place), self.value(node.value)))
        return True

    def _if(self, node: ast.If) -> bool:
        known = self.known(node.test)
        if known is not MISSING:
            return self.body(node.body if known else node.orelse)
        yes, no = (self.function.append_basic_block() for _ in range(2))
        after = self.function.append_basic_block() if node.orelse else no
        self.branch(node.test, yes, no)
        goes_on = not node.orelse
        for block, statements in ((yes, node.body), (no, node.orelse)):
            if statements:
                self.b.position_at_end(block)
                if self.body(statements):
                    self.b.branch(after)
                    goes_on = True
        self.b.position_at_end(after)
        if not goes_on:
            self.b.unreachable()
        return goes_on

    def _while(self, node: ast.While) -> bool:
        check, body, after = (self.function.append_basic_block() for _ in range(3))
        self.b.branch(check)
        self.b.position_at_end(check)
        endless = self.known(node.test) is True
        if endless:
            self.b.branch(body)
        else:
            self.branch(node.test, body, after)
        self._loop(node, body, check, after)
        if endless and not _breaks(node.body):
            self.b.unreachable()
            return False
        return True

    def _loop(self, node: ast.While | ast.For, body: ir.Block, again: ir.Block, after: ir.Block) -> None:
        """The body of a loop; then go on after it."""
        if node.orelse:
            raise Untranslatable("a loop with else")
        self.loops.append((again, after))
        if self.b.block is not body:
            self.b.position_at_end(body)
        if self.body(node.body):
            self.b.branch(again)
        self.loops.pop()
        self.b.position_at_end(after)

    def _for(self, node: ast.For) -> bool:
        call = node.iter
        if isinstance(call, ast.Call) and self.known(call.func) is range:
            bounds = [self.number(self.value(each), INT64) for each in call.args]
            zero, one = (Number(INT64, self.b.index(x)) for x in (0, 1))
            start, stop = (zero, bounds[0]) if len(bounds) == 1 else bounds[:2]
            self._counted(node, start.value, stop.value, (bounds[2] if len(bounds) > 2 else one).value, None)
        else:
            array = self.value(call)
            if not isinstance(array, Array) or array.type.ndim != 1:
                raise Untranslatable("a loop over what is neither a range nor an array of one axis")
            self._counted(node, self.b.index(0), array.shape[0], self.b.index(1), array)
        return True

    def _counted(self, node: ast.For, start: ir.Value, stop: ir.Value, step: ir.Value, array: Array | None) -> None:
        check, body, again, after = (self.function.append_basic_block() for _ in range(4))
        counter = self.entry.alloca(I64)
        self.b.store(start, counter)
        self.b.branch(check)
        self.b.position_at_end(check)
        at = self.b.load(counter)
        if isinstance(step, ir.Constant):
            inside = self.b.icmp_signed("<" if step.constant > 0 else ">", at, stop)
        else:
            up, down = self.b.icmp_signed("<", at, stop), self.b.icmp_signed(">", at, stop)
            inside = self.b.select(self.b.icmp_signed(">", step, 0), up, down)
        self.b.cbranch(inside, body, after)
        self.b.position_at_end(body)
        here: Value = Number(INT64, at)
        if array is not None:
            here = self.load(Place(array.type.dtype, self.address(array, at)))
        self._give(node.target, here)
        self._loop(node, self.b.block, again, after)
        b = Builder(again)
        b.store(b.add(b.load(counter), step, flags=["nsw"]), counter)
        b.branch(check)

    def address(self, array: Array, at: ir.Value) -> ir.Value:
        """Of an element of an array of one axis."""
        if array.type.dense:
            return self.b.gep(array.data, [at], inbounds=True, source_etype=memory(array.type.dtype))
        return self.b.behind(array.data, self.b.mul(at, array.strides[0]), inbounds=True)

    def _break(self, node: ast.Break) -> bool:
        self.b.branch(self.loops[-1][1])
        return False

    def _continue(self, node: ast.Continue) -> bool:
        self.b.branch(self.loops[-1][0])
        return False

    def _return(self, node: ast.Return) -> bool:
        value = self.value(node.value) if node.value else Fixed(None)
        type = None if value == Fixed(None) else type_of_value(value)
        if self.returns and (type is None) != (self.result is None):
            raise Untranslatable("one return with a result, and one without")
        if isinstance(value, Array) and value.own:
            raise Untranslatable("an array that ends with this function is returned")
        if not self.returns and type is not None:
            self.result, self.results = type, [self.entry.alloca(part) for part in parts_of(type)]
        self.returns = True
        if self.result is not None:
            for part, cell in zip(self.as_type(value, self.result, "the result"), self.results):
                self.b.store(part, cell)
        self.b.branch(self.end)
        return False


def _breaks(statements: Sequence[ast.stmt]) -> bool:
    """Whether a loop with these statements may end by `break`."""
    for each in statements:
        if isinstance(each, ast.Break):
            return True
        if not isinstance(each, ast.For | ast.While):
            inner = [x for name in ("body", "orelse") for x in getattr(each, name, [])]
            if _breaks(inner):
                return True
    return False
