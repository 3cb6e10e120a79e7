"""Calls of compiled functions joined into one: in order, whatever stands between them, failures told."""

from __future__ import annotations

import platform
from contextlib import nullcontext
from functools import partial

import numpy as np
import pytest

from foreplan.graph.types import FLOAT32
from foreplan.runtime.cpu.codegen.loops import operand_kind
from foreplan.runtime.cpu.codegen.maps import Loop, compiled_loop
from foreplan.runtime.cpu.codegen.native import joined
from foreplan.runtime.cpu.gemm.products import matrix
from foreplan.runtime.cpu.onednn import library as c
from foreplan.runtime.cpu.onednn import primitives
from foreplan.runtime.kernel import Refused, Run, one_after_another
from tests.cpu.check import needs_onednn

pytestmark = needs_onednn()


def times(x: np.ndarray, factor: float) -> Run:
    """A call that multiplies an array in place, by a compiled loop."""
    kind = operand_kind(FLOAT32, 4)
    loop = compiled_loop(Loop((f"(a0 * {float(factor)})",), (kind,), (kind,), 1))
    return partial(loop, 0, 1, np.array([x.size, x.ctypes.data, 4, x.ctypes.data, 4], np.int64).tobytes())


def product(a: np.ndarray, b: np.ndarray, y: np.ndarray) -> Run:
    made = primitives.matmul(matrix(*a.shape), matrix(*b.shape), matrix(*y.shape))
    assert not made.scratchpad or made.scratchpad < 1 << 20
    scratch = np.zeros(made.scratchpad + 1, np.uint8)
    addresses = {c.SRC: a.ctypes.data, c.WEIGHTS: b.ctypes.data, c.DST: y.ctypes.data}
    call = made.bind({**addresses, c.SCRATCHPAD: scratch.ctypes.data} if made.scratchpad else addresses)
    call.scratch = scratch  # type: ignore[attr-defined]
    return call


def test_compiled_calls_become_one_and_others_stay_between_them() -> None:
    x, y, seen = np.full((4, 4), 1, np.float32), np.zeros((4, 4), np.float32), []
    identity = np.eye(4, dtype=np.float32)
    calls = [
        times(x, 2),
        one_after_another(times(x, 3), product(x, identity, y)),
        lambda: seen.append((x[0, 0], y[0, 0])),
        times(x, 5),
        times(y, 7),
    ]
    runs = joined(calls)
    assert len(runs) == 3
    for _ in range(2):
        x[...], y[...] = 1, 0
        for run in runs:
            run()
        assert seen.pop() == (6, 6) and (x == 30).all() and (y == 42).all()


def test_a_failure_is_raised_and_what_follows_does_not_run() -> None:
    x, y = np.full((4, 4), 1, np.float32), np.zeros((4, 4), np.float32)
    good = product(x, x, y)
    assert isinstance(good, partial)
    bad = partial(good.func, good.args[0], good.args[1], 0, good.args[3])  # without any of its arguments
    (run,) = joined([times(x, 2), bad, times(x, 2)])
    for doubled in (2, 4):
        with pytest.raises(Refused, match="oneDNN says"):
            run()
        assert (x == doubled).all()


@pytest.mark.skipif(
    platform.machine() not in ("x86_64", "AMD64"), reason="tests two bits of the register MXCSR, which only x86 has"
)
@pytest.mark.parametrize("fails", [False, True])
def test_denormal_numbers_are_zero_meanwhile_and_not_afterwards(fails: bool) -> None:
    """What would come out as one, and, of all but maps, what enters as one; whether calls come to their end or not."""
    least = np.finfo(np.float32).smallest_normal
    x, y = np.full((4, 4), least / 2, np.float32), np.full((4, 4), least, np.float32)
    ones, found = np.full((4, 4), 1e30, np.float32), np.ones((4, 4), np.float32)
    good = product(x, ones, found)
    assert isinstance(good, partial)
    bad = [partial(good.func, good.args[0], good.args[1], 0, good.args[3])] if fails else []
    (run,) = joined([good, times(x, 2), times(y, 0.5), *bad])
    with pytest.raises(Refused) if fails else nullcontext():
        run()
    assert (x == least).all() and not y.any() and not found.any()
    assert np.full(4, least, np.float32)[0] * np.float32(0.5) == least / 2 > 0
