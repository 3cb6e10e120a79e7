"""Every function of scalar expressions on every element type, as CUDA C++, against NumPy."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from foreplan.graph.types import BOOL, DTYPES, DType
from foreplan.ops.expr import FUNCTIONS
from foreplan.ops.map import Map
from tests.gpu.check import check, run
from tests.gpu.compiled import needs_gcc
from tests.kernels import RENAMED, is_function_of, numbers

pytestmark = [needs_gcc, pytest.mark.filterwarnings("ignore::RuntimeWarning")]


def is_exact(name: str) -> bool:
    return FUNCTIONS[name].result != "float" or name in ("div", "sqrt", "reciprocal")


def units(dtype: DType, count: int) -> float:
    """So many units in the last place."""
    return count * 2.0 ** -{2: 7, 4: 23, 8: 52}[dtype.itemsize if dtype.is_float else 4]


def calls(dtype: DType, arity: int, exact: bool) -> tuple[str, ...]:
    names = [n for n, f in FUNCTIONS.items() if n != "where" and f.arity == arity and is_exact(n) == exact]
    args = ", ".join(f"a{i}" for i in range(arity))
    return tuple(
        f"{RENAMED.get(name, name)}({args})" for name in names if name != "pow" and is_function_of(name, dtype)
    )


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


TEXTS = (
    "where((a0 > a1), a0, 0.25)",
    "where(and_((a0 > 0.0), (a1 < 1)), (a0 * 2), (a1 - 0.5))",
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
    check(Map(("(float32(a0) ** -1)",)), a, rtol=units(DTYPES["float32"], 2), atol=0)


@pytest.mark.parametrize("function", ["sin", "cos", "tan"])
def test_angles_of_any_size(function: str) -> None:
    """And those nearest to quarters of a turn, where all leading digits cancel."""
    rng = np.random.default_rng(0)
    bits = rng.integers(0, 1 << 32, 20_000, dtype=np.uint32).view(np.float32)
    quarters = (np.pi / 2 * rng.integers(1, 1 << 40, 5_000)).astype(np.float32)
    x = np.concatenate([bits[np.isfinite(bits)], quarters, np.pi / 2 * np.arange(1, 2_000)]).astype(np.float32)
    found = run(Map((f"{function}(a0)",)), [x])[0]
    wanted = getattr(np, function)(x.astype(np.float64))
    assert np.abs(found / wanted - 1)[np.abs(wanted) > np.finfo(np.float32).tiny].max() < 2.0**-21
