"""Functions of neural networks that have no parameters: activations, pooling, attention, dropout, selection."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, TypedDict

import numpy as np

from foreplan.arguments import whole
from foreplan.errors import ShapeError
from foreplan.frontend.nn.windows import PerAxis, per_axis
from foreplan.frontend.tracing.dispatch import as_axis
from foreplan.frontend.tracing.elementwise import apply, as_bool, convert, select
from foreplan.frontend.tracing.tensor import Tensor, as_tensor
from foreplan.frontend.tracing.tracer import current, fail
from foreplan.graph import Value, as_dtype
from foreplan.ops import expr as ex
from foreplan.ops import index, pool, random, scan, sort
from foreplan.ops import loss as losses
from foreplan.ops import resize as resizing
from foreplan.ops import softmax as normalising
from foreplan.ops.attention import ops as attending
from foreplan.ops.expr import Expr, call
from foreplan.ops.marks import StopGradient, StraightThrough
from foreplan.ops.reduce import reduce

# Activations


def relu(x: Any) -> Tensor:
    """max(x, 0)."""
    return apply("relu", ex.relu, x)


def relu6(x: Any) -> Tensor:
    """x limited to [0, 6]."""
    return apply("relu6", lambda x: ex.clip(x, 0.0, 6.0), x)


def leaky_relu(x: Any, slope: float = 0.01) -> Tensor:
    """x where positive, else slope·x."""
    return apply("leaky_relu", lambda x: ex.where(x > 0.0, x, slope * x), x)


def elu(x: Any, alpha: float = 1.0) -> Tensor:
    """x where positive, else alpha·(eˣ − 1) (Clevert et al. 2016)."""
    return apply("elu", lambda x: ex.where(x > 0.0, x, alpha * call("expm1", ex.minimum(x, 0.0))), x)


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
        TraceError: `approximate` is another word.
    """

    def exact(x: Expr) -> Expr:
        return 0.5 * x * (1.0 + ex.erf(x * math.sqrt(0.5)))

    def by_tanh(x: Expr) -> Expr:
        return 0.5 * x * (1.0 + ex.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * (x * x * x))))

    if approximate not in ("none", "tanh"):
        raise fail(f"gelu(approximate={approximate!r}): use 'none' or 'tanh'")
    return apply("gelu", exact if approximate == "none" else by_tanh, x)


def softmax(x: Any, axis: int = -1) -> Tensor:
    """eˣ / Σ eˣ along an axis; floating-point x of any shape."""
    return _wrap(normalising.softmax(current().at(), as_tensor(x).value, axis))


def log_softmax(x: Any, axis: int = -1) -> Tensor:
    """Logarithm of the softmax along an axis."""
    return _wrap(normalising.log_softmax(current().at(), as_tensor(x).value, axis))


def stop_gradient(x: Any) -> Tensor:
    """x as it is, for which no gradient comes back; x of any shape and type."""
    return _wrap(current().at().apply(StopGradient(), as_tensor(x).value))


def straight_through(value: Any, through: Any) -> Tensor:
    """`value` as it is, whose gradient goes to `through` instead; both of one shape and type.

    `straight_through(round(x), x)` is x rounded, with the gradient of x (Bengio et al., 2013, arXiv:1308.3432).

    Raises:
        ShapeError: the shapes or types differ.
    """
    return _wrap(current().at().apply(StraightThrough(), as_tensor(value).value, as_tensor(through).value))


def dropout(x: Any, ratio: float = 0.5) -> Tensor:
    """Zero each element with probability `ratio` and scale the rest by 1 / (1 − ratio) (Srivastava et al. 2014).

    This happens in training only; in inference the result is `x`.

    Raises:
        TraceError: the ratio is outside [0, 1).
    """
    if not 0.0 <= ratio < 1.0:
        raise fail(f"dropout's ratio must be in [0, 1), and is {ratio}")
    tensor = as_tensor(x)
    return tensor if not ratio else _wrap(random.dropout(current().at(), tensor.value, ratio))


# Pooling and resizing


def max_pool(
    x: Tensor,
    kernel: PerAxis,
    stride: PerAxis | None = None,
    padding: PerAxis = 0,
    dilation: PerAxis = 1,
) -> Tensor:
    """Maximum over windows of [N, C, *S]; the stride is the kernel's extent by default.

    Raises:
        ShapeError: no window fits into the padded images.
        UsageError: a size is not a whole number, or too small.
    """
    geometry = _windows("max_pool", x, kernel, stride, padding)
    gaps = per_axis("max_pool's dilation", dilation, x.ndim - 2)
    return _wrap(pool.max_pool(current().at(), x.value, dilations=gaps, **geometry))


