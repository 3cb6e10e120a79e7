"""What each axis of an op's tensors walks: factors, from which follows how the op computes a part of its results.

A factor is an index that an op's formula runs over, with a name and an extent: the m, n and k of a matrix product.
Each axis of each tensor is said as a sum of factors times steps. Shardy's sharding rules are such lists of factors, and
the indexing maps of MLIR's linalg such sums: "Composable and Modular Code Generation in MLIR", Vasilache et al., 2022.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from foreplan.graph.types import Shape

Place = tuple[int, int, int]  # a range of indices: the first, how many, the step


@dataclass(frozen=True)
class Dim:
    """One axis of a tensor: its index is `start + Σ step · factor`.

    Attributes:
        terms: (factor, step), the slowest factor first. Without any, the axis has one element, or all of it is read.
        start: the index where all factors are 0.
        dense: every index is one combination of the factors, in C order. Else the factors walk windows, which may
            overlap, leave something out, or reach beyond the ends into padding.
    """

    terms: tuple[tuple[str, int], ...] = ()
    start: int = 0
    dense: bool = True


Dims = tuple[Dim, ...]
REDUCTIONS = ("sum", "mean", "prod", "max", "min")
ONE = Dim()  # an axis of one element, or of which all is read


@dataclass(frozen=True)
class Axes:
    """What an op does along its axes. A factor that is in neither `whole` nor `sums` is in all outputs.

    Attributes:
        inputs, outputs: the axes of each tensor.
        extents: of the factors.
        whole: factors of which any part of a result needs all.
        sums: how results of parts of a factor that no output has make the whole: one of `REDUCTIONS`, or what
            `foreplan/passes/tensor/reductions.py` names.
    """

    inputs: Sequence[Dims]
    outputs: Sequence[Dims]
    extents: Mapping[str, int]
    whole: frozenset[str] = frozenset()
    sums: Mapping[str, str] = field(default_factory=dict)


class Part(NamedTuple):
    """What `Op.part` may ask of a part.

    Attributes:
        inputs, outputs: the shapes of its tensors.
        places: by name, the range of each factor that is not whole.
        windows: by input and axis that windows walk: the index of the first window's first element in the part's
            input, and how many elements of its windows lie before the tensor's first and behind its last one.
    """

    inputs: Sequence[Shape]
    outputs: Sequence[Shape]
    places: Mapping[str, Place]
    windows: Mapping[tuple[int, int], tuple[int, int, int]]


class Factors:
    """Writes the axes of an op's tensors, and collects the extents of their factors."""

    def __init__(self) -> None:
        self.extents: dict[str, int] = {}

    def dim(self, *factors: tuple[str, int]) -> Dim:
        """A dense axis of (factor, extent), the slowest first; those of extent 1 say nothing."""
        step, terms = 1, list[tuple[str, int]]()
        for name, extent in reversed(factors):
            if extent != 1:
                self.extents[name] = extent
                terms.append((name, step))
            step *= extent
        return Dim(tuple(terms[::-1]))

    def row(self, prefix: str, shape: Iterable[int], first: int = 0) -> Dims:
        """A factor for each axis: the prefix and the axis' number."""
        return tuple(self.dim((f"{prefix}{i}", extent)) for i, extent in enumerate(shape, first))

    def spread(self, prefix: str, shape: Shape, rank: int) -> Dims:
        """The axes of what broadcasts to a tensor with `rank` such factors."""
        return self.row(prefix, shape, rank - len(shape))

    def window(self, start: int, *terms: tuple[str, int, int]) -> Dim:
        """An axis that windows walk: (factor, extent, step) of each term."""
        self.extents.update((name, extent) for name, extent, _ in terms)
        return Dim(tuple((name, step) for name, _, step in terms), start, dense=False)

    def axes(
        self,
        inputs: Sequence[Dims],
        outputs: Sequence[Dims],
        whole: Iterable[str] = (),
        sums: Mapping[str, str] | None = None,
    ) -> Axes:
        """The declaration."""
        return Axes(inputs, outputs, self.extents, frozenset(whole), sums or {})


