"""oneDNN's products in parts: the same bits by any number of threads, and near what float64 gives."""

from __future__ import annotations

import numpy as np
import pytest

from foreplan.runtime.cpu.gemm.parts import Parts
from foreplan.runtime.cpu.onednn import library as c
from foreplan.runtime.cpu.threads import set_threads
from tests.cpu.check import laid_out, needs_onednn, scratch
from tests.cpu.products import normal, surroundings_are_kept, turned, window

pytestmark = needs_onednn()
SHAPES = {  # of both matrices, and the least number of parts
    "small": ((16, 9000), (9000, 24), 1),
    "a long sum": ((96, 4100), (4100, 150), 2),
    "rows": ((1000, 300), (300, 70), 4),
    "matrices": ((3, 130, 300), (3, 300, 140), 3),
    "one matrix for all": ((3, 130, 300), (1, 300, 140), 3),
    "of one": ((1, 130, 500), (1, 500, 260), 4),
    "one column": ((900, 20_000), (20_000, 1), 4),
}


def multiplied(a: np.ndarray, b: np.ndarray, onto: np.ndarray | None, threads: int) -> tuple[np.ndarray, int]:
    """What threads give, and how many parts there are; memory poisoned and surroundings watched."""
    y = np.full((*np.broadcast_shapes(a.shape[:-2], b.shape[:-2]), a.shape[-2], b.shape[-1]), np.nan, np.float32)
    y = y if onto is None else onto
    out = laid_out(y, window(y))
    set_threads(threads)
    try:
        parts = Parts(window(a), window(b), window(out), onto is not None)
        memory = scratch(parts.scratchpad)
        memory[...] = 0xFF
        places = {c.SRC: a, c.WEIGHTS: b, c.DST: out} | ({c.SCRATCHPAD: memory} if parts.scratchpad else {})
        call = parts.bind({argument: x.ctypes.data for argument, x in places.items()})
        call()
    finally:
        set_threads(1)
    assert surroundings_are_kept(out)
    return out, len(parts.ranges)


@pytest.mark.parametrize("adds", [False, True])
@pytest.mark.parametrize("name", SHAPES)
def test_bits_do_not_depend_on_the_number_of_threads(name: str, adds: bool) -> None:
    of_a, of_b, least = SHAPES[name]
    a, b = normal(*of_a), normal(*of_b, seed=1)
    shape = (*np.broadcast_shapes(of_a[:-2], of_b[:-2]), of_a[-2], of_b[-1])
    onto = normal(*shape, seed=2) if adds else None
    wanted = a.astype(np.float64) @ b + (0 if onto is None else onto)
    scale = np.abs(a).astype(np.float64) @ np.abs(b) + 10
    for x, z in ((a, b), (turned(a), b), (a, turned(b))):
        found = [multiplied(x, z, onto, threads) for threads in (1, 2, 5)]
        assert found[0][1] >= least
        assert found[0][0].tobytes() == found[1][0].tobytes() == found[2][0].tobytes()
        assert (np.abs(found[0][0] - wanted) <= 1e-6 * scale).all()
