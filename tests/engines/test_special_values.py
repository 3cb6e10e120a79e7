"""Every scalar function of special values, in whole sessions: what each engine gives beside NumPy in float64.

`docs/engines.md` says where engines may differ, and `tests/sweep/bounds.py` by how much.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import ml_dtypes
import numpy as np
import pytest

import foreplan as fp
from foreplan.graph import DType, GraphBuilder, TensorType, as_dtype
from foreplan.graph.types import BOOL
from foreplan.ops.expr import FUNCTIONS
from foreplan.ops.map import Map
from tests.engines.engine import require
from tests.kernels import COMPUTED, RENAMED, is_function_of
from tests.sweep.bounds import complaint, expectation
from tests.sweep.table import ENTRIES

USUAL = ("float32", "float64", "bfloat16", "int32")
TYPES = [pytest.param(x, id=x.name, marks=[] if x.name in USUAL else pytest.mark.thorough) for x in COMPUTED]
TOGETHER = 16  # expressions in one map
EITHER_ZERO = ("max", "min", "clip", "relu", "sign")  # as `docs/engines.md` says


def special(dtype: DType, few: bool = False) -> np.ndarray:
    """Zeros, halfway cases, limits, what is denormal, infinite or no number, and some drawn."""
    if dtype == BOOL:
        return np.array([False, True])
    if not dtype.is_float:
        info = np.iinfo(dtype.numpy)
        whole = [
            0,
            1,
            2,
            3,
            7,
            31,
            100,
            info.max,
            info.max - 1,
            info.min,
            info.min + 1,
            *([-1, -2, -7] * (info.min < 0)),
        ]
        return np.array(whole, dtype.numpy)
    info = ml_dtypes.finfo(dtype.numpy)
    tiny, least, largest, eps = (float(x) for x in (info.tiny, info.smallest_subnormal, info.max, info.eps))
    sizes = [0.0, least, tiny / 4, tiny - least, tiny, 1.0, 0.5, largest, np.inf]
    if not few:
        sizes += [3 * least, tiny * 1.5, np.sqrt(tiny), np.sqrt(largest), largest / 2, 1 + eps, 1 - eps / 2]
        sizes += [1.5, 2.5, 3.5, 0.5 - eps / 4, 1 / eps - 0.5, 1 / eps, 2 / eps, 10.0, 88.5, 89.5, 104.5, 710.0, np.pi]
        sizes += [127.0, 128.0, 255.0, 256.0, 2.0**31, 2.0**31 - 128, 2.0**32, 2.0**63, 2.0**64]
    with np.errstate(over="ignore"):
        found = np.array([*sizes, *(-x for x in sizes), np.nan]).astype(dtype.numpy)
    rng = np.random.default_rng(1)
    bits = rng.integers(0, 256, (2 if few else 12, dtype.itemsize), np.uint8).view(dtype.numpy).reshape(-1)
    return np.concatenate([found, bits])


def grid(dtype: DType, arity: int) -> list[np.ndarray]:
    """All combinations of special values as arguments."""
    values = special(dtype, few=arity == 3)
    return [np.array(x) for x in zip(*itertools.product(values, repeat=arity))]


def texts(dtype: DType) -> dict[str, int]:
    """Expressions, and how many arguments they have."""
    found = {}
    for name, function in FUNCTIONS.items():
        if is_function_of(name, dtype) and name != "where":
            arguments = ", ".join(f"a{i}" for i in range(function.arity))
            found[f"{RENAMED.get(name, name)}({arguments})"] = function.arity
    return found | {f"{to.name}(a0)": 1 for to in COMPUTED if to != dtype} | {"where((a0 < a1), a1, a0)": 2}


def _batches(texts: list[str]) -> Iterator[tuple[str, ...]]:
    return (tuple(texts[start : start + TOGETHER]) for start in range(0, len(texts), TOGETHER))


def complaints(name: str, args: list[np.ndarray], y: np.ndarray, engine: str) -> Iterator[str]:
    """What is wrong with a function's values."""
    (each,) = expectation(Map((name,)), ENTRIES["map"].oracle, ENTRIES["map"].rule, args, engine)
    if said := complaint(y, each):
        yield f"{name}: {said}"
    elif each.type.dtype.is_float and name.partition("(")[0] not in EITHER_ZERO:
        turned = (y == 0) & (each.values == 0) & ~each.open & (np.signbit(y) != np.signbit(each.values))
        for at in np.flatnonzero(turned)[:1]:
            yield f"{name} of {[x[at] for x in args]}: zero of the other sign"


@pytest.mark.parametrize("target", ["numpy", "cpu:threads=1"])
@pytest.mark.parametrize("dtype", TYPES)
def test_functions_of_special_values(dtype: DType, target: str) -> None:
    if target != "numpy":
        require("cpu")
    b = GraphBuilder("special")
    arrays = {arity: grid(dtype, arity) for arity in (1, 2, 3)}
    given = {f"x{arity}_{i}": x for arity, xs in arrays.items() for i, x in enumerate(xs)}
    values = {name: b.input(name, TensorType(dtype, x.shape)) for name, x in given.items()}
    cases = texts(dtype)
    outputs = {}
    for arity in (1, 2, 3):
        for some in _batches([text for text, count in cases.items() if count == arity]):
            outputs |= zip(some, b.node(Map(some), *(values[f"x{arity}_{i}"] for i in range(arity))))
    found = fp.compile(b.finish(outputs), target=target).bind().step(given).outputs
    engine = target.partition(":")[0]
    wrong = [said for text, arity in cases.items() for said in complaints(text, arrays[arity], found[text], engine)]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("source", ["float32", "float64", "float16"])
def test_what_an_integer_type_does_not_hold(source: str) -> None:
    """On `cpu`, NaN and what is beyond 32 or 64 bits give the least number, and narrower types take its last bits, as
    NumPy's conversions do on x86. In range, all engines truncate.
    """
    require("cpu")
    x = special(as_dtype(source))
    names = ("int8", "int16", "int32", "int64", "uint8", "uint16")
    graph = fp.trace(lambda x: {name: x.astype(name) for name in names}, fp.spec(x.shape, source))
    found = fp.compile(graph, target="cpu:threads=1").bind().step({"x": x}).outputs
    for name in names:
        bits = 64 if name == "int64" else 32
        least = -(1 << bits - 1)
        whole = [int(v) if np.isfinite(v) and least - 1 < v < -least else least for v in x.astype(np.float64).tolist()]
        wanted = np.array([each % (1 << bits) for each in whole], f"uint{bits}").astype(name)
        np.testing.assert_array_equal(found[name], wanted, err_msg=name)
