"""How far an engine's result may lie from the exact one: the only place that says so.

A judge asks `expectation` what a case should give; it follows from the op's oracle, in float64, and its rule:

- `Exact`: what is only moved, chosen or counted.
- `Sums(terms)`: sums of products. Each element may be off by its number of roundings times the sum of the absolute
  values of its terms (Higham, Accuracy and Stability of Numerical Algorithms, 2002, section 3.1).
- `Smooth(terms)`: anything else of floats. It may be off by what the result moves when the inputs do by some roundings,
  and by a number of roundings of its largest element.
- `Expressions`: each step of a scalar expression may round; see `oracles/expressions.py`.

`docs/engines.md` lists in words where engines differ beyond that; a test holds it against `DIFFERENCES`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import ml_dtypes
import numpy as np

from foreplan.graph import DType, Op, TensorType
from foreplan.lower.fallbacks import IN_FLOAT32
from foreplan.ops.expr import parse_expr
from tests.sweep.oracles.expressions import evaluate

Array = np.ndarray
Terms = Callable[[Any, Sequence[TensorType]], int]
Oracle = Callable[..., list[Array]]

LEAST = 1.2e-38  # below it, numbers are zero in the cpu engine's kernels and in narrow results of cuDNN's
WINOGRAD = 1e-5  # of the largest result of a convolution of 3 x 3 taps by Winograd's algorithm
SPLIT_MOST = 1e38  # above it, what tile registers multiply may be infinite
HALF_STEPS = 2.0**-8  # what the cpu engine rounds probabilities and score gradients by where tensors are bfloat16
SHARE_OF_SMALLEST = 8  # roundings of the largest element that every smooth function may add


@dataclass(frozen=True)
class Difference:
    """Where an engine may differ: in which kernels, how, and by how much."""

    engine: str
    where: str
    what: str
    bound: str


DIFFERENCES = (
    Difference("all", "sums", "terms in any order, products fused or not", "terms x unit x sum of absolute terms"),
    Difference("all", "maps", "each step rounds; functions other than + - x / sqrt by some units", "4 units a step"),
    Difference("all", "maximum, minimum, clip, relu, sign", "which zero of two signs is taken", "none"),
    Difference("all", "top_k", "where NaN stands among the others", "open"),
    Difference("all", "conversions", "to an integer type, of NaN and of what it does not hold", "open"),
    Difference("all", "integers", "a quotient by 0; a shift by less than 0 or the width or more", "open"),
    Difference("all", "convolutions", "an infinite weight where it meets padding", "open"),
    Difference("all", "scatter_add, cumsum", "sums of narrow elements round at every addition", "terms x narrow unit"),
    Difference("cpu", "maps", "results below the least normal are zero; inputs are not", f"{LEAST:g} a step"),
    Difference("cpu", "maps", "whole quotients where the dividend or the rest is below the least normal", "open"),
    Difference(
        "cpu", "all but maps", "numbers below the least normal are zero, times infinity NaN", f"{LEAST:g} a term"
    ),
    Difference("cpu", "convolutions by Winograd's algorithm", "error", f"{WINOGRAD:g} of the largest result"),
    Difference("cpu", "convolutions by Winograd's algorithm", "what is not finite spreads over its tile", "open"),
    Difference("cpu", "products on tile registers", "an infinity may give NaN", f"results above {SPLIT_MOST:g}: open"),
    Difference(
        "cpu", "products by oneDNN, bfloat16", "an infinity may give NaN; of convolutions, in neighbours too", "open"
    ),
    Difference("cpu", "sums added to something, bfloat16", "the sum is rounded before it is added", "one unit of it"),
    Difference(
        "cuda", "losses by cuBLASLt, narrow", "logits and their gradient round to the tensors' type", "one unit"
    ),
    Difference("cuda", "sums by cuDNN, narrow", "the sum is rounded before it is widened or added", "one unit of it"),
    Difference("cuda", "sums by cuDNN, narrow", "results below the least normal are zero", f"{LEAST:g}"),
    Difference("cuda", "products by cuBLASLt, narrow, added to", "the product is rounded first", "one unit of it"),
    Difference("cpu", "attention, losses, bfloat16", "probabilities round before products", f"{HALF_STEPS:g} of them"),
)


@dataclass(frozen=True)
class Exact:
    """Nothing rounds.

    Attributes:
        bits: signs of zeros, too.
    """

    bits: bool = False


@dataclass(frozen=True)
class Sums:
    """Each element is a sum of `terms` terms.

    Attributes:
        narrow: every addition may be rounded to the tensors' own narrow type.
        rounded: a sum is rounded to the inputs' narrow type before it is widened, or anything is added to it.
        flushed: results below the least normal are zero.
        reach: of what is made on the way to each result, logarithms to the base 2 of the smallest and the largest size.
    """

    terms: Terms
    narrow: bool = False
    rounded: bool = False
    flushed: bool = False
    reach: Callable[[Any, Sequence[Array]], tuple[Any, Any]] = lambda op, wide: (0.0, 0.0)


@dataclass(frozen=True)
class Smooth:
    """A function that is not steep.

    Attributes:
        terms: of its longest sum.
        narrow: steps between are rounded to the tensors' own narrow type, on any engine.
        narrow_on_cpu: likewise, on the cpu engine.
        cancels: the size of what may cancel within, from the inputs.
    """

    terms: Terms
    narrow: bool = False
    narrow_on_cpu: bool = False
    cancels: Callable[[Any, Sequence[Array]], float] = lambda op, wide: 0.0


@dataclass(frozen=True)
class Expressions:
    """Of `exprs`, or `expr`."""


Rule = Exact | Sums | Smooth | Expressions


@dataclass
class Expected:
    """One output: its values in float64 (or its own type), how far each may be off, and where anything goes."""

    type: TensorType
    values: Array
    allowed: Array
    open: Array
    bits: bool = False


def unit(dtype: DType) -> float:
    """Half of what lies between 1 and the next number."""
    return float(ml_dtypes.finfo(dtype.numpy).eps) / 2


def _most(dtype: DType) -> float:
    return float(ml_dtypes.finfo(dtype.numpy).max)


def _least(dtype: DType) -> float:
    return float(ml_dtypes.finfo(dtype.numpy).smallest_subnormal)


def widened(arrays: Sequence[Array]) -> list[Array]:
    """Floats in float64."""
    return [x.astype(np.float64) if x.dtype.kind not in "iub" else x for x in arrays]


def expectation(op: Op, oracle: Oracle, rule: Rule, arrays: Sequence[Array], engine: str) -> list[Expected]:
    """What a kernel of an engine must give for these inputs."""
    from foreplan.graph.types import types_of

    types, wide = types_of(*arrays), widened(arrays)
    results = op.infer(types)
    if isinstance(rule, Expressions):
        return _of_expressions(op, types, wide, results, engine)
    with np.errstate(all="ignore"):
        values = [_wrapped(np.asarray(y), type) for y, type in zip(oracle(op, *wide), results, strict=True)]
        shapes = [y.shape for y in values]
        assert shapes == [type.shape for type in results], f"the oracle of {op} gives {shapes}"
        found = [_exact(y, type, engine, rule) for y, type in zip(values, results)]
        if isinstance(rule, Sums):
            _sum_bounds(op, oracle, rule, types, wide, found, engine)
        elif isinstance(rule, Smooth):
            _smooth_bounds(op, oracle, rule, types, wide, found, engine)
        for each in found:
            _open_where_large(each)
    return found


def of_kernel(op: Op, found: Sequence[Expected], arrays: Sequence[Array], way: str) -> list[Expected]:
    """What the cpu engine's kernel of this name must give, of what the engine must."""
    wide, way = widened(arrays), way.removesuffix(IN_FLOAT32)
    strange = not all(np.isfinite(x).all() for x in wide if x.dtype.kind == "f")
    kept = []
    for each in found:
        each = replace(each)
        if way in ("winograd", "tiles"):
            finite = np.isfinite(each.values)
            each.open = each.open | ~finite | (_scale(wide) > SPLIT_MOST)
            if way == "winograd":
                each.allowed = each.allowed + WINOGRAD * np.abs(each.values[finite]).max(initial=0.0)
                each.open |= strange
        if way == "onednn" and strange and any(x.dtype == ml_dtypes.bfloat16 for x in arrays):
            if op.name.startswith("conv"):
                each.open = each.open | True
            elif op.name.startswith("matmul"):
                each.open = each.open | ~np.isfinite(each.values)
        kept.append(each)
    return kept


