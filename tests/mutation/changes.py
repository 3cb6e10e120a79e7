"""Mutants of a module: one small change within one function each, and how the changed function takes its place."""

from __future__ import annotations

import ast
import copy
import gc
from collections.abc import Iterator
from dataclasses import dataclass
from types import CodeType, FunctionType
from typing import Any

COMPARISONS: dict[type, type] = {
    ast.Lt: ast.LtE,
    ast.Gt: ast.GtE,
    ast.Eq: ast.NotEq,
    ast.Is: ast.IsNot,
    ast.In: ast.NotIn,
}
OPERATIONS: dict[type, type] = {ast.Add: ast.Sub, ast.Mult: ast.FloorDiv, ast.BitAnd: ast.BitOr, ast.LShift: ast.RShift}
NAMES = {"min": "max", "any": "all", "sum": "max", "sorted": "list", "ceil": "floor", "prod": "sum"}
for pairs in (COMPARISONS, OPERATIONS):
    pairs |= {value: key for key, value in pairs.items()}
NAMES |= {"max": "min", "all": "any", "floor": "ceil"}
OPERATIONS |= {ast.Div: ast.Mult, ast.Mod: ast.Mult}
FUNCTION = 0x1  # in the flags of a code object: a function's, and not a class's


@dataclass(frozen=True)
class Change:
    """A mutant.

    Attributes:
        path: (field, index) of each node from the module down to the changed one.
        number: which of its node's variants.
        function: the name of the function that it changes, with its class.
        lines: of the changed node; the first of its statement beside them.
        before, after: the source of the node.
    """

    path: tuple[tuple[str, int | None], ...]
    number: int
    function: str
    lines: tuple[int, ...]
    before: str
    after: str


def changes(tree: ast.Module) -> list[Change]:
    """All of a module's, in the order of its text. Messages of errors, types and what is compiled stay the same."""
    return list(_within(tree, (), "", False, 0))


def changed(tree: ast.Module, change: Change) -> ast.Module:
    """The module with one change. It shares all that does not hold the changed node."""
    new: ast.Module = _replaced(tree, change, 0)
    return new


def _replaced(node: Any, change: Change, depth: int) -> Any:
    if depth == len(change.path):
        return ast.fix_missing_locations(ast.copy_location(list(_variants(node))[change.number], node))
    field, index = change.path[depth]
    below = getattr(node, field)
    if index is None:
        return _with(node, **{field: _replaced(below, change, depth + 1)})
    return _with(node, **{field: [*below[:index], _replaced(below[index], change, depth + 1), *below[index + 1 :]]})


def objects() -> list[object]:
    """All that the garbage collector knows, and what it does not look at (see tests/conftest.py)."""
    gc.unfreeze()
    found = gc.get_objects()
    gc.freeze()
    return found


def install(before: CodeType, after: CodeType) -> bool:
    """Let the functions of a loaded module run what a changed module says; whether that could be done."""
    pairs = [(old, new) for old, new in zip(_functions(before), _functions(after), strict=True) if old != new]
    found = [f for f in objects() if isinstance(f, FunctionType) and f.__code__.co_filename == before.co_filename]
    count = 0
    for old, new in pairs:
        for function in found:
            same = function.__code__.co_filename == old.co_filename and function.__code__ == old
            if same and len(old.co_freevars) == len(new.co_freevars):
                function.__code__ = new
                count += 1
    return count > 0


def _functions(code: CodeType) -> Iterator[CodeType]:
    """Those of a module and of its classes, without what they hold."""
    for each in code.co_consts:
        if isinstance(each, CodeType):
            yield from [each] if each.co_flags & FUNCTION else _functions(each)


def _within(
    node: ast.AST, path: tuple[tuple[str, int | None], ...], name: str, inside: bool, statement: int
) -> Iterator[Change]:
    for field, value in ast.iter_fields(node):
        for index, child in enumerate(value) if isinstance(value, list) else [(None, value)]:
            if not isinstance(child, ast.AST) or isinstance(child, ast.arguments):
                continue
            if field in ("annotation", "returns", "decorator_list") or _is_left(child):
                continue
            here = (*path, (field, index))
            line = child.lineno if isinstance(child, ast.stmt) else statement
            if inside:
                first, last = getattr(child, "lineno", line), getattr(child, "end_lineno", line)
                for number, new in enumerate(_variants(child)):
                    old_text, new_text = (ast.unparse(each) for each in (child, ast.fix_missing_locations(new)))
                    if new_text != old_text:
                        yield Change(here, number, name, (line, *range(first, last + 1)), old_text, new_text)
            if not _is_message(child):
                named = isinstance(child, ast.FunctionDef | ast.ClassDef)
                below = f"{name}.{child.name}".removeprefix(".") if named else name
                yield from _within(child, here, below, inside or isinstance(child, ast.FunctionDef | ast.Lambda), line)


def _is_left(node: ast.AST) -> bool:
    jit = isinstance(node, ast.FunctionDef) and any("jit" in ast.unparse(each) for each in node.decorator_list)
    text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    return jit or text or isinstance(node, ast.JoinedStr | ast.Assert)


def _is_message(node: ast.AST) -> bool:
    return isinstance(node, ast.Raise) or (isinstance(node, ast.Call) and ast.unparse(node.func).endswith("Error"))


def _variants(node: ast.AST) -> Iterator[ast.AST]:
    """What may stand in a node's place."""
    match node:
        case ast.Compare(left, operators, right):
            for i, each in enumerate(operators):
                if type(each) in COMPARISONS:
                    yield ast.Compare(left, [*operators[:i], COMPARISONS[type(each)](), *operators[i + 1 :]], right)
        case ast.BoolOp(operator, values):
            yield ast.BoolOp(ast.Or() if isinstance(operator, ast.And) else ast.And(), values)
            for i in range(len(values)):
                left = [*values[:i], *values[i + 1 :]]
                yield left[0] if len(left) == 1 else ast.BoolOp(operator, left)
        case ast.UnaryOp(ast.Not() | ast.USub(), operand):
            yield operand
        case ast.BinOp(left, operator, right) if type(operator) in OPERATIONS:
            yield ast.BinOp(left, OPERATIONS[type(operator)](), right)
        case ast.Constant(bool() as value):
            yield ast.Constant(not value)
        case ast.Constant(int() | float() as value):
            yield ast.Constant(value + 1)
        case ast.Constant(str() as value) if value:
            yield ast.Constant(value + "'")
        case ast.If() | ast.IfExp():
            for value in (True, False):
                yield _with(node, test=ast.Constant(value))
        case ast.comprehension(ifs=tests):
            for i in range(len(tests)):
                yield _with(node, ifs=[*tests[:i], *tests[i + 1 :]])
        case ast.Return(ast.expr()):
            yield ast.Return(ast.Constant(None))
        case ast.Expr() | ast.Raise() | ast.Continue() | ast.Break() | ast.AugAssign():
            yield ast.Pass()
        case ast.Call(ast.Name(name), arguments, keywords) if name in NAMES:
            yield ast.Call(ast.Name(NAMES[name], ast.Load()), arguments, keywords)
        case ast.Call(function, arguments, keywords) if not _is_message(node):
            for i, each in enumerate(keywords):
                if each.arg is not None:
                    yield ast.Call(function, arguments, [*keywords[:i], *keywords[i + 1 :]])


def _with(node: ast.AST, **fields: Any) -> ast.AST:
    new = copy.copy(node)
    for name, value in fields.items():
        setattr(new, name, value)
    return new
