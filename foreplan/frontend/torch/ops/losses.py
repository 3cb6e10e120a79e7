"""Losses that a module computes itself."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from foreplan.frontend import nn
from foreplan.frontend.losses import CTC
from foreplan.frontend.losses.elements import (
    BinaryCrossEntropy,
    Huber,
    MeanAbsoluteError,
    MeanSquaredError,
    weighted_binary,
)
from foreplan.frontend.torch.call import Call
from foreplan.frontend.torch.ops.products import length
from foreplan.frontend.torch.ops.reductions import mean_of, reduced
from foreplan.frontend.torch.table import aten
from foreplan.frontend.torch.transforms import CTC_LOSS
from foreplan.frontend.tracing.elementwise import apply, convert, select
from foreplan.frontend.tracing.tensor import Tensor
from foreplan.ops.expr import call, exp, log, where
from foreplan.ops.index import gather
from foreplan.ops.index_elements import gather_elements


def _terms(c: Call, name: str, fn: Any, *xs: Any) -> Tensor:
    return apply(name, fn, *(convert(c.tensor(x), c.dtype) for x in xs))


@aten("mse_loss")
def _mse(c: Call, x: Any, y: Any, reduction: int = 1) -> Tensor:
    return mean_of(c, _terms(c, "mse", MeanSquaredError().term, x, y), reduction)


@aten("l1_loss")
def _l1(c: Call, x: Any, y: Any, reduction: int = 1) -> Tensor:
    return mean_of(c, _terms(c, "l1", MeanAbsoluteError().term, x, y), reduction)


@aten("smooth_l1_loss")
def _smooth_l1(c: Call, x: Any, y: Any, reduction: int = 1, beta: float = 1.0) -> Tensor:
    def term(a: Any, b: Any) -> Any:
        d = call("abs", a - b)
        return where(d < beta, d * d * (0.5 / beta), d - 0.5 * beta) if beta else d

    return mean_of(c, _terms(c, "smooth_l1", term, x, y), reduction)


@aten("huber_loss")
def _huber(c: Call, x: Any, y: Any, reduction: int = 1, delta: float = 1.0) -> Tensor:
    return mean_of(c, _terms(c, "huber", Huber(delta).term, x, y), reduction)


@aten("kl_div")
def _kl(c: Call, x: Any, y: Any, reduction: int = 1, log_target: bool = False) -> Tensor:
    def term(a: Any, b: Any) -> Any:
        if log_target:
            return exp(b) * (b - a)
        return where(b > 0.0, b * (log(where(b > 0.0, b, 1.0)) - a), 0.0)

    return mean_of(c, _terms(c, "kl_div", term, x, y), reduction)


@aten("binary_cross_entropy")
def _bce(c: Call, x: Any, y: Any, weight: Any = None, reduction: int = 1) -> Tensor:
    def term(a: Any, b: Any) -> Any:
        # PyTorch limits the logarithms to -100.
        low = call("max", log(a), -100.0)
        high = call("max", log(1.0 - a), -100.0)
        return -(b * low + (1.0 - b) * high)

    found = _terms(c, "bce", term, x, y)
    return mean_of(c, found if weight is None else found * c.tensor(weight), reduction)


@aten("binary_cross_entropy_with_logits")
def _bce_logits(c: Call, x: Any, y: Any, weight: Any = None, pos_weight: Any = None, reduction: int = 1) -> Tensor:
    if pos_weight is None:
        found = _terms(c, "bce_logits", BinaryCrossEntropy().term, x, y)
    else:
        found = _terms(c, "bce_logits", weighted_binary, x, y, pos_weight)
    return mean_of(c, found if weight is None else found * c.tensor(weight), reduction)


@aten("soft_margin_loss")
def _soft_margin(c: Call, x: Any, y: Any, reduction: int = 1) -> Tensor:
    def term(a: Any, b: Any) -> Any:
        z = -(a * b)
        return call("max", z, 0.0) + call("log1p", exp(-call("abs", z)))

    return mean_of(c, _terms(c, "soft_margin", term, x, y), reduction)


@aten("margin_ranking_loss")
def _margin_ranking(c: Call, x: Any, y: Any, target: Any, margin: float = 0.0, reduction: int = 1) -> Tensor:
    def term(a: Any, b: Any, t: Any) -> Any:
        return call("max", -t * (a - b) + margin, 0.0)

    return mean_of(c, _terms(c, "margin_ranking", term, x, y, target), reduction)


@aten("hinge_embedding_loss")
def _hinge_embedding(c: Call, x: Any, y: Any, margin: float = 1.0, reduction: int = 1) -> Tensor:
    def term(a: Any, t: Any) -> Any:
        far = where(call("ne", t, 1.0), call("max", margin - a, 0.0), 0.0)
        return far + where(call("ne", t, -1.0), a, 0.0)

    return mean_of(c, _terms(c, "hinge_embedding", term, x, y), reduction)


@aten("triplet_margin_loss")
def _triplet(
    c: Call,
    anchor: Any,
    positive: Any,
    negative: Any,
    margin: float = 1.0,
    p: float = 2.0,
    eps: float = 1e-6,
    swap: bool = False,
    reduction: int = 1,
) -> Tensor:

    def distance(x: Any, y: Any) -> Tensor:
        return length(c, _terms(c, "gap", lambda a, b: a - b + eps, x, y), p)

    far: Any = distance(anchor, negative)
    far = np.minimum(far, distance(positive, negative)) if swap else far
    near = distance(anchor, positive)
    return mean_of(c, apply("triplet", lambda n, f: call("max", n - f + margin, 0.0), near, far), reduction)


@aten("cosine_embedding_loss")
def _cosine_embedding(c: Call, x: Any, y: Any, target: Any, margin: float = 0.0, reduction: int = 1) -> Tensor:
    def total(a: Any, b: Any) -> Tensor:
        return reduced(c, "sum", _terms(c, "product", lambda a, b: a * b, a, b), -1)

    def term(xy: Any, xx: Any, yy: Any, t: Any) -> Any:
        alike = xy / call("sqrt", (xx + 1e-12) * (yy + 1e-12))
        return where(call("eq", t, 1.0), 1.0 - alike, call("max", alike - margin, 0.0))

    found = apply("cosine_embedding", term, total(x, y), total(x, x), total(y, y), convert(c.tensor(target), c.dtype))
    return mean_of(c, found, reduction)


@aten("poisson_nll_loss")
def _poisson(
    c: Call, x: Any, y: Any, log_input: bool = True, full: bool = False, eps: float = 1e-8, reduction: int = 1
) -> Tensor:
    def term(a: Any, t: Any) -> Any:
        found = exp(a) - t * a if log_input else a - t * log(a + eps)
        if full:
            stirling = t * log(where(t > 1.0, t, 1.0)) - t + 0.5 * log(where(t > 1.0, t, 1.0) * (2 * math.pi))
            found = found + where(t > 1.0, stirling, 0.0)
        return found

    return mean_of(c, _terms(c, "poisson_nll", term, x, y), reduction)


def _classes_last(c: Call, x: Any) -> tuple[Tensor, tuple[int, ...]]:
    """Scores [items, classes] of scores whose classes stand second, or alone; and the shape of the items."""
    scores = c.tensor(x)
    if scores.ndim == 1:
        return scores.reshape(1, -1), ()
    order = (0, *range(2, scores.ndim), 1)
    moved = scores.transpose(*order) if scores.ndim > 2 else scores
    return moved.reshape(-1, scores.shape[1]), moved.shape[:-1]


def _weighted(c: Call, terms: Tensor, target: Tensor, weight: Any, reduction: int, ignore: int, shape: Any) -> Any:
    """Terms of items, each by the weight of its class; a mean is of the weights."""
    counts = target != ignore
    if weight is None:
        share = convert(counts, terms.dtype)
    else:
        safe: Any = np.where(counts, target, 0)
        own = c.wrap(gather(c.b, convert(c.tensor(weight), terms.dtype).value, safe.value, 0))
        share = select(counts, own, 0.0)
        terms = terms * share
    if reduction == 0:
        return terms.reshape(shape)
    total = reduced(c, "sum", terms)
    return total if reduction == 2 else total / reduced(c, "sum", share)


@aten("nll_loss", "nll_loss2d", "nll_loss_nd")
def _nll(c: Call, x: Any, y: Any, weight: Any = None, reduction: int = 1, ignore: int = -100) -> Any:
    scores, shape = _classes_last(c, x)
    target = c.tensor(y).reshape(-1)
    counts = target != ignore
    safe: Any = np.where(counts, target, 0)
    own = c.wrap(gather_elements(c.b, scores.value, safe.reshape(-1, 1).value, 1)).reshape(-1)
    return _weighted(c, select(counts, -own, 0.0), target, weight, reduction, ignore, shape)


@aten("cross_entropy_loss")
def _cross_entropy(
    c: Call, x: Any, y: Any, weight: Any = None, reduction: int = 1, ignore: int = -100, smoothing: float = 0.0
) -> Any:
    scores, shape = _classes_last(c, x)
    target = c.tensor(y)
    if target.value.dtype.is_float:
        return _soft(c, scores, _classes_last(c, y)[0], weight, reduction, smoothing, shape)
    target = target.reshape(-1)
    terms = nn.cross_entropy(scores, target, ignore_index=ignore)
    if not smoothing:
        return _weighted(c, terms, target, weight, reduction, ignore, shape)
    counts, n = target != ignore, scores.shape[1]
    logs = nn.log_softmax(scores)
    spread = logs if weight is None else logs * convert(c.tensor(weight), logs.dtype)
    smooth = select(counts, -reduced(c, "sum", spread, 1), 0.0) * (smoothing / n)
    plain = _weighted(c, terms, target, weight, 0, ignore, (-1,)) * (1 - smoothing)
    if reduction == 0:
        return (plain + smooth).reshape(shape)
    total = reduced(c, "sum", plain + smooth)
    if reduction == 2:
        return total
    share = _weighted(c, convert(counts, scores.dtype), target, weight, 2, ignore, ())
    return total / share


def _soft(
    c: Call, scores: Tensor, target: Tensor, weight: Any, reduction: int, smoothing: float, shape: tuple[int, ...]
) -> Any:
    """Cross-entropy of shares of classes."""
    goal = convert(target, scores.dtype)
    if smoothing:
        goal = goal * (1 - smoothing) + smoothing / scores.shape[1]
    logs = nn.log_softmax(scores)
    logs = logs if weight is None else logs * convert(c.tensor(weight), logs.dtype)
    terms = -reduced(c, "sum", goal * logs, 1)
    if reduction == 0:
        return terms.reshape(shape)
    total = reduced(c, "sum", terms)
    return total if reduction == 2 else total / float(scores.shape[0])


@aten(CTC_LOSS, draws=True)  # in so far as it is never computed while importing
def _ctc(
    c: Call, x: Any, targets: Any, times: Any, lengths: Any, blank: int, reduction: int, zero_infinity: bool
) -> Tensor:
    given, labels = c.tensor(x), convert(c.tensor(targets), "int64")
    steps, counts = (convert(c.tensor(each), "int64").reshape(-1) for each in (times, lengths))
    rows = given if given.ndim == 3 else given[:, None]
    if given.ndim < 3:
        labels = labels.reshape(1, -1)
    elif labels.ndim == 1:  # of all samples, one behind the other
        begun: Any = np.cumsum(counts) - counts
        labels = np.take(labels, np.minimum(begun[:, None] + np.arange(labels.size), labels.size - 1))
    losses: Any = CTC(blank=blank, zero_infinity=zero_infinity).of_samples(rows, labels, steps, counts)
    # The gradient is PyTorch's, which takes it that the probabilities are those of a softmax.
    live = np.arange(rows.shape[0])[:, None, None] < steps.reshape(-1, 1)
    share = select(live, np.exp(rows), 0.0).sum((0, 2))
    losses = losses + (share - nn.stop_gradient(share))
    if reduction == 1:
        losses = losses / np.maximum(convert(counts, losses.dtype), 1.0)
    return mean_of(c, losses, reduction).reshape(c.shape)


@aten("multilabel_margin_loss")
def _multilabel_margin(c: Call, x: Any, target: Any, reduction: int = 1) -> Tensor:
    """Of each class before the first -1 of a row, against all others (see `torch.nn.MultiLabelMarginLoss`)."""
    given, classes = c.tensor(x), convert(c.tensor(target), "int64")
    count = given.shape[-1] if given.ndim else 1
    rows: Any = given.reshape(-1, count)
    at: Any = classes.reshape(-1, count)
    counts: Any = np.cumprod(convert(at >= 0, "int64"), axis=1) > 0
    at = select(counts, at, 0)
    wanted = (at[:, :, None] == np.arange(count)) & counts[:, :, None]
    others = np.sum(convert(wanted, "int64"), axis=1) == 0
    gaps = 1.0 - (np.take_along_axis(rows, at, axis=1)[:, :, None] - rows[:, None, :])
    held = others[:, None, :] & counts[:, :, None] & (gaps > 0.0)
    terms: Any = select(held, gaps, 0.0).sum((1, 2)) / float(count)
    return mean_of(c, terms, reduction).reshape(c.shape)
