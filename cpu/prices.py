"""What ways to run a convolution are predicted to take, where several are there to choose from.

Rates were measured on one core with AVX-512 and float32; `tune` measures instead.
"""

from __future__ import annotations

from foreplan.cpu.threads import current_threads
from foreplan.graph import Window

# Operations a nanosecond: of oneDNN's convolutions and of products, and of their weights' gradients by both.
DIRECT, PRODUCTS, DIRECT_WEIGHTS, PRODUCTS_WEIGHTS = 205, 195, 177, 175
# Bytes a nanosecond: of weights taken to another layout and their gradients from there; of results that are added to
# others, in a second pass and by a product itself.
WEIGHTS, WEIGHTS_BACK, SECOND_PASS, ADDED = 4, 2, 12, 32


def direct(w: Window, y: Window, added: int = 0) -> int:
    """A convolution of oneDNN, or its data's gradient, with results y or their cotangents.

    Args:
        added: bytes that are added to others.
    """
    passes = w.type.nbytes // WEIGHTS + added // SECOND_PASS
    return (_operations(w, y) // DIRECT + passes) // current_threads()


def products(w: Window, y: Window, added: int = 0) -> int:
    """A convolution of one tap, or its data's gradient, as a product of matrices."""
    return (_operations(w, y) // PRODUCTS + added // ADDED) // current_threads()


def direct_weights(w: Window, g: Window) -> int:
    """The gradient of weights by oneDNN."""
    return (_operations(w, g) // DIRECT_WEIGHTS + w.type.nbytes // WEIGHTS_BACK) // current_threads()


def products_weights(w: Window, g: Window) -> int:
    """The gradient of weights of one tap as a product of matrices."""
    return _operations(w, g) // PRODUCTS_WEIGHTS // current_threads()


def _operations(w: Window, y: Window) -> int:
    """Of all taps at all positions, multiply-add = 2."""
    return 2 * w.type.size * (y.type.size // y.shape[1])