def avg_pool(
    x: Tensor,
    kernel: PerAxis,
    stride: PerAxis | None = None,
    padding: PerAxis = 0,
    count_padding: bool = False,
) -> Tensor:
    """Mean over windows of [N, C, *S]; the stride is the kernel's extent by default.

    Padding counts as zeros only with `count_padding`.

    Raises:
        ShapeError: no window fits into the padded images, or elements are not floating-point.
        UsageError: a size is not a whole number, or too small.
    """
    geometry = _windows("avg_pool", x, kernel, stride, padding)
    return _wrap(pool.avg_pool(current().at(), x.value, count_include_pad=count_padding, **geometry))


class _Windows(TypedDict):
    """The arguments that poolings share, one entry for each spatial axis."""

    kernel: tuple[int, ...]
    strides: tuple[int, ...]
    pads: tuple[int, ...]


def _windows(kind: str, x: Tensor, kernel: PerAxis, stride: PerAxis | None, padding: PerAxis) -> _Windows:
    axes = x.ndim - 2
    taps = per_axis(f"{kind}'s kernel", kernel, axes)
    steps = taps if stride is None else per_axis(f"{kind}'s stride", stride, axes)
    return {"kernel": taps, "strides": steps, "pads": per_axis(f"{kind}'s padding", padding, axes, 0)}


def global_avg_pool(x: Tensor) -> Tensor:
    """Mean over all spatial axes: [N, C, *S] → [N, C]."""
    return _wrap(reduce(current().at(), "mean", x.value, range(2, x.ndim)))


def resize(x: Tensor, size: PerAxis, mode: str = "linear", align_corners: bool = False) -> Tensor:
    """[N, C, *S] → [N, C, *size] by interpolation.

    Args:
        x: images.
        size: new extent along each spatial axis; one number for all.
        mode: "nearest" (the sample at or before), "linear" (bilinear in two dimensions) or "cubic".
        align_corners: whether the outermost samples keep their places; else pixels are areas (half-pixel centres).

    Raises:
        ShapeError: the size does not fit the axes, or the mode is not known.
        UnsupportedError: an axis is too long.
        UsageError: a size is not a whole number of at least 1.
    """
    spatial = per_axis("resize's size", size, x.ndim - 2)
    nearest = mode == "nearest"
    coordinate = "align_corners" if align_corners else "asymmetric" if nearest else "half_pixel"
    shape, b = (*x.shape[:2], *spatial), current().at()
    y = resizing.resize(
        b, x.value, shape, mode=mode, coordinate=coordinate, rounding="floor" if nearest else "round_prefer_floor"
    )
    return _wrap(y)


def upsample(x: Tensor, scale: int = 2, mode: str = "nearest") -> Tensor:
    """[N, C, *S] with every spatial extent `scale` times as large; modes as in `resize`.

    Raises:
        UsageError: the scale is not a whole number of at least 1.
    """
    times = whole("upsample's scale", scale, 1)
    return resize(x, [n * times for n in x.shape[2:]], mode)


def concat(tensors: Sequence[Any], axis: int = 1) -> Tensor:
    """Tensors joined along an axis, the channels by default. Their other extents and element types are the same."""
    joined: Any = np.concatenate(tensors, axis=axis)
    return as_tensor(joined)


def flatten(x: Tensor, start: int = 1) -> Tensor:
    """The axes from `start` on as one axis: [N, C, H, W] → [N, C·H·W]."""
    first = as_axis(start, x.ndim)
    return x.reshape(*x.shape[:first], math.prod(x.shape[first:]))


# Attention


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Any = None,
    causal: bool = False,
    scale: float | None = None,
    heads_last: bool = False,
) -> Tensor:
    """softmax(q·kᵀ·scale + mask)·v: [B, H, T, E]. The whole score matrix never exists.

    Args:
        q: queries [B, H, T, D].
        k: keys [B, G, S, D]; G divides H, and H/G neighbouring query heads share a key head.
        v: values [B, G, S, E].
        mask: broadcasts to [B, H, T, S]; added to the scores, or boolean (True: attend).
        causal: position t attends to positions up to t.
        scale: factor on the scores, 1/√D by default.
        heads_last: q, k, v and the result are [B, positions, heads, depth], as `split_heads` gives them.

    Raises:
        ShapeError: shapes or element types do not fit each other.
    """
    bias = None if mask is None else _additive(mask, q).value
    b = current().at()
    y = attending.attention(b, q.value, k.value, v.value, bias, causal=causal, scale=scale, heads_last=heads_last)
    return _wrap(y)


