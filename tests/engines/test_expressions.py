"""Every function of scalar expressions on every element type, as machine code and as CUDA C++, against NumPy."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from foreplan.base.errors import ShapeError
from foreplan.graph.types import BOOL, DTYPES, FLOAT32, DType
from foreplan.ops.expr import FUNCTIONS, infer_dtypes, parse_expr
from foreplan.ops.map import Map
from tests.engines.engine import Engine
from tests.kernels import COMPUTED, RENAMED, is_function_of, numbers

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
COMMON = ("float32", "float64", "float16", "int64", "int32", "uint8", "bool")
TYPES = [pytest.param(x, id=x.name, marks=[] if x.name in COMMON else pytest.mark.slow) for x in COMPUTED]
TOGETHER = 16  # expressions in one map


def units(dtype: DType, count: int) -> float:
    """Units in the last place, beside a number's size."""
    return count * 2.0 ** -{"bfloat16": 7, "float16": 10, "float64": 52}.get(dtype.name, 23)


def is_exact(name: str) -> bool:
    """Whether results are rounded in one way alone."""
    return FUNCTIONS[name].result != "float" or name in ("div", "sqrt", "reciprocal")


def check(engine: Engine, texts: tuple[str, ...], *given: np.ndarray, rtol: float = 0.0, atol: float = 0.0) -> None:
    """Assert it of expressions, many in one map."""
    for start in range(0, len(texts), TOGETHER):
        engine.check(Map(texts[start : start + TOGETHER]), *given, rtol=rtol, atol=atol)


@pytest.mark.parametrize("dtype", TYPES)
def test_functions_give_what_numpy_gives(engine: Engine, dtype: DType) -> None:
    for arity in (1, 2, 3):
        grid = np.array(list(product(numbers(dtype).tolist(), repeat=arity))).astype(dtype.numpy)
        given, arguments = np.ascontiguousarray(grid.T), ", ".join(f"a{i}" for i in range(arity))
        groups: dict[tuple[float, float], list[str]] = {}
        for name, function in FUNCTIONS.items():
            if name in ("where", "pow") or function.arity != arity or not is_function_of(name, dtype):
                continue
            # What is no normal number may be zero on cards, and is zero where SciPy gives a sigmoid.
            least = 2e-38 if engine.name == "cuda" or name == "sigmoid" else 0.0
            near = (0.0, 0.0) if is_exact(name) else (units(dtype, 4), least)
            groups.setdefault(near, []).append(f"{RENAMED.get(name, name)}({arguments})")
        for (rtol, atol), texts in groups.items():
            check(engine, tuple(texts), *given, rtol=rtol, atol=atol)


@pytest.mark.parametrize("dtype", [each for each in TYPES if each.values != (BOOL,)])
def test_powers(engine: Engine, dtype: DType) -> None:
    some, rtol = numbers(dtype), units(dtype, 4) if dtype.is_float else 0.0
    base, exponent = np.repeat(some, 4), np.tile(np.array([0, 1, 2, 5], dtype.numpy), some.size)
    check(engine, ("(a0 ** a1)", "(a0 ** 2)", "(a0 ** 3)"), base, exponent, rtol=rtol)
    if dtype.is_float:
        base, exponent = np.repeat(some, some.size), np.tile(some, some.size)
        check(engine, ("(a0 ** a1)",), base, exponent, rtol=rtol)


@pytest.mark.parametrize("old", COMPUTED, ids=str)
def test_conversions_give_what_numpy_gives(engine: Engine, old: DType) -> None:
    given = numbers(old)
    if old.is_float:
        given = np.concatenate([given, np.linspace(-3, 3, 999).astype(old.numpy)])
    check(engine, tuple(f"{new}(a0)" for new in COMPUTED if new.is_float or new == BOOL), given)
    for category in ("int", "uint"):
        if old.is_float:  # what an integer type does not hold has no conversion
            kept = np.isfinite(given) & (np.abs(given) < 128) & ((given > -1) | (category == "int"))
            given = given[kept]
        check(engine, tuple(f"{new}(a0)" for new in COMPUTED if new.category == category), given)


def test_float64_is_rounded_to_halves_once(engine: Engine) -> None:
    tie = 1 + 2.0**-11  # between two numbers of float16
    given = np.array([tie, tie + 2.0**-40, tie - 2.0**-40, -tie - 2.0**-40, 65519.999999, 65520.0, 1e300, 2.0**-25])
    check(engine, ("float16(a0)",), given)


