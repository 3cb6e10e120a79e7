"""What ways to run a convolution are predicted to take, where several are there to choose from.

Rates were measured on one core with AVX-512 and float32; `tune` measures instead.
"""

from __future__ import annotations

from foreplan.cpu.threads import current_threads
from foreplan.graph import Window

# Operations a nanosecond: of oneDNN's convolutions, of their weights' gradients, of products; bytes a nanosecond.
DIRECT, DIRECT_WEIGHTS, PRODUCTS, MEMORY = 200, 170, 160, 8


def direct(w: Window, y: Window) -> int:
    """A convolution of oneDNN, or its data's gradient, with results y or their cotangents; weights are reordered."""
    return (_operations(w, y) // DIRECT + 2 * w.type.nbytes // MEMORY) // current_threads()


def direct_weights(w: Window, g: Window) -> int:
    """The gradient of weights by oneDNN."""
    return (_operations(w, g) // DIRECT_WEIGHTS + 2 * w.type.nbytes // MEMORY) // current_threads()


def products(w: Window, y: Window) -> int:
    """A convolution of one tap, or a gradient of it, as a product of matrices."""
    return _operations(w, y) // PRODUCTS // current_threads()


def moved(nbytes: int) -> int:
    """Bytes read and written once more."""
    return nbytes // MEMORY


def _operations(w: Window, y: Window) -> int:
    """Of all taps at all positions, multiply-add = 2."""
    return 2 * w.type.size * (y.type.size // y.shape[1])