def _wrapped(y: Array, type: TensorType) -> Array:
    """Python's integers as the type has them."""
    if type.dtype.is_float or y.dtype == type.dtype.numpy:
        return np.asarray(y, np.float64) if type.dtype.is_float else y
    bits = 8 * type.dtype.itemsize
    flat = [int(n) % (1 << bits) for n in y.reshape(-1).tolist()]
    return np.array(flat, np.uint64).astype(f"uint{bits}").view(type.dtype.numpy).reshape(y.shape)


def _exact(y: Array, type: TensorType, engine: str, rule: Rule) -> Expected:
    allowed = np.zeros(y.shape)
    bits = isinstance(rule, Exact) and rule.bits
    if type.dtype.is_float and not bits:
        allowed = unit(type.dtype) * np.abs(y) * (not isinstance(rule, Exact)) + _least(type.dtype)
        allowed += LEAST * (engine == "cpu")
    return Expected(type, y, allowed, np.zeros(y.shape, bool), bits)


def _wide_unit(types: Sequence[TensorType], result: TensorType) -> float:
    """In which sums are taken."""
    floats = [unit(type.dtype.wide) for type in types if type.dtype.is_float]
    return max([unit(result.dtype.wide), *floats]) if result.dtype.is_float else 0.0


def _scale(wide: Sequence[Array]) -> float:
    """Of what is flushed in one input, what the others may make."""
    most = 1.0
    for x in wide:
        if x.dtype.kind == "f" and x.size:
            most *= max(1.0, float(np.abs(x[np.isfinite(x)]).max(initial=0.0)))
    return most