def _additive(mask: Any, q: Tensor) -> Tensor:
    """A mask as numbers to add to scores, with four axes."""
    mask = mask if isinstance(mask, Tensor) else np.asarray(mask)
    dtype = q.value.dtype
    if np.dtype(mask.dtype) == bool:
        # The lowest number and not -inf: a query without any key then gets the mean of the values, not NaN.
        lowest = float(np.finfo(np.float32 if dtype.name == "bfloat16" else dtype.numpy).min)
        if isinstance(mask, np.ndarray):
            mask = np.where(mask, 0.0, lowest)
        else:
            mask = select(mask, 0.0, lowest)
    found = convert(as_tensor(mask, dtype), dtype)
    return found.reshape((1,) * (4 - found.ndim) + found.shape)


def split_heads(x: Tensor, heads: int, parts: int = 1) -> tuple[Tensor, ...]:
    """[B, T, parts·D] → `parts` tensors [B, T, heads, D/heads], all of them views, for `attention(heads_last=True)`.

    Raises:
        ShapeError: `x` does not have three axes, or the heads do not divide D.
        UsageError: `heads` or `parts` is not a whole number of at least 1.
    """
    parts, heads = whole("the number of parts", parts, 1), whole("the number of heads", heads, 1)
    if x.ndim != 3 or x.shape[2] % (parts * heads):
        raise ShapeError(
            f"{x!r} does not split into {parts} × {heads} heads; it needs [batch, positions, width] with a width that "
            f"{parts * heads} divides"
        )
    batch, length, width = x.shape
    pieces: Any = np.split(x, parts, axis=2) if parts > 1 else [x]
    return tuple(piece.reshape(batch, length, heads, width // parts // heads) for piece in pieces)


def join_heads(x: Tensor) -> Tensor:
    """[B, T, H, D] → [B, T, H·D], a view.

    Raises:
        ShapeError: `x` does not have four axes.
    """
    if x.ndim != 4:
        raise ShapeError(f"join_heads needs [batch, positions, heads, depth], and got {x!r}")
    batch, length, heads, width = x.shape
    return x.reshape(batch, length, heads * width)


# Loss terms and selection


def cross_entropy(logits: Tensor, target: Tensor, axis: int = -1, ignore_index: int = -100) -> Tensor:
    """−log softmax(logits)[target]: one number for each item, in the shape of the target.

    Args:
        logits: floating-point scores, with the classes along `axis`.
        target: integers in the shape of the logits without that axis.
        axis: the axis of the classes.
        ignore_index: the target of items that do not count; their loss is 0.

    Raises:
        ShapeError: the target does not fit the logits.
    """
    found = as_axis(axis, logits.ndim)
    b = current().at()
    return _wrap(losses.cross_entropy(b, logits.value, target.value, axis=found, ignore_index=ignore_index))


def one_hot(ids: Tensor, depth: int, axis: int = -1, dtype: str = "float32") -> Tensor:
    """1 where the index along the new axis equals the element, else 0: integers [...] → [..., depth].

    Raises:
        UsageError: the depth is not a whole number of at least 0.
    """
    depth = whole("one_hot's depth", depth, 0)
    return _wrap(index.one_hot(current().at(), ids.value, depth, axis=axis, dtype=as_dtype(dtype)))


def cumsum(x: Tensor, axis: int = -1, exclusive: bool = False, reverse: bool = False) -> Tensor:
    """Running sum along an axis; `exclusive` leaves the element itself out, `reverse` runs from the end."""
    return _wrap(current().at().apply(scan.CumSum(as_axis(axis, x.ndim), exclusive, reverse), x.value))


def topk(x: Tensor, k: int, axis: int = -1, largest: bool = True) -> tuple[Tensor, Tensor]:
    """The k largest (or smallest) elements along an axis, in order, and their indices (int64).

    Raises:
        ShapeError: the axis has fewer than k elements.
        UsageError: k is not a whole number of at least 0.
    """
    k = whole("topk's k", k, 0)
    values, indices = current().at().node(sort.TopK(k, as_axis(axis, x.ndim), largest), x.value)
    return _wrap(values), _wrap(indices)


def masked_mean(x: Tensor, mask: Tensor) -> Tensor:
    """Mean of the elements where the mask is true, a scalar; 0 if it is true nowhere."""
    count = convert(as_bool(mask), x.value.dtype).sum()
    return (x * convert(as_bool(mask), x.value.dtype)).sum() / np.maximum(count, 1.0)


def _wrap(value: Value) -> Tensor:
    return current().wrap(value)
