"""Every function of scalar expressions on every element type, as CUDA C++, against NumPy."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from foreplan.gpu.launch import Refused
from foreplan.gpu.map import elementwise
from foreplan.graph import TensorType, Window
from foreplan.graph.types import BOOL, DTYPES, DType
from foreplan.ops.expr import FUNCTIONS
from foreplan.ops.map import Map
from tests.gpu.binder import needs_gcc
from tests.gpu.check import DEVICE, check

pytestmark = [needs_gcc, pytest.mark.filterwarnings("ignore::RuntimeWarning")]
FLOATS = [0.0, -0.0, 0.5, -0.5, 1.0, -1.0, 1.5, -2.5, 2.0, 3.0, -7.25, 100.0, -30.0, 1e4, np.inf, -np.inf, np.nan]
WHOLE = [0, 1, 2, 3, 5, 7, 8, 31, 63, 100, 127]
RENAMED = {"and": "and_", "or": "or_", "not": "not_"}
OF_INTEGERS = ("bitand", "bitor", "bitxor", "bitnot", "shiftleft", "shiftright")
REFUSED = ("sub", "neg", "sign", "pow", "floordiv", "mod", "fmod", "truncdiv", "shiftleft", "shiftright")


def numbers(dtype: DType) -> np.ndarray:
    if dtype.is_float:
        return np.array(FLOATS).astype(dtype.numpy)
    if dtype == BOOL:
        return np.array([False, True])
    whole = WHOLE if dtype.category == "uint" else [*WHOLE, *(-x for x in WHOLE)]
    info = np.iinfo(dtype.numpy)
    return np.array([*whole, info.max, info.min]).astype(dtype.numpy)


def defined(name: str, dtype: DType) -> bool:
    if dtype == BOOL:
        return name not in (*REFUSED, "square") and (
            name in OF_INTEGERS or FUNCTIONS[name].result != "same" or name == "max"
        )
    if name == "round" and not dtype.is_float:
        return False  # NumPy gives floats
    return name not in (*OF_INTEGERS, "pow") if dtype.is_float else name != "pow"


def is_exact(name: str) -> bool:
    return FUNCTIONS[name].result != "float" or name in ("div", "sqrt", "reciprocal")


def units(dtype: DType, count: int) -> float:
    """So many units in the last place."""
    return count * 2.0 ** -{2: 7, 4: 23, 8: 52}[dtype.itemsize if dtype.is_float else 4]


def calls(dtype: DType, arity: int, exact: bool) -> tuple[str, ...]:
    names = [n for n, f in FUNCTIONS.items() if n != "where" and f.arity == arity and is_exact(n) == exact]
    args = ", ".join(f"a{i}" for i in range(arity))
    return tuple(f"{RENAMED.get(name, name)}({args})" for name in names if defined(name, dtype))


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
@pytest.mark.parametrize("exact", [True, False], ids=["exact", "rounded"])
def test_functions_give_what_numpy_gives(dtype: DType, exact: bool) -> None:
    for arity in (1, 2, 3):
        grid = np.array(list(product(numbers(dtype).tolist(), repeat=arity))).astype(dtype.numpy)
        given = [np.ascontiguousarray(column) for column in grid.T]
        texts = calls(dtype, arity, exact)
        # SciPy's sigmoid gives zero for what is no normal number.
        for start in range(0, len(texts), 16):
            check(
                Map(texts[start : start + 16]), *given, rtol=0 if exact else units(dtype, 4), atol=0 if exact else 2e-38
            )


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
def test_powers(dtype: DType) -> None:
    if dtype == BOOL:
        return
    some = numbers(dtype)
    base, exponent = np.repeat(some, 4), np.tile(np.array([0, 1, 2, 5], dtype.numpy), some.size)
    check(
        Map(("(a0 ** a1)", "(a0 ** 2)", "(a0 ** 3)")),
        base,
        exponent,
        rtol=units(dtype, 4) if dtype.is_float else 0,
        atol=0,
    )


@pytest.mark.parametrize("old", DTYPES.values(), ids=str)
def test_conversions_give_what_numpy_gives(old: DType) -> None:
    given = numbers(old)
    if old.is_float:
        given = np.concatenate([given, np.linspace(-3, 3, 999).astype(old.numpy)])
    floats = tuple(f"{new}(a0)" for new in DTYPES.values() if new.is_float or new == BOOL)
    check(Map(floats), given, rtol=0, atol=0)
    for category in ("int", "uint"):
        if old.is_float:  # what an integer type does not hold has no conversion
            kept = np.isfinite(given) & (np.abs(given) < 128) & ((given > -1) | (category == "int"))
            given = given[kept]
        check(Map(tuple(f"{new}(a0)" for new in DTYPES.values() if new.category == category)), given)


@pytest.mark.parametrize("function", REFUSED)
def test_what_truth_values_do_not_have_is_refused(function: str) -> None:
    x = Window.dense(TensorType(BOOL, (4,)))
    text = f"{function}({', '.join(['a0', 'a0'][: FUNCTIONS[function].arity])})"
    with pytest.raises(Refused, match="truth values"):
        elementwise(Map((text,)), [x, x], [x], DEVICE)


TEXTS = (
    "where((a0 > a1), a0, 0.25)",
    "where(and_((a0 > 0.0), (a1 < 1)), (a0 * 2), (a1 - 0.5))",
    "(float32(a0) ** -1)",
    "(abs(a0) ** 0.5)",
    "clip(a0, -1.0, 1.0)",
    "max(0.5, a0)",
    "min(a0, nan)",
    "(inf * a0)",
    "((a0 + a1) * (a0 + a1))",
    "lt(a0, 2.5)",
    "int32(clip((a0 * 3.7), -100.0, 100.0))",
    "(a0 * a2)",
    "(a3 + a2)",
    "((a2 - 5) * 1.5)",
)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float64"])
def test_literals_and_mixed_types(dtype: str) -> None:
    rng = np.random.default_rng(0)
    a, b = ((rng.standard_normal(1000) * 2).astype(DTYPES[dtype].numpy) for _ in range(2))
    whole, small = rng.integers(-9, 9, 1000), rng.integers(0, 200, 1000).astype(np.uint8)
    check(Map(TEXTS), a, b, whole, small, rtol=units(DTYPES[dtype], 2), atol=0)