def _sum_bounds(
    op: Op,
    oracle: Oracle,
    rule: Sums,
    types: Sequence[TensorType],
    wide: list[Array],
    found: list[Expected],
    engine: str,
) -> None:
    terms = rule.terms(op, types)
    sizes = oracle(op, *(np.abs(x) if x.dtype.kind == "f" else x for x in wide))
    smallest, largest = rule.reach(op, wide)
    flushed = _flushed(op, oracle, wide) if engine == "cpu" else [np.zeros(each.values.shape, bool) for each in found]
    for each, size, infinite in zip(found, sizes, flushed):
        if each.type.dtype.is_float:
            size = np.asarray(size, np.float64)
            u = unit(each.type.dtype) if rule.narrow else _wide_unit(types, each.type)
            most = _most(each.type.dtype if rule.narrow else each.type.dtype.wide)
            if rule.rounded:
                between = min((x.dtype for x in types[:2]), key=_most)
                each.allowed, most = each.allowed + unit(between) * size, min(most, _most(between))
            each.allowed = each.allowed + 1.1 * (terms + 4) * u * size + terms * _least(each.type.dtype.wide)
            if rule.flushed and any(x.dtype.is_narrow for x in types[:2]):
                each.allowed = each.allowed + LEAST
            if engine == "cpu":
                each.allowed = each.allowed + terms * LEAST * _scale(wide)
                if op.accumulates and each.type.dtype.is_narrow:
                    each.allowed = each.allowed + unit(each.type.dtype) * size
                each.open |= infinite
            each.open |= np.isfinite(size) & ~(size * max(1, terms) < most)  # before it is a mean, say
            each.open |= (largest > np.log2(most)) | (smallest < np.log2(_least(each.type.dtype.wide)))
            if _scale(wide) * terms > most:  # finite terms may add up to another infinity
                each.open |= np.isinf(each.values)


def _flushed(op: Op, oracle: Oracle, wide: list[Array]) -> list[Array]:
    """Where zeros in place of what is denormal meet infinities: products of both are NaN."""
    zeroed = [np.where(np.abs(x) < LEAST, 0.0, x) if x.dtype.kind == "f" else x for x in wide]
    pairs = [map(np.asarray, pair) for pair in zip(oracle(op, *wide), oracle(op, *zeroed))]
    return [np.isnan(z) & ~np.isnan(y) if y.dtype.kind == "f" else np.zeros(y.shape, bool) for y, z in pairs]


