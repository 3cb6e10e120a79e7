"""Tables of signal processing by their definitions, and tensors as training leaves them, in drawn sizes."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

Rng = np.random.Generator


def window(rng: Rng, count: int) -> np.ndarray:
    """Harris, On the Use of Windows for Harmonic Analysis (1978): Hann, Hamming, Blackman, Kaiser and others."""
    n, whole = np.arange(count), count - int(rng.integers(2))
    t = 2 * np.pi * n / whole
    made = {
        "hann": 0.5 - 0.5 * np.cos(t),
        "hamming": 0.54 - 0.46 * np.cos(t),
        "blackman": 0.42 - 0.5 * np.cos(t) + 0.08 * np.cos(2 * t),
        "root of hann": np.sin(np.pi * n / whole),
        "kaiser": np.kaiser(count, rng.uniform(4, 14)),
        "bartlett": np.bartlett(count),
        "gauss": np.exp(-0.5 * ((n - (count - 1) / 2) / (count * rng.uniform(0.1, 0.3))) ** 2),
    }
    return made[str(rng.choice(list(made)))]


def fourier(rng: Rng) -> np.ndarray:
    """[frequencies, taps]: cosines, sines, or both, with a window or without."""
    count = int(rng.choice([16, 24, 64, 100, 256, 400]))
    angles = 2 * np.pi * np.outer(np.arange(count // 2 + 1), np.arange(count)) / count
    parts = [np.cos(angles), -np.sin(angles)][int(rng.integers(2)) :: int(rng.integers(1, 3))]
    table = np.concatenate(parts) if rng.random() < 0.7 else np.stack(parts, 1).reshape(-1, count)
    return table * window(rng, count) if rng.random() < 0.7 and count >= 64 else table


def cosines(rng: Rng) -> np.ndarray:
    """The discrete cosine transform, as of cepstra (Ahmed, Natarajan and Rao, 1974)."""
    count, kept = int(rng.integers(8, 129)), int(rng.integers(6, 41))
    table = np.cos(np.pi / count * np.outer(np.arange(kept), np.arange(count) + 0.5)) * np.sqrt(2 / count)
    return table if rng.random() < 0.5 else np.concatenate([table[:1] / np.sqrt(2), table[1:]])


def mel(rng: Rng) -> np.ndarray:
    """Triangles on the mel scale (Davis and Mermelstein, 1980), with Slaney's areas or without."""
    rate, bins, count = 16000.0, int(rng.choice([129, 201, 257])), int(rng.integers(16, 81))
    of, back = (lambda f: 2595 * np.log10(1 + f / 700)), (lambda m: 700 * (10 ** (m / 2595) - 1))
    edges, at = back(np.linspace(of(20.0), of(rate / 2), count + 2)), np.linspace(0, rate / 2, bins)
    rising = (at - edges[:-2, None]) / (edges[1:-1] - edges[:-2])[:, None]
    falling = (edges[2:, None] - at) / (edges[2:] - edges[1:-1])[:, None]
    table = np.maximum(0, np.minimum(rising, falling))
    return table * (2 / (edges[2:] - edges[:-2]))[:, None] if rng.random() < 0.5 else table


def sinusoids(rng: Rng) -> np.ndarray:
    """[places, width]: positions of Attention Is All You Need, side by side or in halves; or a rotary cosine."""
    places, half = int(rng.integers(6, 200)), int(rng.integers(4, 65))
    angles = np.outer(np.arange(places) + rng.integers(3), float(rng.choice([1e4, 5e5])) ** -(np.arange(half) / half))
    pair = [np.sin(angles), np.cos(angles)]
    return [np.stack(pair, -1).reshape(places, -1), np.concatenate(pair, 1), pair[1], np.tile(pair[0], 2)][
        int(rng.integers(4))
    ]


def grid_of_sinusoids(rng: Rng) -> np.ndarray:
    """Positions of an image's patches, row by row, as of masked autoencoders (He and others, 2021)."""
    side, quarter = int(rng.integers(8, 16)), int(rng.integers(4, 17))
    angles = np.outer(np.arange(side), 1e4 ** -(np.arange(quarter) / quarter))
    line = np.concatenate([np.sin(angles), np.cos(angles)], 1)
    return np.concatenate([np.repeat(line, side, 0), np.tile(line, (side, 1))], 1)


def constant_q(rng: Rng) -> np.ndarray:
    """Kernels of the constant-Q transform (Brown, 1991): waves of rising frequency within windows of their lengths."""
    taps, table = 512, np.zeros((int(rng.integers(12, 37)), 512))
    for i, row in enumerate(table):
        length = int(400 * 2 ** (-i / len(table)))
        start = (taps - length) // 2
        t = np.arange(length) - length / 2
        row[start : start + length] = np.hanning(length) * np.cos(2 * np.pi * 17 / length * t) / length
    return table


