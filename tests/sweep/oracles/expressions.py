"""Scalar expressions in float64, each step moved by its rounding: the value, how far it may lie, where it is open.

Floating-point steps are exact but for float64's rounding; integers and truth values are computed in their own types.
Every step is taken several times over, moved at random by what an engine may round it by, which shows how far roundings
carry (stochastic arithmetic, as in Vignes, 1993).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import ml_dtypes
import numpy as np
import scipy.special

from foreplan.graph import DType, as_dtype
from foreplan.graph.types import DTYPES, FLOAT32
from foreplan.ops.expr import Arg, Call, Const, Expr, infer_dtypes, parse_expr, subexpressions
from foreplan.ops.map import operand_dtypes

Array = np.ndarray
SAMPLES = 7  # the first is not moved

# NumPy's and SciPy's functions by the names that expressions have for them.
OF_FLOATS: dict[str, Callable[..., Array]] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "div": np.true_divide,
    "pow": np.power,
    "floordiv": lambda a, b: np.floor_divide(a, b),
    "truncdiv": lambda a, b: np.trunc(a / b) + 0.0,  # its zero has no sign, on any engine
    "mod": np.remainder,
    "fmod": np.fmod,
    "max": np.maximum,
    "min": np.minimum,
    "atan2": np.arctan2,
    "neg": np.negative,
    "abs": np.abs,
    "sign": np.sign,
    "floor": np.floor,
    "ceil": np.ceil,
    "trunc": np.trunc,
    "round": np.rint,
    "square": lambda x: x * x,
    "sqrt": np.sqrt,
    "rsqrt": lambda x: 1 / np.sqrt(x),
    "reciprocal": lambda x: 1 / x,
    "exp": np.exp,
    "expm1": np.expm1,
    "log": np.log,
    "log1p": np.log1p,
    "sin": np.sin,
    "cos": np.cos,
    "tan": np.tan,
    "asin": np.arcsin,
    "acos": np.arccos,
    "atan": np.arctan,
    "sinh": np.sinh,
    "cosh": np.cosh,
    "tanh": np.tanh,
    "asinh": np.arcsinh,
    "acosh": np.arccosh,
    "atanh": np.arctanh,
    "sigmoid": lambda x: (1 / (1 + np.exp(-np.asarray(x, np.longdouble)))).astype(np.float64),
    "relu": lambda x: np.where(x > 0, x, np.where(np.isnan(x), x, 0.0)),
    "erf": scipy.special.erf,
    "clip": lambda x, low, high: np.minimum(np.maximum(x, low), high),
}
_TRUTH: dict[str, Callable[..., Array]] = {
    "isnan": np.isnan,
    "isinf": np.isinf,
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "and": np.logical_and,
    "or": np.logical_or,
    "xor": np.logical_xor,
    "not": np.logical_not,
}


def _itself(x: Array) -> Array:
    return x


def _size(x: Array) -> Array:
    """Magnitudes of integers, that of the least one, too."""
    wide = x.astype(np.uint64)
    return np.where(x < 0, np.uint64(0) - wide, wide)


_INTEGER: dict[str, Callable[..., Array]] = {
    **{name: OF_FLOATS[name] for name in ("add", "sub", "mul", "max", "min", "abs", "sign", "square", "clip", "neg")},
    "floordiv": np.floor_divide,
    "mod": np.remainder,
    "fmod": np.fmod,
    "pow": np.power,
    "truncdiv": lambda a, b: np.where((a < 0) != (b < 0), -(_size(a) // _size(b)), _size(a) // _size(b)),
    "floor": _itself,
    "ceil": _itself,
    "trunc": _itself,
    "round": _itself,
    "relu": lambda x: np.maximum(x, 0),
    "bitand": np.bitwise_and,
    "bitor": np.bitwise_or,
    "bitxor": np.bitwise_xor,
    "bitnot": np.invert,
    "shiftleft": np.left_shift,
    "shiftright": np.right_shift,
}
# A step that gives one of its arguments, or a whole number, rounds nothing; sums and products half a unit of the last
# place; the rest a few. Error bounds of powers and of hyperbolic functions near overflow are larger.
_EXACT = {
    "max",
    "min",
    "neg",
    "abs",
    "sign",
    "floor",
    "ceil",
    "trunc",
    "round",
    "relu",
    "clip",
    "where",
    "floordiv",
    "mod",
}
_ONCE = {"add", "sub", "mul", "div", "sqrt", "square", "reciprocal"}


@dataclass
class Numbers:
    """Values of one part of an expression.

    Attributes:
        samples: [SAMPLES, …] of floats, [1, …] of anything else.
        open: where the result is open: conversions out of range, integers divided by 0, decisions that rounding turns.
        tiny: where a step between gave a number below the least normal one, which an engine may take for zero.
    """

    samples: Array
    open: Array | bool = False
    tiny: Array | bool = False


def values_of(expr: str, args: Sequence[Array]) -> Array:
    """An expression of float64 arrays, as it is written."""
    dtypes = [as_dtype(x.dtype) for x in args]
    return evaluate(parse_expr(expr), args, dtypes).samples[0]


def evaluate(expr: Expr, args: Sequence[Array], dtypes: Sequence[DType], seed: int = 0) -> Numbers:
    """An expression.

    Args:
        args: floats in float64, anything else in its own type.
        dtypes: of the arguments, as the op has them.
        seed: of the movements.
    """
    rng, types = np.random.default_rng(seed), infer_dtypes(dtypes, expr)
    found: dict[Expr, Numbers] = {}
    shape = np.broadcast_shapes(*(x.shape for x in args))
    with np.errstate(all="ignore"):
        for part in subexpressions(expr):
            if isinstance(part, Arg):
                found[part] = Numbers(np.broadcast_to(args[part.index], shape)[None])
            elif isinstance(part, Const):
                found[part] = Numbers(np.full((1, *(1 for _ in shape)), part.value))
            else:
                assert isinstance(part, Call)
                found[part] = _call(part, [found[arg] for arg in part.args], types, rng)
        result = found[expr]
        wanted = types[expr] or FLOAT32
        return result if isinstance(expr, Call) else _converted(result, types[expr], wanted, rng)


def _is_tiny(x: Numbers, dtype: DType) -> Array:
    """Where a step gave a number below the least normal one, of the type in which engines compute."""
    first = x.samples[0].astype(np.float64)
    return (first != 0) & (np.abs(first) < float(np.finfo(dtype.wide.numpy).tiny))


def _call(part: Call, given: list[Numbers], types: Mapping[Expr, DType | None], rng: np.random.Generator) -> Numbers:
    result, function = types[part], part.function
    if function in DTYPES:
        return _converted(_read(given[0], part.args[0], types), types[part.args[0]], DTYPES[function], rng)
    kinds = operand_dtypes(part, types)
    given = [_read(x, arg, types) for x, arg in zip(given, part.args)]
    given = [x if kind is None else _read_as(x, types[arg], kind, rng) for x, arg, kind in zip(given, part.args, kinds)]
    unsure: Array | bool = False
    tiny: Array | bool = False
    for x in given:
        unsure, tiny = unsure | np.asarray(x.open), tiny | np.asarray(x.tiny)
    arrays = [x.samples for x in given]
    if function == "where":
        test = arrays[0].astype(bool)
        y = np.where(test, arrays[1], arrays[2])
        return Numbers(y if (result or FLOAT32).is_float else y.astype((result or FLOAT32).numpy), unsure, tiny)
    if result is not None and result.category == "bool" and function in _TRUTH:
        if function in ("eq", "ne", "lt", "le", "gt", "ge"):
            unsure = unsure | _overlap(*arrays)
        truth = _TRUTH[function](*arrays)
        return Numbers(truth, unsure, tiny)
    if result is not None and not result.is_float:
        return _integers(function, arrays, result, unsure, tiny)
    if function in ("sin", "cos", "tan") and len(arrays[0]) > 1:  # far out, one rounding leads anywhere
        unsure = unsure | (np.ptp(arrays[0], 0) > 0.05)
    y = OF_FLOATS[function](*[np.asarray(x, np.float64) for x in arrays])
    if result is None:
        return Numbers(y, unsure, tiny)
    units = 0.0 if function in _EXACT else 1.0 if function in _ONCE else 4.0
    if function in ("floordiv", "mod", "fmod", "truncdiv"):  # a quotient that rounds to the next whole number
        near = np.abs(arrays[0] / arrays[1])
        unsure = unsure | (~(near < 2.0 ** min(20, _bits(result) - 2))) | (np.abs(near - np.rint(near)) < 1e-3)
        if function in ("floordiv", "truncdiv"):  # computed by way of the rest, and what is left without it
            for step in (arrays[0], np.fmod(*arrays), np.remainder(*arrays)):
                tiny = tiny | _is_tiny(Numbers(step), result)
    return _moved(y, result, units, unsure, tiny, rng)


def _read(x: Numbers, part: Expr, types: Mapping[Expr, DType | None]) -> Numbers:
    """An operand: what a step has made of it may be tiny."""
    kind = types[part]
    if not isinstance(part, Call) or kind is None or not kind.is_float:
        return x
    return replace(x, tiny=x.tiny | _is_tiny(x, kind))


def _read_as(x: Numbers, source: DType | None, kind: DType, rng: np.random.Generator) -> Numbers:
    """An operand converted to the type of a step; that is a step, too."""
    y = _converted(x, source, kind, rng)
    return y if y is x or source is None or not kind.is_float else replace(y, tiny=y.tiny | _is_tiny(y, kind))


def _overlap(a: Array, b: Array) -> Array:
    """Where roundings decide how two numbers compare."""
    moved = (np.ptp(a, 0) > 0) | (np.ptp(b, 0) > 0) if a.dtype.kind == "f" or b.dtype.kind == "f" else False
    return moved & (a.min(0) <= b.max(0)) & (b.min(0) <= a.max(0))


def _bits(dtype: DType) -> int:
    return int(ml_dtypes.finfo(dtype.numpy).nmant)


def _integers(function: str, arrays: list[Array], result: DType, unsure: Array | bool, tiny: Array | bool) -> Numbers:
    arrays = [np.asarray(x).astype(result.numpy) for x in arrays]
    if function in ("floordiv", "mod", "fmod", "truncdiv"):
        unsure = unsure | (arrays[1] == 0)
        if result.category == "int":  # the least number through -1 has no result
            unsure = unsure | (arrays[1] == -1) & (arrays[0] == np.iinfo(result.numpy).min)
        arrays[1] = np.where(arrays[1] == 0, 1, arrays[1]).astype(result.numpy)
    if function in ("shiftleft", "shiftright"):
        unsure = unsure | (arrays[1] < 0) | (arrays[1] >= 8 * result.itemsize)
    if function == "pow" and result.category == "int":
        unsure = unsure | (arrays[1] < 0)
        arrays[1] = np.maximum(arrays[1], 0)
    if result.category == "bool":
        table = {"add": np.logical_or, "mul": np.logical_and, "max": np.logical_or, "min": np.logical_and}
        return Numbers(table.get(function, _INTEGER.get(function, _itself))(*arrays), unsure, tiny)
    return Numbers(_INTEGER[function](*arrays).astype(result.numpy), unsure, tiny)


def _moved(
    y: Array, dtype: DType, units: float, unsure: Array | bool, tiny: Array | bool, rng: np.random.Generator
) -> Numbers:
    """Samples with a step's rounding: past the largest number infinite, below half of the smallest zero."""
    kind = ml_dtypes.finfo(dtype.numpy)
    eps, most, least = float(kind.eps), float(kind.max), float(kind.smallest_subnormal)
    y = np.broadcast_to(y, (SAMPLES, *y.shape[1:])).copy() if len(y) == 1 else y.copy()
    if units:
        shape = (SAMPLES - 1, *y.shape[1:])
        signs = rng.choice([-1.0, 1.0], shape)
        signs[0], signs[1] = 1.0, -1.0  # what rounding turns is seen for certain, after one step
        y[1:] += signs * (units * eps * rng.uniform(0.5, 1.5, shape) * np.abs(y[1:]) + least * (y[1:] != 0))
    limit = most * (1 + eps / 2)  # what is rounded is infinite from here on; float64 rounds by itself
    large = np.isfinite(y) & (np.abs(y) >= limit) & (limit > most)
    y = np.where(large, np.copysign(np.inf, y), np.where(np.abs(y) < least / 2, np.copysign(0.0, y), y))
    return Numbers(y, unsure, tiny)


def _converted(x: Numbers, source: DType | None, dtype: DType, rng: np.random.Generator) -> Numbers:
    """Converted to a type; where a number is none of the type's, the result is open."""
    if source == dtype:
        return x
    samples = x.samples
    if dtype.is_float:
        y = samples.astype(np.float64)
        return _moved(y, dtype, 0.0 if source is None else 0.5, x.open, x.tiny, rng)
    if dtype.category == "bool":
        return Numbers(samples != 0, x.open, x.tiny)
    if source is None or source.is_float:
        limits = np.iinfo(dtype.numpy)
        whole = np.trunc(samples.astype(np.float64))
        inside = (whole >= float(limits.min)) & (whole < float(limits.max) + (dtype.itemsize < 8))
        return Numbers(np.where(inside, whole, 0).astype(dtype.numpy), x.open | ~inside, x.tiny)
    return Numbers(samples.astype(dtype.numpy), x.open, x.tiny)
