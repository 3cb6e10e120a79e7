"""ATen ops that draw: dropout in its forms, and random tensors."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from foreplan.frontend import nn
from foreplan.frontend.torch.call import Call
from foreplan.frontend.torch.ops.elementwise import broadcast, numbers
from foreplan.frontend.torch.table import aten
from foreplan.frontend.tracing.elementwise import apply, convert
from foreplan.frontend.tracing.tensor import Tensor, as_tensor
from foreplan.graph.types import FLOAT32
from foreplan.ops import sort
from foreplan.ops.expr import call, cast, log, where


@aten("dropout", "native_dropout", draws=True)
def _dropout(c: Call, x: Any, p: float, train: bool) -> Any:
    return dropped(c, c.tensor(x), p) if train else c.tensor(x)


def dropped(c: Call, x: Tensor, p: float) -> Any:
    """Dropout in training; in inference, too, where PyTorch's program of inference says so."""
    if p in (0, 1):
        return x if not p else c.by_mode(x, x * 0.0)
    if c.training:
        return nn.dropout(x, p)
    return x * c.random("bernoulli", x.shape, x.value.dtype, p=1 - p) / (1 - p)


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
    return dropped(c, ones, p)


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
        kept = dropped(c, as_tensor(np.ones(tensor.shape, tensor.dtype)), p)
    noisy = numbers(c, "alpha_dropout", lambda x, k: where(k > 0.0, x, bound) * a - a * bound * p, tensor, kept)
    return c.by_mode(tensor, noisy)


@aten("rrelu", draws=True)
def _rrelu(c: Call, x: Any, low: float = 1 / 8, high: float = 1 / 3, train: bool = False, *_: Any) -> Tensor:
    """A slope for each element below zero: drawn in training, the middle in inference."""
    slope: Any = (low + high) / 2
    if train:
        middle = as_tensor(np.full(c.shape, slope), c.dtype)
        slope = c.random("uniform", c.shape, c.dtype, low=float(low), high=float(high))
        slope = c.by_mode(middle, slope)
    return numbers(c, "rrelu", lambda x, s: where(x > 0.0, x, x * s), x, slope)


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
    return _of_uniform(c, lambda u: -log(u) / rate)


def _of_uniform(c: Call, fn: Callable[[Any], Any]) -> Tensor:
    """Numbers of a distribution: its quantile function of uniform ones in (0, 1]."""
    dtype = c.dtype if c.dtype.is_float else FLOAT32
    return apply(c.name, lambda u: cast(fn(1.0 - u), c.dtype), c.random("uniform", c.shape, dtype))


@aten("geometric_", draws=True)
def _geometric(c: Call, x: Any, p: float, **_: Any) -> Tensor:
    return _of_uniform(c, lambda u: call("max", call("ceil", log(u) / math.log1p(-p)), 1.0))


@aten("cauchy_", draws=True)
def _cauchy(c: Call, x: Any, median: float = 0.0, sigma: float = 1.0, **_: Any) -> Tensor:
    return _of_uniform(c, lambda u: call("tan", (u - 0.5) * math.pi) * sigma + median)


@aten("log_normal_", draws=True)
def _log_normal(c: Call, x: Any, mean: float = 1.0, std: float = 2.0, **_: Any) -> Any:
    return np.exp(c.random("normal", c.shape, c.dtype) * std + mean)


@aten("multinomial", draws=True)
def _multinomial(c: Call, weights: Any, count: int, replacement: bool = False, **_: Any) -> Tensor:
    """Places drawn by weights: those of the largest logarithms with Gumbel noise (Kool et al. 2019), all of one draw
    without replacement, the first of one draw each with it.
    """
    logs: Any = np.log(convert(c.tensor(weights), FLOAT32))
    rows = logs[..., None, :] if replacement else logs
    shape = (*logs.shape[:-1], count, logs.shape[-1]) if replacement else logs.shape
    drawn = c.random("uniform", shape, FLOAT32)
    noisy = apply("gumbel", lambda x, u: x - log(-log(1.0 - u)), broadcast(rows, shape), drawn)
    if replacement:
        return c.wrap(sort.arg_reduce(c.b, "max", noisy.value, noisy.ndim - 1))
    return c.wrap(sort.top_k(c.b, noisy.value, count, noisy.ndim - 1, True)[1])


@aten("randperm", draws=True)
def _randperm(c: Call, n: int, **_: Any) -> Tensor:
    return convert(c.wrap(sort.top_k(c.b, c.random("uniform", (n,), FLOAT32).value, n, 0, True)[1]), c.dtype)
