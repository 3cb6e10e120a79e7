"""Transcendental functions of float32 against float64, in lanes and in compiled loops."""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np
import pytest
import scipy.special

from foreplan import jit
from foreplan.graph import Window
from foreplan.jit import entries, llvm
from foreplan.jit.types import type_of as type_in_loops
from foreplan.ops.map import Map
from foreplan.runtime.cpu.codegen import functions
from tests.cpu.check import needs_onednn, run, type_of

pytestmark = needs_onednn()
# By function: the exact values, and how many units in the last place ours may err by.
FUNCTIONS: dict[str, tuple[Callable[[np.ndarray], np.ndarray], float]] = {
    "exp": (np.exp, 1.0),
    "expm1": (np.expm1, 1.5),
    "log": (np.log, 1.0),
    "log1p": (np.log1p, 1.5),
    "tanh": (np.tanh, 2.5),
    "sigmoid": (scipy.special.expit, 2.5),
    "erf": (scipy.special.erf, 1.5),
    "rsqrt": (lambda x: 1 / np.sqrt(x), 1.5),
}
EXTREMES = [0.0, -0.0, 1.0, -1.0, 0.9, 4.0, 88.72, 88.73, 88.9, 89.1, -87.4, -103.0, -104.0, 1e-45, -1e-45, 1.2e-38]
EXTREMES += [3.4e38, -3.4e38, np.inf, -np.inf, np.nan]


def sample(step: int) -> np.ndarray:
    """Every so manieth float32, of either sign, and the extremes."""
    bits = np.arange(0, 1 << 32, step, dtype=np.uint64).astype(np.uint32)
    return np.concatenate([bits.view(np.float32), np.array(EXTREMES, np.float32)])


def check(name: str, given: np.ndarray, found: np.ndarray, more: float = 0.0) -> None:
    """Within the function's error of the exact values; NaN and infinity where they are."""
    exact, most = FUNCTIONS[name]
    with np.errstate(all="ignore"):
        wanted = exact(given.astype(np.float64))
        rounded = wanted.astype(np.float32)
    finite = np.isfinite(rounded) & np.isfinite(found)
    np.testing.assert_array_equal(found[~finite], rounded[~finite])
    units = np.abs(found[finite] - wanted[finite]) / np.spacing(np.abs(rounded[finite])).astype(np.float64)
    worst = int(units.argmax())
    assert units[worst] <= most + more, (given[finite][worst], found[finite][worst], wanted[finite][worst])


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_map_has_the_function_of_every_number(name: str) -> None:
    given = sample(499)
    (found,) = run(Map((f"{name}(a0)",)), [given])
    check(name, given, found)


@pytest.mark.parametrize("name", ["exp", "expm1", "log", "tanh", "sigmoid", "erf"])
def test_compiled_loops_have_them_though_they_may_reorder_sums(name: str) -> None:
    function = getattr(functions, name + "32")

    @jit.compiled(vectorize=True, fastmath={"reassoc", "contract", "nsz", "arcp"})
    def loop(x: np.ndarray, y: np.ndarray) -> None:
        for i in range(x.size):
            y[i] = function(x[i])

    given = sample(20_011)
    found = np.empty_like(given)
    loop(given, found)
    check(name, given, found, more=0.75)
    text, _ = entries.written_module(loop.source, (type_in_loops(given), type_in_loops(found)))
    code = llvm.assembly(text, "loops")
    assert re.search(r"vfn?m(add|sub)\d+ps", code)  # fused multiply-adds of several lanes


def test_a_number_is_the_same_wherever_it_stands() -> None:
    given = sample(200_003)
    alone = np.concatenate([run(Map(("tanh(a0)",)), [given[i : i + 1]])[0] for i in range(0, given.size, 997)])
    (whole,) = run(Map(("tanh(a0)",)), [given], [Window.dense(type_of(given))])
    assert alone.tobytes() == whole[::997].tobytes()