def _smooth_bounds(
    op: Op,
    oracle: Oracle,
    rule: Smooth,
    types: Sequence[TensorType],
    wide: list[Array],
    found: list[Expected],
    engine: str,
) -> None:
    rng = np.random.default_rng(0)
    narrow = [type.dtype for type in types if type.dtype.is_narrow]
    step = max([_wide_unit(types, each.type) for each in found], default=0.0)
    if narrow and (rule.narrow or (rule.narrow_on_cpu and engine == "cpu")):
        step = max(map(unit, narrow))
    least = max([_least(type.dtype.wide) for type in types if type.dtype.is_float], default=0.0)
    moves = [np.zeros(()) for _ in found]
    for _ in range(6):
        moved = []
        for x in wide:
            if x.dtype.kind == "f":
                x = x * (1 + 2 * step * rng.choice([-1.0, 1.0], x.shape))
                x = x + (LEAST if engine == "cpu" else least) * rng.choice([-1.0, 1.0], x.shape)
            moved.append(x)
        for i, y in enumerate(oracle(op, *moved)):
            if found[i].type.dtype.is_float:
                off = np.abs(np.asarray(y, np.float64) - found[i].values)
                moves[i] = np.maximum(moves[i], off[np.isfinite(off)].max(initial=0.0))
    terms = rule.terms(op, types)
    for each, most in zip(found, moves):
        if each.type.dtype.is_float:
            largest = np.abs(each.values[np.abs(each.values) < 1e30]).max(initial=0.0)
            largest = max(largest, rule.cancels(op, wide))
            each.allowed = each.allowed + terms * (_least(each.type.dtype.wide) + _least(each.type.dtype))
            u = _wide_unit(types, each.type)
            each.allowed = each.allowed + 6 * most + (2 * SHARE_OF_SMALLEST * step + terms * u) * largest
    # Squares of such numbers, and sums of them, leave the type of sums.
    if any(x.dtype.kind == "f" and (np.abs(x[np.isfinite(x)]).max(initial=0.0) > 1e15) for x in wide):
        for each in found:
            each.open |= True


def _open_where_large(each: Expected) -> None:
    """Where a result may be too large for its type."""
    if each.type.dtype.is_float and not each.bits:
        reach = np.abs(each.values) + np.where(np.isfinite(each.allowed), each.allowed, np.inf)
        near = ~(reach < _most(each.type.dtype) * (1 - 2 * unit(each.type.dtype)))
        each.open |= np.isfinite(each.values) & near


def _of_expressions(
    op: Any, types: Sequence[TensorType], wide: list[Array], results: Sequence[TensorType], engine: str
) -> list[Expected]:
    found = []
    for text, type in zip(op.exprs, results):
        args = [np.broadcast_to(x, type.shape) for x in wide]
        numbers = evaluate(parse_expr(text), args, [each.dtype for each in types])
        samples = np.broadcast_to(numbers.samples, (len(numbers.samples), *type.shape))
        values, unsure = samples[0], np.broadcast_to(np.asarray(numbers.open), samples.shape).any(0)
        if engine == "cpu":
            unsure = unsure | np.broadcast_to(np.asarray(numbers.tiny), (1, *type.shape))[0]
        if type.dtype.is_float:
            values = values.astype(np.float64)
            same = np.isnan(samples) == np.isnan(values)
            same &= np.isinf(samples) == np.isinf(values)
            with np.errstate(all="ignore"):
                off = np.abs(samples - values)
                off = np.where(np.isfinite(off), off, 0.0).max(0)
                allowed = 3 * off + 2 * unit(type.dtype) * np.abs(values) + 2 * _least(type.dtype)
            unsure = unsure | ~same.all(0)
            if engine == "cpu":
                allowed = allowed + float(np.finfo(type.dtype.wide.numpy).tiny)
            each = Expected(type, values, allowed, unsure)
            _open_where_large(each)
        else:
            each = Expected(type, values, np.zeros(type.shape), unsure | (samples != values).any(0))
        found.append(each)
    return found


def complaint(found: Array, each: Expected) -> str | None:
    """How an output differs from what it may be, or None."""
    if found.shape != each.type.shape or found.dtype != each.type.dtype.numpy:
        return f"is {found.dtype}{list(found.shape)}, and should be {each.type}"
    if not each.type.dtype.is_float:
        wrong = (found != each.values) & ~each.open
    elif each.bits:
        wanted = each.values.astype(np.float32 if each.type.dtype.itemsize < 4 else np.float64).astype(found.dtype)
        same = (found == wanted) & (np.signbit(found) == np.signbit(wanted))
        wrong = ~(same | (np.isnan(found) & np.isnan(wanted)))
    else:
        ours = found.astype(np.float64)
        with np.errstate(all="ignore"):
            near = np.abs(ours - each.values) <= each.allowed
        same = np.where(
            np.isfinite(each.values), near, (ours == each.values) | (np.isnan(ours) & np.isnan(each.values))
        )
        wrong = ~(same | each.open)
    if not wrong.any():
        return None
    at = tuple(int(i) for i in np.argwhere(wrong)[0])
    allowed = float(each.allowed[at])
    return (
        f"{int(wrong.sum())} of {wrong.size} elements are wrong; the first, {at}, is {found[at]} and should be "
        f"{each.values[at]} within {allowed:.3g}"
    )
