"""ATen ops that draw: dropout in its forms, and random tensors."""

from __future__ import annotations

from typing import Any

import numpy as np

from foreplan.errors import UnsupportedError
from foreplan.frontend import nn
from foreplan.frontend.torch.call import Call
from foreplan.frontend.torch.ops.elementwise import broadcast, numbers
from foreplan.frontend.torch.table import aten
from foreplan.frontend.tracing.elementwise import apply, convert
from foreplan.frontend.tracing.tensor import Tensor, as_tensor
from foreplan.graph.types import FLOAT32
from foreplan.ops.expr import call, cast, log, where


@aten("dropout", "native_dropout", draws=True)
def _dropout(c: Call, x: Any, p: float, train: bool) -> Any:
    return _dropped(c, c.tensor(x), p) if train else c.tensor(x)


def _dropped(c: Call, x: Tensor, p: float) -> Tensor:
    return c.by_mode(x, x * 0.0) if p == 1 else nn.dropout(x, p)


@aten("feature_dropout", draws=True)
def _feature_dropout(c: Call, x: Any, p: float, train: bool) -> Any:
    """Whole channels of each item."""
    tensor = c.tensor(x)
    if not train or not p:
        return tensor
    return tensor * _channels(c, tensor, p)


def _channels(c: Call, x: Tensor, p: float) -> Tensor:
    """Ones of which dropout takes some, an entry for each item and channel."""
    ones = as_tensor(np.ones((*x.shape[:2], *[1] * (x.ndim - 2)), x.dtype))
    return _dropped(c, ones, p)


@aten("alpha_dropout", "feature_alpha_dropout", draws=True)
def _alpha_dropout(c: Call, x: Any, p: float, train: bool) -> Any:
    """Dropout to SELU's lower bound, which keeps mean and variance (Klambauer et al. 2017)."""
    tensor = c.tensor(x)
    if not train or not p:
        return tensor
    bound = -1.7580993408473766
    a = (1 / np.sqrt((bound**2 * p + 1) * (1 - p))).item()
    if c.name.startswith("feature"):
        kept = _channels(c, tensor, p)
    else:
        kept = _dropped(c, as_tensor(np.ones(tensor.shape, tensor.dtype)), p)
    noisy = numbers(c, "alpha_dropout", lambda x, k: where(k > 0.0, x, bound) * a - a * bound * p, tensor, kept)
    return c.by_mode(tensor, noisy)


@aten("rrelu", draws=True)
def _rrelu(c: Call, x: Any, low: float = 1 / 8, high: float = 1 / 3, training: bool = False, *_: Any) -> Tensor:
    """The slope below zero is drawn anew in training, and is the middle of the two in inference (Xu et al. 2015)."""
    tensor = c.tensor(x)
    usual = numbers(c, "rrelu", lambda x: where(x > 0.0, x, x * ((low + high) / 2)), tensor)
    if not training:
        return usual
    slope = c.random("uniform", tensor.shape, FLOAT32, low=low, high=high)
    return c.by_mode(usual, numbers(c, "rrelu", lambda x, s: where(x > 0.0, x, x * s), tensor, slope))


@aten("rand", "rand_like", "uniform_", draws=True)
def _uniform(c: Call, *args: Any, **_: Any) -> Tensor:
    low, high = (args[1:3] if len(args) > 2 else (0.0, 1.0)) if c.name == "uniform_" else (0.0, 1.0)
    return c.random("uniform", c.shape, c.dtype, low=float(low), high=float(high))


@aten("randn", "randn_like", "normal_", "normal", draws=True)
def _normal(c: Call, *args: Any, **_: Any) -> Any:
    drawn = c.random("normal", c.shape, c.dtype)
    if c.name == "normal_":
        mean, std = (*args[1:], 0.0, 1.0)[:2] if len(args) == 1 else (args[1], args[2] if len(args) > 2 else 1.0)
        return drawn * float(std) + float(mean)
    if c.name == "normal":
        mean, std = args[0], args[1] if len(args) > 1 else 1.0
        return numbers(c, "normal", lambda z, m, s: z * s + m, drawn, mean, std)
    return drawn


@aten("randint", "randint_like", "random_", draws=True)
def _randint(c: Call, *args: Any, **_: Any) -> Tensor:
    numbers_ = [each for each in args if isinstance(each, int) and not isinstance(each, bool)]
    low, high = (0, numbers_[0]) if len(numbers_) == 1 else numbers_[:2]
    drawn = c.random("uniform", c.shape, FLOAT32)
    span = float(high - low)
    return apply(
        "randint", lambda u: cast(call("min", call("floor", u * span), span - 1.0) + float(low), c.dtype), drawn
    )


@aten("bernoulli", "bernoulli_", draws=True)
def _bernoulli(c: Call, x: Any, *p: Any, generator: Any = None, **named: Any) -> Any:
    given = p[0] if p else named.get("p")
    if c.name == "bernoulli_" and given is None:
        given = 0.5
    share = c.tensor(x) if given is None else given
    drawn = c.random("uniform", c.shape, FLOAT32)
    if isinstance(share, Tensor | np.ndarray):
        share = broadcast(convert(c.tensor(share), "float32"), c.shape)
    return apply("bernoulli", lambda u, p: cast(call("lt", u, p), c.dtype), drawn, share)


@aten("exponential_", draws=True)
def _exponential(c: Call, x: Any, rate: float = 1.0, **_: Any) -> Tensor:
    drawn = c.random("uniform", c.shape, FLOAT32)
    return apply("exponential", lambda u: cast(-log(1.0 - u) / rate, c.dtype), drawn)


@aten("geometric_", "cauchy_", "log_normal_", "poisson", "multinomial", "randperm", draws=True)
def _other(c: Call, *_: Any, **__: Any) -> Any:
    raise UnsupportedError("this distribution; uniform, normal, exponential, integers and bernoulli are there")
