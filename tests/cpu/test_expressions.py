"""Every function of scalar expressions on every element type, as machine code, against NumPy."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from foreplan.errors import ShapeError
from foreplan.graph.types import BOOL, DTYPES, DType
from foreplan.ops.expr import FUNCTIONS, infer_dtypes, parse_expr
from foreplan.ops.map import Map
from tests.cpu.check import check, needs_onednn
from tests.kernels import RENAMED, is_function_of, numbers

pytestmark = [needs_onednn(), pytest.mark.filterwarnings("ignore::RuntimeWarning")]
NAMES = [name for name in FUNCTIONS if name != "where"]
COMMON = ("float32", "float64", "float16", "int64", "int32", "uint8", "bool")


def arguments(name: str, dtype: DType) -> list[np.ndarray]:
    """Every combination of numbers."""
    some = numbers(dtype)
    if name == "pow" and not dtype.is_float:
        return [np.repeat(some, 4), np.tile(np.array([0, 1, 2, 5], dtype.numpy), some.size)]
    grid = np.array(list(product(some.tolist(), repeat=FUNCTIONS[name].arity))).astype(dtype.numpy)
    return [np.ascontiguousarray(column) for column in grid.T]


def tolerance(dtype: DType, function: str) -> float:
    """A unit or a few in the last place of what is not rounded in one way alone."""
    exact = FUNCTIONS[function].result != "float" or function in ("div", "sqrt", "reciprocal")
    if not dtype.is_float:
        dtype = DTYPES["float32"]
    return 0.0 if exact and function not in ("pow", "round") else 4 * 2.0 ** -{2: 7, 4: 23, 8: 52}[dtype.itemsize]


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        pytest.param(name, dtype, id=f"{name}-{dtype}", marks=[] if dtype.name in COMMON else pytest.mark.slow)
        for name, dtype in product(NAMES, DTYPES.values())
        if is_function_of(name, dtype)
    ],
)
def test_a_function_gives_what_numpy_gives(name: str, dtype: DType) -> None:
    given = arguments(name, dtype)
    text = f"{RENAMED.get(name, name)}({', '.join(f'a{i}' for i in range(len(given)))})"
    least = 2.0**-126 if name == "sigmoid" else 0.0  # SciPy gives zero for what is no normal number
    check(Map((text,)), *given, rtol=tolerance(dtype, name), atol=least)


@pytest.mark.parametrize("old", DTYPES.values(), ids=str)
@pytest.mark.parametrize("new", DTYPES.values(), ids=str)
def test_a_conversion_gives_what_numpy_gives(old: DType, new: DType) -> None:
    given = numbers(old)
    if old.is_float:
        given = np.concatenate([given, np.linspace(-3, 3, 999).astype(old.numpy)])
        if not new.is_float and new != BOOL:  # what an integer type does not hold has no conversion
            given = given[np.isfinite(given) & (np.abs(given) < 128) & ((given > -1) | (new.category == "int"))]
    check(Map((f"{new}(a0)",)), given, rtol=0, atol=0)


def test_float64_is_rounded_to_halves_once() -> None:
    tie = 1 + 2.0**-11  # between two numbers of float16
    given = np.array([tie, tie + 2.0**-40, tie - 2.0**-40, -tie - 2.0**-40, 65519.999999, 65520.0, 1e300, 2.0**-25])
    check(Map(("float16(a0)",)), given, rtol=0, atol=0)


TEXTS = (
    "where((a0 > a1), a0, 0.25)",
    "where(and_((a0 > 0.0), (a1 < 1)), (a0 * 2), (a1 - 0.5))",
    "(a0 ** 3)",
    "(float32(a0) ** -1)",
    "(abs(a0) ** 0.5)",
    "clip(a0, -1.0, 1.0)",
    "max(0.5, a0)",
    "min(a0, nan)",
    "add(1, 2)",
    "((a0 + a1) * (a0 + a1))",
    "lt(a0, 2.5)",
    "int32(clip((a0 * 3.7), -100.0, 100.0))",
)
PAIRS = (("float32", "float32"), ("float64", "int32"), ("float16", "float32"), ("int64", "int8"))


def typed(text: str, types: tuple[str, str]) -> bool:
    """Whether the expression has a type."""
    try:
        infer_dtypes([DTYPES[type] for type in types], parse_expr(text))
    except ShapeError:
        return False
    return True


@pytest.mark.parametrize(("text", "types"), [case for case in product(TEXTS, PAIRS) if typed(*case)])
def test_an_expression_gives_what_numpy_gives(text: str, types: tuple[str, str]) -> None:
    rng = np.random.default_rng(0)
    given = [(rng.standard_normal(37) * 4).round(2).astype(type) for type in types]
    check(Map((text,)), *given, rtol=2e-3 if types[0] == "float16" else 1e-6, atol=0)
