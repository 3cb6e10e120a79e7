"""Tensors put into larger ones or taken apart, however they lie."""

from __future__ import annotations

import numpy as np
import pytest

from foreplan.graph.types import DTYPES
from foreplan.ops.join import Concat, Pad, Unslice
from foreplan.ops.unstack import Unstack
from tests.engines.engine import Engine
from tests.kernels import as_images, dense, layouts


def tensor(shape: tuple[int, ...], seed: int, dtype: str = "float32") -> np.ndarray:
    return np.random.default_rng(seed).integers(-99, 99, shape).astype(DTYPES[dtype].numpy)


@pytest.mark.parametrize("axis", range(4))
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int64", "bool"])
def test_concat(engine: Engine, axis: int, dtype: str) -> None:
    shape = [2, 3, 5, 4]
    given = [tensor((*shape[:axis], extent, *shape[axis + 1 :]), extent, dtype) for extent in (1, 6, 2)]
    first_last = [*as_images(*given[:1]), *dense(*given[1:])]
    engine.check_lying(Concat(axis), *given, ways=[*layouts(*given), first_last])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int64", "bool"])
def test_unstack(engine: Engine, dtype: str) -> None:
    for shape in ((3, 4, 5, 2), (1, 7), (4,)):
        x = tensor(shape, 8, dtype)
        engine.check_lying(Unstack(), x, ways=layouts(x))


@pytest.mark.parametrize("mode", ["constant", "edge", "reflect", "wrap"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "int32"])
def test_pad(engine: Engine, mode: str, dtype: str) -> None:
    x = tensor((3, 4, 5, 6), 3, dtype)
    for pads in (((0, 0), (0, 0), (1, 2), (3, 1)), ((1, 0), (2, 3), (0, 0), (0, 4))):
        engine.check_lying(Pad(pads, 7.0, mode), x, ways=layouts(x))
    engine.check(Pad(((2, 1),), -1.0, mode), tensor((4,), 4, dtype))


def test_what_a_slice_took_is_put_back(engine: Engine) -> None:
    x = tensor((2, 3, 2, 2), 4)
    for shape, starts, steps in (
        ((2, 7, 5, 4), (0, 1, 2, 0), (1, 2, 1, 3)),
        ((5, 3, 6, 2), (3, 2, 4, 1), (-2, -1, 1, -1)),
        ((2, 8, 2, 2), (0, 2, 0, 0), (1, 2, 1, 1)),
    ):
        engine.check_lying(Unslice(shape, starts, steps), x, ways=layouts(x))
    engine.check(Unslice((9, 10), (1, 8), (3, -2)), tensor((3, 4), 5))
    engine.check(Unslice((5,), (4,), (-1,)), tensor((0,), 6))