TEXTS = (
    "where((a0 > a1), a0, 0.25)",
    "where(and_((a0 > 0.0), (a1 < 1)), (a0 * 2), (a1 - 0.5))",
    "(a0 ** 3)",
    "(abs(a0) ** 0.5)",
    "clip(a0, -1.0, 1.0)",
    "max(0.5, a0)",
    "min(a0, nan)",
    "(inf * a0)",
    "add(1, 2)",
    "((a0 + a1) * (a0 + a1))",
    "lt(a0, 2.5)",
    "int32(clip((a0 * 3.7), -100.0, 100.0))",
    "(a0 * a2)",
    "(a3 + a2)",
    "((a2 - 5) * 1.5)",
)
PAIRS = [("float32", "float32"), ("float64", "float64"), ("float16", "float16"), ("bfloat16", "bfloat16")]
PAIRS += [("float64", "int32"), ("float16", "float32"), ("int64", "int8")]


def has_type(text: str, types: tuple[str, ...]) -> bool:
    """Whether an expression of such elements has a type."""
    try:
        infer_dtypes([DTYPES[type] for type in types], parse_expr(text))
    except ShapeError:
        return False
    return True


@pytest.mark.parametrize("types", PAIRS, ids=" ".join)
def test_literals_and_mixed_types(engine: Engine, types: tuple[str, str]) -> None:
    rng, all_types = np.random.default_rng(0), (*types, "int64", "uint8")
    a, b = ((rng.standard_normal(1000) * 4).round(2).astype(DTYPES[type].numpy) for type in types)
    whole, small = rng.integers(-9, 9, 1000), rng.integers(0, 200, 1000).astype(np.uint8)
    texts = tuple(text for text in TEXTS if has_type(text, all_types))
    check(engine, texts, a, b, whole, small, rtol=units(DTYPES[types[0]], 2))
    check(engine, ("(float32(a0) ** -1)",), a, rtol=units(FLOAT32, 2))


def test_parts_of_literals_alone_are_as_exact_as_what_reads_them(engine: Engine) -> None:
    x, yes, n, big = np.array([1.5, -2.0, 0.15]), np.array([True, False, True]), np.array([1, 2, 3]), (1 << 24) + 1
    wanted = {
        "(a0 * where(a1, 0.1, 0.2))": x * np.where(yes, 0.1, 0.2),
        "(a0 * max(where(a1, 0.1, 0.2), 0.15))": x * np.where(yes, 0.15, 0.2),
        "(a0 + exp(0.5))": x + np.exp(0.5),
        "(a0 < where(a1, 0.15000000000000005, 0.2))": x < np.where(yes, 0.15000000000000005, 0.2),
        "float64(where(a1, 0.1, 0.2))": np.where(yes, 0.1, 0.2),
        f"(a2 * where(a1, {big}, 1))": n * np.where(yes, big, 1),
        f"int64(where(a1, {big}, 1))": np.where(yes, big, 1),
        "int64(where(a1, 0.9, 2.0))": np.where(yes, 0, 2),
    }
    for found, (text, each) in zip(engine.run(Map(tuple(wanted)), [x, yes, n]), wanted.items(), strict=True):
        np.testing.assert_allclose(found, each, rtol=4e-16, err_msg=text)


@pytest.mark.parametrize("function", ["sin", "cos", "tan"])
def test_angles_of_any_size(engine: Engine, function: str) -> None:
    """And those nearest to quarters of a turn, where all leading digits cancel."""
    rng = np.random.default_rng(0)
    bits = rng.integers(0, 1 << 32, 20_000, dtype=np.uint32).view(np.float32)
    quarters = (np.pi / 2 * rng.integers(1, 1 << 40, 5_000)).astype(np.float32)
    x = np.concatenate([bits[np.isfinite(bits)], quarters, np.pi / 2 * np.arange(1, 2_000)]).astype(np.float32)
    (found,) = engine.run(Map((f"{function}(a0)",)), [x])
    wanted = getattr(np, function)(x.astype(np.float64))
    assert np.abs(found / wanted - 1)[np.abs(wanted) > np.finfo(np.float32).tiny].max() < 2.0**-21
