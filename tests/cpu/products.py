"""What tests of products by different ways share: operands, and an update by a product."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from foreplan.graph import Window
from foreplan.runtime.cpu.codegen.epilogue import FURTHER, MADE, Made
from foreplan.runtime.cpu.gemm.blocked import Blocked
from foreplan.runtime.cpu.gemm.vectors import Vectors
from foreplan.runtime.cpu.onednn import library as c
from foreplan.runtime.cpu.threads import set_threads
from tests.cpu.check import WATCHED, laid_out, scratch, type_of

EPSILON = float(np.finfo(np.float32).eps)
BEHIND = 2**20  # bytes behind scratch memory that are watched
EXPRS = ("(a1 - (a3 * (a0 + (0.5 * ((0.5 * a2) + a0)))))", "((0.5 * a2) + a0)")


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def turned(x: np.ndarray) -> np.ndarray:
    """The same matrices, elements side by side along the other axis."""
    return np.ascontiguousarray(x.swapaxes(-1, -2)).swapaxes(-1, -2)


def window(x: np.ndarray) -> Window:
    return Window(type_of(x), x.strides)


def surroundings_are_kept(out: np.ndarray) -> bool:
    """Whether nothing was written before or behind what `laid_out` gave."""
    start = out.ctypes.data - out.base.ctypes.data
    return bool((out.base[:start] == WATCHED).all() and (out.base[start + out.nbytes :] == WATCHED).all())


def multiplied(
    way: type[Blocked] | type[Vectors], a: np.ndarray, b: np.ndarray, onto: np.ndarray | None = None, threads: int = 1
) -> np.ndarray:
    """What the kernel gives, twice over, its memory poisoned and the surroundings of its result watched."""
    y = np.full((*np.broadcast_shapes(a.shape[:-2], b.shape[:-2]), a.shape[-2], b.shape[-1]), np.nan, np.float32)
    results = []
    for poison in (0xFF, 0x7F):
        out = laid_out(y if onto is None else onto, Window.dense(type_of(y)))
        set_threads(threads)
        product = way(window(a), window(b), window(out), **{} if onto is None else {"add": True})
        memory = scratch(product.scratchpad + BEHIND)
        memory[...] = poison
        places = {c.SRC: a, c.WEIGHTS: b, c.DST: out, c.SCRATCHPAD: memory}
        product.bind({argument: x.ctypes.data for argument, x in places.items()})()
        assert (memory[product.scratchpad :] == poison).all()
        assert surroundings_are_kept(out)
        results.append(out)
    np.testing.assert_array_equal(*results)
    return results[0]


def made_of(
    way: type[Blocked] | type[Vectors],
    a: np.ndarray,
    b: np.ndarray,
    further: Sequence[np.ndarray],
    over: Sequence[int] = (),
    threads: int = 1,
) -> list[np.ndarray]:
    """Both outputs of an update, some in the place of further inputs, memory poisoned and surroundings watched."""
    shape, results = (a.shape[0], b.shape[1]), []
    for poison in (0xFF, 0x7F):
        arrays = [laid_out(x, window(x)) if x.ndim else x for x in further]
        fresh = np.full(shape, np.nan, np.float32)
        outs = [arrays[over[i]] if i < len(over) else laid_out(fresh, window(fresh)) for i in range(2)]
        set_threads(threads)
        made = Made(EXPRS, tuple(window(x).broadcast(shape) for x in arrays), tuple(window(x) for x in outs))
        product = way(window(a), window(b), window(outs[0]), made=made)
        assert set(enumerate(over)) <= set(made.overwrites())
        memory = scratch(product.scratchpad)
        memory[...] = poison
        places = {c.SRC: a, c.WEIGHTS: b, c.DST: outs[0], MADE + 1: outs[1], c.SCRATCHPAD: memory}
        places |= {FURTHER + i: x for i, x in enumerate(arrays)}
        product.bind({argument: x.ctypes.data for argument, x in places.items()})()
        assert all(map(surroundings_are_kept, outs))
        results.append(outs)
    for one, other in zip(*results):
        np.testing.assert_array_equal(one, other)
    return results[0]


def updated(product: np.ndarray, w: np.ndarray, v: np.ndarray, rate: np.ndarray) -> list[np.ndarray]:
    velocity = 0.5 * v + product
    return [w - rate * (product + 0.5 * velocity), np.broadcast_to(velocity, product.shape)]


def check_what_is_made(
    way: type[Blocked] | type[Vectors], a: np.ndarray, b: np.ndarray, kinds: str, allowed: float, threads: int = 1
) -> None:
    """Assert of an update by a product, its operands as large as it or broadcast, in their place and beside, that it is
    near float64's.

    Args:
        kinds: what one operand is: whole, a row, a column or a number.
        allowed: how far results may be, beside the sum of the magnitudes, in roundings of float32.
    """
    rows, columns = shape = a.shape[0], b.shape[1]
    shapes = {"whole": shape, "row": (columns,), "column": (rows, 1), "number": (1, 1)}
    w, v, rate = normal(*shape, seed=2), normal(*shapes[kinds], seed=3), np.full((), 0.25, np.float32)
    wanted = updated(a.astype(np.float64) @ b, w, v, rate)
    scale = np.abs(a).astype(np.float64) @ np.abs(b) + np.abs(w) + np.abs(v)
    for over in ((), (0,), (0, 1)) if kinds == "whole" else ((), (0,)):
        for ours, right in zip(made_of(way, a, b, [w, v, rate], over, threads), wanted):
            assert (np.abs(ours - right) <= scale * allowed * EPSILON).all()


def summed(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """a b in float32, float32[n, m], written out: products are rounded and added one by one, in blocks of 384, whose
    sums are added one by one. Its errors are the same on every processor.
    """
    total = np.zeros((len(a), b.shape[1]), np.float32)
    product, rows = np.empty_like(total), np.ascontiguousarray(a.T)
    for first in range(0, len(b), 384):
        block = np.zeros_like(total)
        for left, right in zip(rows[first : first + 384], b[first : first + 384]):
            np.multiply(left[:, None], right, out=product)
            block += product
        total += block
    return total
