"""Activations: functions of neural networks that take every element, or a softmax along an axis."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from foreplan.base.arguments import choice, number_in
from foreplan.base.errors import ShapeError
from foreplan.frontend.tracing.dispatch import as_axis
from foreplan.frontend.tracing.elementwise import apply
from foreplan.frontend.tracing.tensor import Tensor, as_tensor, takes_tensors, wrap
from foreplan.frontend.tracing.tracer import current
from foreplan.ops import expr as ex
from foreplan.ops import softmax as normalising
from foreplan.ops.expr import Expr, call


def relu(x: Any) -> Tensor:
    """max(x, 0)."""
    return apply("relu", ex.relu, x)


def relu6(x: Any) -> Tensor:
    """x limited to [0, 6]."""
    return apply("relu6", lambda x: ex.clip(x, 0.0, 6.0), x)


def leaky_relu(x: Any, slope: float = 0.01) -> Tensor:
    """x where positive, else slope·x."""
    slope = number_in("leaky_relu's slope", slope, -math.inf, math.inf)
    return apply("leaky_relu", lambda x: ex.where(x > 0.0, x, slope * x), x)


def elu(x: Any, alpha: float = 1.0) -> Tensor:
    """x where positive, else alpha·(eˣ − 1) (Clevert et al. 2016)."""
    alpha = number_in("elu's alpha", alpha, -math.inf, math.inf)
    return apply("elu", lambda x: ex.where(x > 0.0, x, alpha * call("expm1", ex.minimum(x, 0.0))), x)


def selu(x: Any) -> Tensor:
    """λ·x where positive, else λ·α·(eˣ − 1), with the λ and α of Klambauer et al. 2017."""
    alpha, scale = 1.6732632423543772, 1.0507009873554805
    return apply("selu", lambda x: scale * ex.where(x > 0.0, x, alpha * call("expm1", ex.minimum(x, 0.0))), x)


def glu(x: Any, axis: int = -1) -> Tensor:
    """a·sigmoid(b), the gated linear unit (Dauphin et al. 2017), of the first half a and the second half b of an axis.

    Raises:
        ShapeError: the axis has an odd number of elements.
    """
    tensor = as_tensor(x)
    found = as_axis(axis, tensor.ndim)
    if tensor.shape[found] % 2:
        raise ShapeError(f"glu of {tensor!r}: axis {found} has an odd number of elements, and so no two halves")
    halves: Any = np.split(tensor, 2, found)
    return apply("glu", lambda a, b: a * ex.sigmoid(b), *halves)


def sigmoid(x: Any) -> Tensor:
    """1 / (1 + e⁻ˣ)."""
    return apply("sigmoid", ex.sigmoid, x)


def tanh(x: Any) -> Tensor:
    """Hyperbolic tangent."""
    return apply("tanh", ex.tanh, x)


def silu(x: Any) -> Tensor:
    """x·sigmoid(x), also called swish."""
    return apply("silu", lambda x: x * ex.sigmoid(x), x)


def softplus(x: Any) -> Tensor:
    """log(1 + eˣ), without overflow."""
    return apply("softplus", lambda x: ex.maximum(x, 0.0) + call("log1p", ex.exp(-call("abs", x))), x)


def mish(x: Any) -> Tensor:
    """x·tanh(softplus(x)) (Misra 2020)."""
    return x * tanh(softplus(x))


def hard_sigmoid(x: Any) -> Tensor:
    """x/6 + 1/2 limited to [0, 1]."""
    return apply("hard_sigmoid", lambda x: ex.clip(x * (1.0 / 6.0) + 0.5, 0.0, 1.0), x)


def hard_swish(x: Any) -> Tensor:
    """x·hard_sigmoid(x) (Howard et al. 2019)."""
    return apply("hard_swish", lambda x: x * ex.clip(x * (1.0 / 6.0) + 0.5, 0.0, 1.0), x)


def gelu(x: Any, approximate: str = "none") -> Tensor:
    """x·Φ(x) (Hendrycks and Gimpel 2016).

    Args:
        x: any shape.
        approximate: "none" uses the error function; "tanh" the paper's approximation, as GPT-2 does.

    Raises:
        UsageError: `approximate` is another word.
    """

    def exact(x: Expr) -> Expr:
        return 0.5 * x * (1.0 + ex.erf(x * math.sqrt(0.5)))

    def by_tanh(x: Expr) -> Expr:
        return 0.5 * x * (1.0 + ex.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * (x * x * x))))

    choice("approximation of gelu", approximate, ("none", "tanh"))
    return apply("gelu", exact if approximate == "none" else by_tanh, x)


@takes_tensors
def softmax(x: Tensor, axis: int = -1) -> Tensor:
    """eˣ / Σ eˣ along an axis; floating-point x of any shape."""
    return wrap(normalising.softmax(current().at(), x.value, as_axis(axis, x.ndim)))


@takes_tensors
def log_softmax(x: Tensor, axis: int = -1) -> Tensor:
    """Logarithm of the softmax along an axis."""
    return wrap(normalising.log_softmax(current().at(), x.value, as_axis(axis, x.ndim)))