def resampling(rng: Rng) -> np.ndarray:
    """[phases, taps]: a sinc within a window, for a rate of `phases` to `step` (Smith, Digital Audio Resampling)."""
    phases, step = [(2, 1), (3, 2), (4, 1), (5, 4), (1, 2), (1, 3)][int(rng.integers(6))]
    least, wide = min(phases, step) * 0.95, 6
    width = int(np.ceil(wide * step / least))
    t = (-np.arange(phases)[:, None] / phases + np.arange(-width, width + step) / step) * least
    t = np.clip(t, -wide, wide)
    return np.sinc(t) * np.cos(np.pi * t / wide / 2) ** 2 * least / step


MATRICES: dict[str, Callable[[Rng], np.ndarray]] = {
    "fourier": fourier,
    "cosines": cosines,
    "mel": mel,
    "sinusoids": sinusoids,
    "grid of sinusoids": grid_of_sinusoids,
    "constant q": constant_q,
}


def places(rng: Rng) -> np.ndarray:
    """Places, frequencies and pitches along one axis."""
    count = int(rng.integers(6, 300))
    made = {
        "arange": np.arange(count) + rng.integers(3),
        "linspace": np.linspace(rng.uniform(-2, 0), rng.uniform(1, 900), count),
        "rotary": float(rng.choice([1e4, 5e5])) ** -(np.arange(count) / count),
        "pitches": 31.7 * 2 ** (np.arange(count) * 20 / 1200),
        "logarithms of pitches": np.log2(31.7) + np.arange(count) * 20 / 1200,
        "mel": 700 * (10 ** (np.linspace(100, 2800, max(count, 40)) / 2595) - 1),
        "window": window(rng, max(count, 16)),
    }
    return made[str(rng.choice(list(made)))]


def shaped(rng: Rng, table: np.ndarray) -> np.ndarray:
    """A matrix in a drawn layout: turned, with axes of one between, in float16 or in part."""
    table = table.T if rng.random() < 0.4 else table
    if rng.random() < 0.3 and min(table.shape) > 12:
        table = table[: int(0.8 * len(table)), : int(0.9 * table.shape[1])]
    where = [(0,), (1,), (2,), (1, 1), (0, 1), (1, 2), ()][int(rng.integers(7))]
    for axis in where:
        table = np.expand_dims(table, axis)
    return np.ascontiguousarray(table, np.float16 if rng.random() < 0.3 else np.float32)


def learned(rng: Rng) -> np.ndarray:
    """A tensor as initialisation and training leave it, of drawn shape, spread, sparsity and smoothness."""
    shapes = [(n, m) for n in (5, 8, 33, 64) for m in (5, 8, 64, 129)]
    shapes += [(16, 3, 3, 3), (8, 1, 3, 3), (32, 1, 5, 5), (8, 4, 7), (16, 1, 64), (5,), (8,), (64,), (256,), (1, 300)]
    shape = shapes[int(rng.integers(len(shapes)))]
    size = int(np.prod(shape))
    made = rng.normal(size=shape) * 10.0 ** rng.uniform(-3, 1)
    match int(rng.integers(9)):
        case 0:  # a gain, or a bias that was filled with one number, after a little training
            made = rng.choice([0.0, 1.0, 1e-4]) + rng.normal(size=shape) * 1e-3
        case 1:  # the bias of an LSTM, whose forget gates begin at 1
            made = np.repeat([0.0, 0.0, 1.0, 0.0], -(-size // 4))[:size].reshape(shape) + 0.01 * made
        case 2:  # pruned
            made = made * (rng.random(shape) < 0.3)
        case 3:  # of low rank along the last axis
            made = rng.normal(size=(*shape[:-1], 1)) * rng.normal(size=shape[-1]) + 1e-2 * made
        case 4:  # smooth along the last axis, as kernels of a first layer become
            made = np.cumsum(rng.normal(size=shape), -1)
            made += 0.02 * np.abs(made).max() * rng.normal(size=shape)
        case 5:  # waves at first, then trained
            made = np.sin(np.arange(size).reshape(shape) * rng.uniform(0.1, 2)) + 0.05 * rng.normal(size=shape)
        case 6:  # uniform, as He and Glorot draw
            made = rng.uniform(-1, 1, shape) / np.sqrt(shape[-1])
        case 7 if len(shape) == 2:  # orthogonal
            q, _ = np.linalg.qr(rng.normal(size=(max(shape), max(shape))))
            made = q[: shape[0], : shape[1]]
    return np.ascontiguousarray(made, np.float16 if rng.random() < 0.3 else np.float32)
