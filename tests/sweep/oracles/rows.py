"""Reductions, row operations, normalisations and losses by their formulas, in float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import scipy.special

Array = np.ndarray
Arrays = list[Array]


def reduce(op: Any, x: Array) -> Arrays:
    """Integers wrap, as their type does."""
    function = {"sum": np.sum, "mean": np.mean, "prod": np.prod, "max": np.max, "min": np.min}[op.how]
    if x.dtype.kind != "f" and op.how in ("sum", "prod"):
        if x.dtype.kind == "b":
            function = {"sum": np.any, "prod": np.all}[op.how]
            return [function(x, axis=op.axes, keepdims=op.keepdims)]
        return [function(x.astype(object), axis=op.axes, keepdims=op.keepdims, initial=int(op.how == "prod"))]
    if 0 in np.sum(x, axis=op.axes, keepdims=op.keepdims).shape:
        return [np.sum(x, axis=op.axes, keepdims=op.keepdims)]
    return [np.asarray(function(x, axis=op.axes, keepdims=op.keepdims))]


def cumsum(op: Any, x: Array) -> Arrays:
    """Each prefix by itself."""
    x = np.moveaxis(x, op.axis, 0)
    x = x if x.dtype.kind == "f" else x.astype(object)
    x = x[::-1] if op.reverse else x
    y = np.array([x[: i + (not op.exclusive)].sum(0) for i in range(len(x))], x.dtype).reshape(x.shape)
    y = y[::-1] if op.reverse else y
    return [np.moveaxis(y, 0, op.axis)]


def arg_reduce(op: Any, x: Array) -> Arrays:
    """Row by row; NaN is more than anything, and less."""
    rows = np.moveaxis(x, op.axis, -1)
    found = np.zeros(rows.shape[:-1], np.int64)
    for at in np.ndindex(*found.shape):
        row = rows[at].tolist()
        strange = [i for i, value in enumerate(row) if value != value]
        best = (max if op.how == "max" else min)(row) if not strange else None
        places = strange or [i for i, value in enumerate(row) if value == best]
        found[at] = places[-1 if op.last else 0]
    return [np.expand_dims(found, op.axis) if op.keepdims else found]


def top_k(op: Any, x: Array) -> Arrays:
    rows = np.moveaxis(x, op.axis, -1)
    values, places = np.zeros((*rows.shape[:-1], op.k), x.dtype), np.zeros((*rows.shape[:-1], op.k), np.int64)
    for at in np.ndindex(*rows.shape[:-1]):
        row = rows[at].tolist()
        order = sorted(range(len(row)), key=lambda i: (-row[i] if op.largest else row[i], i))[: op.k]
        values[at], places[at] = rows[at][order], order
    return [np.moveaxis(values, -1, op.axis), np.moveaxis(places, -1, op.axis)]


def softmax(op: Any, x: Array) -> Arrays:
    return [scipy.special.softmax(x, op.axis) if x.size else x]


def log_softmax(op: Any, x: Array) -> Arrays:
    return [scipy.special.log_softmax(x, op.axis) if x.size else x]


def softmax_grad(op: Any, y: Array, g: Array) -> Arrays:
    return [y * (g - (y * g).sum(op.axis, keepdims=True))]


def log_softmax_grad(op: Any, y: Array, g: Array) -> Arrays:
    return [g - np.exp(y) * g.sum(op.axis, keepdims=True)]


def layer_norm(op: Any, x: Array, *parameters: Array) -> Arrays:
    axes = tuple(range(op.axis, x.ndim))
    mean = x.mean(axes)
    r = 1 / np.sqrt(x.var(axes) + op.epsilon)
    kept = (*x.shape[: op.axis], *(1 for _ in axes))
    y = (x - mean.reshape(kept)) * r.reshape(kept)
    for i, each in enumerate(parameters):
        y = y * each if i == 0 else y + each
    return [y, mean, r]


def rms_norm(op: Any, x: Array, *scale: Array) -> Arrays:
    axes = tuple(range(op.axis, x.ndim))
    r = 1 / np.sqrt((x * x).mean(axes) + op.epsilon)
    y = x * r.reshape(*x.shape[: op.axis], *(1 for _ in axes))
    return [y * scale[0] if scale else y, r]


def _row_norm_grad(op: Any, inputs: tuple[Array, ...], centred: bool) -> Arrays:
    x, *rest = inputs
    scale = rest.pop(0) if op.scaled else np.ones(x.shape[op.axis :])
    kept = (*x.shape[: op.axis], *(1 for _ in x.shape[op.axis :]))
    mean = rest.pop(0).reshape(kept) if centred else 0.0
    r, g, *added = rest
    r, axes, before = r.reshape(kept), tuple(range(op.axis, x.ndim)), tuple(range(op.axis))
    normal, h = (x - mean) * r, g * scale
    dx = h - normal * (h * normal).mean(axes, keepdims=True)
    if centred:
        dx = dx - h.mean(axes, keepdims=True)
    dx = dx * r + (added[0] if added else 0.0)
    gradients = [(g * normal).sum(before), g.sum(before)][: 1 + centred]
    return [dx, *gradients] if op.scaled else [dx]


def layer_norm_grad(op: Any, *inputs: Array) -> Arrays:
    return _row_norm_grad(op, inputs, True)


def rms_norm_grad(op: Any, *inputs: Array) -> Arrays:
    return _row_norm_grad(op, inputs, False)


def _by_channel(vector: Array, x: Array) -> Array:
    return vector.reshape(-1, *(1 for _ in x.shape[2:]))


def _others(x: Array) -> tuple[int, ...]:
    return (0, *range(2, x.ndim))


def batch_norm(op: Any, x: Array, *vectors: Array) -> Arrays:
    scale, bias, mean, variance = (_by_channel(vector, x) for vector in vectors)
    return [(x - mean) / np.sqrt(variance + op.epsilon) * scale + bias]


def channel_moments(op: Any, x: Array) -> Arrays:
    return [x.mean(_others(x)), x.var(_others(x))]


def batch_norm_train(op: Any, x: Array, scale: Array, bias: Array) -> Arrays:
    moments = channel_moments(op, x)
    return [*batch_norm(op, x, scale, bias, *moments), *moments]


def batch_norm_grad(op: Any, x: Array, scale: Array, mean: Array, variance: Array, g: Array) -> Arrays:
    r, axes = 1 / np.sqrt(variance + op.epsilon), _others(x)
    normal = (x - _by_channel(mean, x)) * _by_channel(r, x)
    dbias, dscale = g.sum(axes), (g * normal).sum(axes)
    count = x.size // x.shape[1]
    inner = g - _by_channel(dbias, x) / count - normal * _by_channel(dscale, x) / count
    return [_by_channel(scale * r, x) * inner, dscale, dbias]


def channel_sums(op: Any, x: Array, mean: Array, g: Array) -> Arrays:
    return [g.sum(_others(x)), (g * (x - _by_channel(mean, x))).sum(_others(x))]


def masked_batch_norm_grad(
    op: Any, x: Array, scale: Array, mean: Array, variance: Array, bits: Array, *of: Array
) -> Arrays:
    truth = np.unpackbits(bits, bitorder="little").view(bool).reshape(x.shape)
    g = np.where(truth, sum(of), 0.0)
    found = batch_norm_grad(op, x, scale, mean, variance, g)
    return [*found, g] if op.keeps else found


def _items(op: Any, logits: Array, target: Array) -> tuple[Array, Array, Array]:
    """Rows of logits, targets, and what an item is: 1 counts, 0 is ignored, NaN is wrong."""
    rows = np.moveaxis(logits, op.axis, -1)
    kind = np.where((target >= 0) & (target < rows.shape[-1]), 1.0, np.nan)
    kind = np.where(target == op.ignore_index, 0.0, kind)
    return rows, np.clip(target, 0, max(1, rows.shape[-1]) - 1).astype(np.int64), kind


def cross_entropy(op: Any, logits: Array, target: Array) -> Arrays:
    rows, at, kind = _items(op, logits, target)
    lse = scipy.special.logsumexp(rows, -1) if rows.size else np.zeros(rows.shape[:-1])
    lse = np.where((rows == -np.inf).all(-1), np.nan, lse)  # the row's maximum is taken away first
    loss = lse - np.take_along_axis(rows, at[..., None], -1)[..., 0]
    return [np.where(kind == 0, 0.0, np.where(np.isnan(kind), np.nan, loss)), lse]


def cross_entropy_grad(op: Any, logits: Array, target: Array, lse: Array, g: Array) -> Arrays:
    rows, at, kind = _items(op, logits, target)
    hot = np.zeros(rows.shape)
    np.put_along_axis(hot, at[..., None], 1.0, -1)
    weight = np.where(kind == 0, 0.0, np.where(np.isnan(kind), np.nan, g))
    return [np.moveaxis((np.exp(rows - lse[..., None]) - hot) * weight[..., None], -1, op.axis)]


def linear_cross_entropy(op: Any, h: Array, w: Array, target: Array, *bias: Array) -> Arrays:
    logits = h @ w.T + (bias[0] if bias else 0.0)
    axis = type("Axis", (), {"axis": 1, "ignore_index": op.ignore_index})
    loss, lse = cross_entropy(axis, logits, target)
    count = int((target != op.ignore_index).sum())
    weight = 1.0 / max(1, count) if op.mean else 1.0
    (d,) = cross_entropy_grad(axis, logits, target, lse, np.full(lse.shape, weight))
    of_weights = [] if op.frozen else [d.T @ h, *[d.sum(0)] * len(bias)]
    return [np.asarray(loss.sum() * weight), d @ w, *of_weights]
