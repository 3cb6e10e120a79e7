"""Functions of neural networks that have no parameters: activations, pooling, attention, dropout, selection."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from foreplan.arguments import whole
from foreplan.errors import ShapeError
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
        TraceError: another word for `approximate`.
    """

    def exact(x: Expr) -> Expr:
        return 0.5 * x * (1.0 + ex.erf(x * math.sqrt(0.5)))

    def by_tanh(x: Expr) -> Expr:
        return 0.5 * x * (1.0 + ex.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * (x * x * x))))

    if approximate not in ("none", "tanh"):
        raise fail(f"gelu(approximate={approximate!r}): use 'none' or 'tanh'")
    return apply("gelu", exact if approximate == "none" else by_tanh, x)


def softmax(x: Any, axis: int = -1) -> Tensor:
    """e^x / Σ e^x along an axis."""
    return _wrap(normalising.softmax(current().at(), as_tensor(x).value, axis))


def log_softmax(x: Any, axis: int = -1) -> Tensor:
    """Logarithm of the softmax along an axis."""
    return _wrap(normalising.log_softmax(current().at(), as_tensor(x).value, axis))


def dropout(x: Any, ratio: float = 0.5) -> Tensor:
    """In training, zero each element with probability `ratio` and scale the rest by 1 / (1 − ratio); else `x` itself.

    Raises:
        TraceError: the ratio is outside [0, 1).
    """
    if not 0.0 <= ratio < 1.0:
        raise fail(f"dropout with the ratio {ratio}; it must be at least 0 and less than 1")
    tensor = as_tensor(x)
    return tensor if not ratio else _wrap(random.dropout(current().at(), tensor.value, ratio))


# Pooling and resizing


def max_pool(
    x: Tensor,
    kernel: int | Sequence[int],
    stride: int | Sequence[int] | None = None,
    padding: int | Sequence[int] = 0,
    dilation: int | Sequence[int] = 1,
) -> Tensor:
    """Maximum over windows of [N, C, *S]; the stride is the kernel's extent by default."""
    stride = kernel if stride is None else stride
    y = pool.max_pool(current().at(), x.value, kernel, strides=stride, pads=padding, dilations=dilation)
    return _wrap(y)


def avg_pool(
    x: Tensor,
    kernel: int | Sequence[int],
    stride: int | Sequence[int] | None = None,
    padding: int | Sequence[int] = 0,
    count_padding: bool = False,
) -> Tensor:
    """Mean over windows of [N, C, *S]; padding counts as zeros only with `count_padding`."""
    stride = kernel if stride is None else stride
    y = pool.avg_pool(current().at(), x.value, kernel, strides=stride, pads=padding, count_include_pad=count_padding)
    return _wrap(y)


def global_avg_pool(x: Tensor) -> Tensor:
    """Mean over all spatial axes: [N, C, *S] → [N, C]."""
    return _wrap(reduce(current().at(), "mean", x.value, range(2, x.ndim)))


def resize(x: Tensor, size: int | Sequence[int], mode: str = "linear", align_corners: bool = False) -> Tensor:
    """[N, C, *S] with spatial extents `size`.

    Args:
        x: images.
        size: new extent along each spatial axis; one number for all.
        mode: "nearest" (the sample at or before), "linear" (bilinear in two dimensions) or "cubic".
        align_corners: outermost samples stay outermost; else pixels are areas (half-pixel centres).
    """
    spatial = (size,) * (x.ndim - 2) if isinstance(size, int) else tuple(size)
    nearest = mode == "nearest"
    coordinate = "align_corners" if align_corners else "asymmetric" if nearest else "half_pixel"
    shape, b = (*x.shape[:2], *spatial), current().at()
    y = resizing.resize(
        b, x.value, shape, mode=mode, coordinate=coordinate, rounding="floor" if nearest else "round_prefer_floor"
    )
    return _wrap(y)


def upsample(x: Tensor, scale: int = 2, mode: str = "nearest") -> Tensor:
    """[N, C, *S] with every spatial extent `scale` times as large."""
    times = whole("upsample's scale", scale, 1)
    return resize(x, [n * times for n in x.shape[2:]], mode)


def concat(tensors: Sequence[Any], axis: int = 1) -> Tensor:
    """Tensors one behind the other along an axis, the channels by default."""
    joined: Any = np.concatenate(tensors, axis=axis)
    return as_tensor(joined)


