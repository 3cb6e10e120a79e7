"""Element types of scalar expressions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache, reduce
from types import MappingProxyType

import numpy as np

from foreplan.base.errors import ShapeError
from foreplan.graph.types import BOOL, DTYPES, FLOAT32, FLOAT64, INT64, DType, as_dtype
from foreplan.ops.expr.functions import FUNCTIONS
from foreplan.ops.expr.nodes import Arg, Call, Const, Expr, subexpressions

_REFUSE_BOOLEANS = (
    "sub",
    "neg",
    "sign",
    "square",
    "pow",
    "floordiv",
    "mod",
    "fmod",
    "truncdiv",
    "shiftleft",
    "shiftright",
)
_BITWISE = ("bitand", "bitor", "bitxor", "bitnot", "shiftleft", "shiftright")


def promote(a: DType, b: DType) -> DType:
    """The element type of an operation on two types.

    Floats win over integers, and the wider type over the narrower; float16 and bfloat16 give float32.
    """
    if a == b:
        return a
    if a.is_float and b.is_float:
        return FLOAT32 if a.itemsize == b.itemsize else max(a, b, key=lambda dtype: dtype.itemsize)
    if a.is_float or b.is_float:
        return a if a.is_float else b
    return as_dtype(np.promote_types(a.numpy, b.numpy))


def infer_dtypes(args: Sequence[DType], *exprs: Expr) -> Mapping[Expr, DType | None]:
    """The element type in which every part is computed; None for a literal, and where nothing decides.

    Arguments decide. A part of literals alone, such as `where(a0, 0.1, 0.2)`, is computed in float64 where such numbers
    read it, and in integers where these do.

    Raises:
        ShapeError: the expression reads an argument that is not given, or `call_dtype` refuses a call.
    """
    return _infer_dtypes(tuple(args), exprs)


@lru_cache(maxsize=4096)
def _infer_dtypes(args: tuple[DType, ...], exprs: tuple[Expr, ...]) -> Mapping[Expr, DType | None]:
    own = own_dtypes(args, *exprs)
    if not any(own[part] is None for part in own if isinstance(part, Call)) and FLOAT64 not in own.values():
        return own
    types = dict(own)
    for reader in reversed(list(own)):
        for arg, wanted in zip(reader.args, _wanted(reader, types)) if isinstance(reader, Call) else ():
            if isinstance(arg, Call) and wanted is not None and _may_be(arg, wanted, own):
                before = types[arg]
                types[arg] = wanted if before is None else promote(before, wanted)
    return MappingProxyType(types)


def _wanted(reader: Call, types: Mapping[Expr, DType | None]) -> list[DType | None]:
    """The element types to which a call converts its arguments."""
    if reader.function in DTYPES:
        return [DTYPES[reader.function]]
    if reader.function == "where":
        return [None, types[reader], types[reader]]
    if FUNCTIONS[reader.function].result != "bool":
        return [types[reader]] * len(reader.args)
    known = [dtype for arg in reader.args if (dtype := types[arg]) is not None]
    return [reduce(promote, known) if known else None] * len(reader.args)


def _may_be(part: Call, wanted: DType, own: Mapping[Expr, DType | None]) -> bool:
    """Whether a call of literals alone is more exact in another element type, and means the same."""
    if part.function in DTYPES:
        return False
    if wanted == FLOAT64:
        of_literals = FUNCTIONS[part.function].result == "float" and all(own[arg] is None for arg in part.args)
        return own[part] is None or of_literals
    literals = [arg.value for arg in part.args if isinstance(arg, Const)]
    whole = all(isinstance(x, int) and not isinstance(x, bool) and wanted.holds(x) for x in literals)
    return own[part] is None and wanted.category in ("int", "uint") and whole


def own_dtypes(args: Sequence[DType], *exprs: Expr) -> Mapping[Expr, DType | None]:
    """The element type of every part as its arguments decide it; None for a part of literals alone."""
    return _own_dtypes(tuple(args), exprs)


@lru_cache(maxsize=4096)
def _own_dtypes(args: tuple[DType, ...], exprs: tuple[Expr, ...]) -> Mapping[Expr, DType | None]:
    types: dict[Expr, DType | None] = {}
    for part in subexpressions(*exprs):
        if isinstance(part, Arg):
            if part.index >= len(args):
                raise ShapeError(f"the expression reads a{part.index}, but only {len(args)} inputs are given")
            types[part] = args[part.index]
        elif isinstance(part, Call):
            types[part] = call_dtype(part, [types[arg] for arg in part.args])
        else:
            types[part] = None
    return MappingProxyType(types)


def call_dtype(part: Call, args: Sequence[DType | None]) -> DType | None:
    """The element type of a call, from those of its arguments; None if all are literals and the rule is `same`.

    Raises:
        ShapeError: the condition of `where` is not boolean, the result's type cannot hold a literal, a bitwise
            function gets floats, arithmetic gets booleans, or a type is one in which elements are only stored.
    """
    for dtype in (*args, DTYPES.get(part.function)):
        if dtype is not None and dtype.is_storage:
            raise ShapeError(
                f"{part} computes with {dtype}, in which elements are only stored: give foreplan.ops.storage.decoded(x)"
            )
    result = _result_dtype(part, args)
    if part.function in _BITWISE and (FLOAT32 if result is None else result).is_float:
        raise ShapeError(f"{part.function}() needs integers, and {part} has floats; convert them to integers first")
    if part.function in _REFUSE_BOOLEANS and result == BOOL:
        raise ShapeError(f"{part.function}() does not take booleans; convert the arguments of {part} to numbers first")
    if result is not None and part.function in FUNCTIONS and FUNCTIONS[part.function].result == "same":
        for arg in part.args[1:] if part.function == "where" else part.args:
            if isinstance(arg, Const) and not result.holds(arg.value):
                raise ShapeError(
                    f"{part} is {result}, which cannot hold {arg}; convert its arguments to another type first"
                )
    return result


def _result_dtype(part: Call, args: Sequence[DType | None]) -> DType | None:
    if part.function in DTYPES:
        return DTYPES[part.function]
    rule = FUNCTIONS[part.function].result
    if rule == "bool":
        return BOOL
    if part.function == "where":
        if args[0] not in (BOOL, None):
            raise ShapeError(f"where() needs a boolean condition, and {part.args[0]} is {args[0]}; convert it to bool")
        args, literals = args[1:], part.args[1:]
    else:
        literals = part.args
    known = [dtype for dtype in args if dtype is not None]
    if not known:
        return FLOAT32 if rule == "float" else None
    result = known[0]
    for dtype in known[1:]:
        result = promote(result, dtype)
    has_fraction = any(isinstance(x, Const) and isinstance(x.value, float) for x in literals)
    if not result.is_float and (rule == "float" or (has_fraction and result != BOOL)):
        return FLOAT32
    if result == BOOL and any(isinstance(x, Const) and not isinstance(x.value, bool) for x in literals):
        return FLOAT32 if has_fraction else INT64
    return result