def broadcast_dims(dims: Dims, shape: Shape) -> Dims:
    """The axes of what broadcasts to a tensor of these axes."""
    return tuple(dim if extent != 1 else ONE for dim, extent in zip(dims[len(dims) - len(shape) :], shape))


def named(dims: Iterable[Dim]) -> set[str]:
    """The factors of axes."""
    return {name for dim in dims for name, _ in dim.terms}


def in_c_order(before: Shape, after: Shape) -> Axes:
    """What holds the same elements in C order: the axes of both shapes over common factors.

    Axes end at some numbers of elements from the last one. Those that divide all others or are divided by them, with
    the divisors and multiples that pairs have in common, are borders of factors; between other borders all is needed.
    """
    ends = sorted({math.prod(shape[i:]) for shape in (before, after) for i in range(len(shape) + 1)})
    common = {of(*pair) for pair in itertools.combinations(ends, 2) for of in (math.gcd, math.lcm)}
    borders = sorted(p for p in common.union(ends) if all(q % p == 0 or p % q == 0 for q in ends))
    near = set(itertools.pairwise(borders))
    extents: dict[str, int] = {}
    whole: set[str] = set()

    def dims(shape: Shape) -> Dims:
        found, inner = list[Dim](), math.prod(shape)
        for extent in shape:
            outer, inner = inner, inner // extent
            inside = [p for p in borders if inner < p < outer and outer % p == 0 and p % inner == 0]
            terms = []
            for low, high in itertools.pairwise([inner, *inside, *[outer] * (outer != inner)]):
                name = f"{high}/{low}"
                extents[name] = high // low
                terms.append((name, low // inner))
                if (low, high) not in near:
                    whole.add(name)
            found.append(Dim(tuple(terms[::-1])))
        return tuple(found)

    return Axes((dims(before),), (dims(after),), extents, frozenset(whole))


def factor_places(dim: Dim, place: Place) -> dict[str, Place] | None:
    """The ranges of factors that a range of a dense axis is made of; None: it is no such ranges."""
    start, count, step = place
    if len(dim.terms) == 1:
        return {dim.terms[0][0]: place}
    if step != 1 and count > 1:
        return None
    found: dict[str, Place] = {}
    for name, unit in dim.terms:
        first, rest = divmod(start, unit)
        if not rest and count % unit == 0:
            found[name] = first, count // unit, 1
            return found
        if rest + count > unit:
            return None
        found[name], start = (first, 1, 1), rest
    return None


def dense_place(dim: Dim, places: Mapping[str, Place], extents: Mapping[str, int]) -> Place | None:
    """The range of a dense axis that ranges of its factors make: single values of the slowest ones, a range of the
    next one, and all of the others; None: they make none.
    """
    start, count, is_cut = 0, 1, False
    for name, unit in dim.terms:
        first, number, step = places.get(name) or (0, extents[name], 1)
        if step != 1 or (is_cut and number != extents[name]):
            return None
        is_cut = is_cut or number != 1
        start, count = start + first * unit, count * number
    return start, count, 1


def window_place(
    dim: Dim, extent: int, places: Mapping[str, Place], extents: Mapping[str, int]
) -> tuple[Place, tuple[int, int, int]] | None:
    """The stretch of an axis between the first and the last element that windows reach, and what `Part.windows` says of
    it. None: windows of several taps that are not neighbours.
    """
    low = high = first = dim.start
    for name, unit in dim.terms:
        start, count, step = places.get(name) or (0, extents[name], 1)
        if step != 1 and len(dim.terms) > 1:
            return None
        first += unit * start
        ends = unit * start, unit * (start + (count - 1) * step)
        low, high = low + min(ends), high + max(ends)
    begin = min(max(low, 0), extent)
    end = max(begin, min(high + 1, extent))
    return (begin, end - begin, 1), (first - begin, begin - low, high + 1 - end)
