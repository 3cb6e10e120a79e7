"""How geometry is drawn: extents, types, values and layouts, from a `random.Random`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from random import Random

import numpy as np

from foreplan.base.errors import ForeplanError
from foreplan.graph import DType, TensorType, as_dtype
from tests.sweep.case import LAYOUTS, Case, Given
from tests.sweep.values import ORDINARY

EXTENTS = (1, 1, 2, 2, 3, 3, 4, 5, 7, 8, 13, 16, 17)
# An axis of more than a warp, a block, a part of a sum: of several threads, and of what they leave.
LONG = (31, 33, 64, 65, 127, 128, 255, 257, 513, 1000, 1025, 2049, 4096)
FLOAT_TYPES = ("float32", "float32", "float32", "float32", "bfloat16", "bfloat16", "float16", "float64")
INTEGER_TYPES = ("int64", "int32", "int16", "int8", "uint64", "uint32", "uint16", "uint8")
INDEX_TYPES = ("int64", "int64", "int32", "int16", "int8", "uint8", "uint32", "uint64")
STRANGE = ("tiny", "huge", "nonfinite", "mixed")


def drawn(name: str, seed: int, number: int) -> Random:
    """The generator of a draw: a name, a seed and a number give the same case in every process."""
    return Random(f"{name} {seed} {number}")


def extent(rng: Random, most: int = 17) -> int:
    """One extent; small ones, primes, and those of whole vectors."""
    return rng.choice([n for n in EXTENTS if n <= most])


def shape(rng: Random, least: int = 0, most: int = 4, size: int = 4096, empty: bool = True) -> tuple[int, ...]:
    """Extents of `least` to `most` axes (sometimes 8), one long at times; of about `size` elements at most."""
    rank = rng.randint(least, 8 if rng.random() < 0.1 else most)
    found: list[int] = []
    left = size
    if rank and rng.random() < 0.15 and size >= LONG[0]:
        found.append(rng.choice([n for n in LONG if n <= size]))
        left = max(1, size // found[0])
    for _ in range(rank - len(found)):
        found.append(extent(rng, max(1, min(17, left))))
        left //= found[-1]
    rng.shuffle(found)
    if empty and found and rng.random() < 0.04:
        found[rng.randrange(rank)] = 0
    return tuple(found)


def any_axis(rng: Random, extents: Sequence[int]) -> int:
    """An axis; the longest more often than others."""
    return rng.randrange(len(extents)) if rng.random() < 0.5 else list(extents).index(max(extents))


def float_type(rng: Random) -> DType:
    """A floating-point type; float32 most often."""
    return as_dtype(rng.choice(FLOAT_TYPES))


def any_type(rng: Random) -> DType:
    """Any type."""
    return float_type(rng) if rng.random() < 0.5 else as_dtype(rng.choice((*INTEGER_TYPES, "bool")))


def layout(rng: Random, rank: int) -> str:
    """How a tensor lies: in C order half of the time."""
    return "dense" if rank == 0 or rng.random() < 0.5 else rng.choice(list(LAYOUTS))


def given(
    rng: Random,
    dtype: DType,
    extents: Sequence[int],
    values: str | None = None,
    strange: Sequence[str] = STRANGE,
) -> Given:
    """An input of a type and shape; floats of any kind unless they are named, integers of all patterns."""
    type = TensorType(dtype, tuple(extents))
    if values is None and dtype.is_float:
        values = rng.choice(strange) if strange and rng.random() < 0.12 else rng.choice(ORDINARY)
    return Given(type, values or "bits", rng.getrandbits(16), layout(rng, len(type.shape)))


def plain(rng: Random, dtype: DType, extents: Sequence[int], values: str = "normal") -> Given:
    """An input of ordinary numbers."""
    return given(rng, dtype, extents, values)


def indices(rng: Random, extents: Sequence[int], low: int, high: int) -> Given:
    """Integers in [low, high), of a type that holds them."""
    found = as_dtype(rng.choice(INDEX_TYPES))
    if found.category == "uint":
        low = max(0, low)
    limits = np.iinfo(found.numpy)
    low, high = max(low, int(limits.min)), min(high, int(limits.max))
    return Given(
        TensorType(found, tuple(extents)), f"{low}:{max(high, low + 1)}", rng.getrandbits(16), layout(rng, len(extents))
    )


def permutation(rng: Random, rank: int) -> tuple[int, ...]:
    """Axes in any order."""
    axes = list(range(rank))
    rng.shuffle(axes)
    return tuple(axes)


def broadcastable(rng: Random, extents: Sequence[int]) -> tuple[int, ...]:
    """A shape that broadcasts to this one."""
    keep = extents[rng.randint(0, len(extents)) :] if rng.random() < 0.3 else extents
    return tuple(1 if rng.random() < 0.25 else extent for extent in keep)


def emptied(case: Case, rng: Random) -> Case:
    """The same with nothing along all axes of one extent, or along one axis; as it is where the op takes neither."""
    axes = [(i, axis) for i, given in enumerate(case.inputs) for axis in range(given.type.rank)]
    if not axes:
        return case
    chosen = rng.choice(axes)
    extent = case.inputs[chosen[0]].type.shape[chosen[1]]
    alike = [(i, axis) for i, axis in axes if case.inputs[i].type.shape[axis] == extent]
    same_axis = [(i, axis) for i, axis in alike if axis == chosen[1]]
    for which in (same_axis, alike, [chosen]):
        inputs = tuple(_without(given, {axis for i, axis in which if i == k}) for k, given in enumerate(case.inputs))
        try:
            case.op.infer([given.type for given in inputs])
        except (ForeplanError, ValueError, IndexError):
            continue
        return Case(case.op, inputs)
    return case


def _without(given: Given, axes: set[int]) -> Given:
    shape = tuple(0 if axis in axes else n for axis, n in enumerate(given.type.shape))
    return replace(given, type=given.type.with_shape(shape))