def flatten(x: Tensor, start: int = 1) -> Tensor:
    """Axes from `start` on as one: [N, C, H, W] → [N, C·H·W]."""
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
    """softmax(q·kᵀ·scale + mask)·v, without ever holding the whole score matrix.

    Args:
        q: [B, H, T, D].
        k: [B, H, S, D]; fewer heads than q's are shared by equal groups of them.
        v: [B, H, S, D], like k.
        mask: broadcasts to [B, H, T, S]; added to the scores, or boolean (True: attend).
        causal: position t attends to positions up to t.
        scale: 1/√D by default.
        heads_last: q, k, v and the result are [B, T, H, D], what `split_heads` gives.
    """
    bias = None if mask is None else _additive(mask, q).value
    b = current().at()
    y = attending.attention(b, q.value, k.value, v.value, bias, causal=causal, scale=scale, heads_last=heads_last)
    return _wrap(y)


def _additive(mask: Any, q: Tensor) -> Tensor:
    """A mask as numbers to add to scores, with four axes."""
    dtype = q.value.dtype
    if np.dtype(mask.dtype) == bool:
        # The lowest number and not -inf: a row that may attend to nothing then gives a mean, not NaN.
        lowest = float(np.finfo(np.float32 if dtype.name == "bfloat16" else dtype.numpy).min)
        if isinstance(mask, np.ndarray):
            mask = np.where(mask, 0.0, lowest)
        else:
            mask = select(mask, 0.0, lowest)
    found = convert(as_tensor(mask, dtype), dtype)
    return found.reshape((1,) * (4 - found.ndim) + found.shape)


def split_heads(x: Tensor, heads: int, parts: int = 1) -> tuple[Tensor, ...]:
    """[B, T, parts·D] as `parts` tensors [B, T, heads, D/heads], all of them views; for `attention(heads_last=True)`.

    Raises:
        ShapeError: the heads do not divide D.
    """
    batch, length, width = x.shape
    if width % (parts * heads):
        raise ShapeError(f"{x!r} does not split into {parts} × {heads} heads")
    pieces: Any = np.split(x, parts, axis=2) if parts > 1 else [x]
    return tuple(piece.reshape(batch, length, heads, width // parts // heads) for piece in pieces)


def join_heads(x: Tensor) -> Tensor:
    """[B, T, H, D] → [B, T, H·D], a view."""
    batch, length, heads, width = x.shape
    return x.reshape(batch, length, heads * width)


# Loss terms and selection


def cross_entropy(logits: Tensor, target: Tensor, axis: int = -1, ignore_index: int = -100) -> Tensor:
    """−log softmax(logits)[target], one number an item.

    Args:
        logits: scores, with the classes along `axis`.
        target: integers, the logits' shape without that axis; items with `ignore_index` give 0.
        axis: of the classes.
        ignore_index: what marks an item that does not count.
    """
    found = as_axis(axis, logits.ndim)
    b = current().at()
    return _wrap(losses.cross_entropy(b, logits.value, target.value, axis=found, ignore_index=ignore_index))


def one_hot(ids: Tensor, depth: int, axis: int = -1, dtype: str = "float32") -> Tensor:
    """1 where the new axis' index equals the element, else 0: integers [...] → [..., depth]."""
    return _wrap(index.one_hot(current().at(), ids.value, depth, axis=axis, dtype=as_dtype(dtype)))


def cumsum(x: Tensor, axis: int = -1, exclusive: bool = False, reverse: bool = False) -> Tensor:
    """Running sum along an axis; `exclusive` leaves the element itself out, `reverse` runs from the end."""
    return _wrap(current().at().apply(scan.CumSum(as_axis(axis, x.ndim), exclusive, reverse), x.value))


def topk(x: Tensor, k: int, axis: int = -1, largest: bool = True) -> tuple[Tensor, Tensor]:
    """The k largest (or smallest) elements along an axis, in order, and their indices (int64)."""
    values, indices = current().at().node(sort.TopK(k, as_axis(axis, x.ndim), largest), x.value)
    return _wrap(values), _wrap(indices)


def masked_mean(x: Tensor, mask: Tensor) -> Tensor:
    """Mean of the elements where the mask holds (0 where it never does); a scalar."""
    count = convert(as_bool(mask), x.value.dtype).sum()
    return (x * convert(as_bool(mask), x.value.dtype)).sum() / np.maximum(count, 1.0)


def _wrap(value: Value) -> Tensor:
    return current().wrap(value)
