"""Fourier transforms; NumPy's FFT is the judge."""

from __future__ import annotations

import numpy as np
import pytest

from foreplan.base.errors import ShapeError, UnsupportedError
from foreplan.graph import GraphBuilder, TensorType, as_dtype
from foreplan.ops.fourier import MOST_ELEMENTS, dft, stft
from tests.ops.check import built, check_vjp
from tests.profile import pairs, pick

rng = np.random.default_rng(7)


def _by_numpy(x: np.ndarray, length: int | None, inverse: bool, onesided: bool) -> np.ndarray:
    """Along axis 1 of [B, n, R, 1 or 2]."""
    z = x[..., 0] + 1j * (x[..., 1] if x.shape[-1] == 2 else 0)
    if inverse and onesided:
        return np.fft.irfft(z, length, 1)[..., None]
    y = (np.fft.ifft if inverse else np.fft.fft)(z, length, 1)
    y = y[:, : y.shape[1] // 2 + 1] if onesided else y
    return np.stack([y.real, y.imag], -1)


@pytest.mark.parametrize(
    ("n", "inverse", "onesided"),
    pairs([2, 7, *map(int, rng.integers(3, 200, pick(1, 2, 6))), 257, 300, 1024], [False, True], [False, True]),
)
def test_transforms(n: int, inverse: bool, onesided: bool) -> None:
    for parts in (1, 2):
        if onesided and parts == 1 + (not inverse):
            continue
        x = np.random.default_rng(n).standard_normal((2, n, 3, parts))
        for length in (None, n - 1, n + 3):
            wanted = _by_numpy(x, length, inverse, onesided)
            (found,) = built(lambda b, v, length=length: dft(b, v, length, 1, inverse, onesided), x)
            np.testing.assert_allclose(found, wanted, rtol=1e-9, atol=1e-11 * np.abs(wanted).max() * n)


@pytest.mark.parametrize("inverse", [False, True])
@pytest.mark.parametrize("onesided", [False, True])
def test_gradients(inverse: bool, onesided: bool) -> None:
    x = rng.standard_normal((2, 5, 2 if inverse else 1))
    check_vjp(lambda b, v: dft(b, v, 6, -2, inverse, onesided), x)
    signal, window = rng.standard_normal((2, 11, 1 + (not onesided))), rng.standard_normal(4)
    check_vjp(lambda b, v, w: stft(b, v, 3, 5, w, onesided), signal, window)


def test_frames_are_windowed_and_a_short_window_is_filled_up() -> None:
    x, window = rng.standard_normal((3, 40, 1)), rng.standard_normal(6)
    (found,) = built(lambda b, v, w: stft(b, v, 4, 9, w), x, window)
    frames = np.stack([x[:, i : i + 6, 0] * window for i in range(0, 32, 4)], 1)
    wanted = np.fft.rfft(frames, 9)
    np.testing.assert_allclose(found, np.stack([wanted.real, wanted.imag], -1), rtol=1e-10, atol=1e-12)


def test_what_cannot_be_transformed_is_told() -> None:
    b = GraphBuilder()
    x = b.input("x", TensorType(as_dtype("float32"), (2, 6, 3)))
    with pytest.raises(ShapeError, match="1 or 2"):
        dft(b, x)
    z = b.input("z", TensorType(as_dtype("float32"), (2, 6, 2)))
    with pytest.raises(ShapeError, match="one side"):
        dft(b, z, onesided=True)
    with pytest.raises(ShapeError, match="frames of 7"):
        stft(b, z, 1, 7)
    long = b.input("long", TensorType(as_dtype("float32"), (1, 8209, 1)))  # a prime
    with pytest.raises(UnsupportedError, match=f"{MOST_ELEMENTS:,}"):
        dft(b, long)
