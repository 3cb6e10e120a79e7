"""The matrices of Winograd's algorithm, in exact arithmetic."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from foreplan.runtime.cpu.kernels import winograd
from foreplan.runtime.cpu.kernels.winograd_matrices import winograd_matrices

numbers = st.fractions(-3, 3, max_denominator=8)


@given(st.data(), st.integers(1, 5), st.integers(2, 4))
def test_they_give_the_convolution_for_any_points(draw: st.DataObject, results: int, taps: int) -> None:
    places = results + taps - 1
    points = draw.draw(st.lists(numbers, min_size=places - 1, max_size=places - 1, unique=True))
    data = draw.draw(st.lists(numbers, min_size=places, max_size=places))
    weights = draw.draw(st.lists(numbers, min_size=taps, max_size=taps))
    made = winograd_matrices(points, results, taps)
    b, g, a = (np.array(matrix, object) for matrix in made)
    found = a.T @ ((g @ np.array(weights, object)) * (b @ np.array(data, object)))
    assert found.tolist() == [sum(w * data[i + j] for j, w in enumerate(weights)) for i in range(results)]


def test_the_known_ones() -> None:
    """F(2, 3) as in Lavin and Gray, up to the scales of its rows."""
    made = winograd_matrices([Fraction(0), Fraction(1), Fraction(-1)], results=2, taps=3)
    assert [[abs(x) for x in row] for row in made.data] == [[1, 0, 1, 0], [0, 1, 1, 0], [0, 1, 1, 0], [0, 1, 0, 1]]
    assert [tuple(map(abs, row)) for row in made.taps[1:3]] == [(Fraction(1, 2),) * 3] * 2


def test_what_the_kernels_use_is_exact_in_float32() -> None:
    for matrix in (winograd.A, winograd.B):
        assert all(float(np.float32(x)) == x for row in matrix for x in row)
