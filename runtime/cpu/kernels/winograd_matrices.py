"""The matrices of Winograd's algorithm, for any points.

The products of two polynomials at enough points determine the product of the polynomials (Toom 1963, Cook 1966). A
convolution is that read backward (Winograd 1980). For each point, G has the value of the taps, B the coefficient of the
data, and A brings the product to the results. The last place is the highest coefficient, "at infinity".

How much rounding errors grow depends on the points alone (Barabasz, Anderson, Soodhalter and Gregg, "Error analysis and
improving the accuracy of Winograd convolution for deep neural networks", 2020).
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from math import prod
from typing import NamedTuple

Row = tuple[Fraction, ...]


class Matrices(NamedTuple):
    """Results are Aᵀ[(G·taps) ⊙ (B·data)], with a row for each place in all three.

    Attributes:
        data: B, often written Bᵀ; its numbers are sums and products of the points.
        taps: G.
        results: A.
    """

    data: tuple[Row, ...]
    taps: tuple[Row, ...]
    results: tuple[Row, ...]


def winograd_matrices(points: Sequence[Fraction], results: int, taps: int) -> Matrices:
    """The matrices of F(results, taps).

    Args:
        points: `results + taps - 2` different ones.
    """
    assert len(points) == len(set(points)) == results + taps - 2
    others = [[other for other in points if other != point] for point in points]
    apart = [prod((point - other for other in rest), start=Fraction(1)) for point, rest in zip(points, others)]
    return Matrices(
        (*((*_with_roots(rest), Fraction(0)) for rest in others), _with_roots(points)),
        (*(tuple(x / scale for x in _powers(point, taps)) for point, scale in zip(points, apart)), _last(taps)),
        (*(_powers(point, results) for point in points), _last(results)),
    )


def _with_roots(roots: Sequence[Fraction]) -> Row:
    """The coefficients of the polynomial with these roots, from the lowest to the highest, which is 1."""
    found = [Fraction(1)]
    for root in roots:
        found = [below - root * x for below, x in zip([Fraction(0), *found], [*found, Fraction(0)])]
    return tuple(found)


def _powers(x: Fraction, count: int) -> Row:
    return tuple(x**i for i in range(count))


def _last(count: int) -> Row:
    return tuple(Fraction(i == count - 1) for i in range(count))
