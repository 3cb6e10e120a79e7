"""ATen ops of layers: convolution, pooling, normalisation, lookup."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from foreplan.frontend import nn
from foreplan.frontend.torch.call import Call
from foreplan.frontend.torch.ops.elementwise import numbers
from foreplan.frontend.torch.ops.reductions import listed, reduced
from foreplan.frontend.torch.table import aten
from foreplan.frontend.tracing.elementwise import apply, convert, select
from foreplan.frontend.tracing.tensor import Tensor, as_tensor
from foreplan.graph import Value
from foreplan.ops import pool
from foreplan.ops.conv import ops as convolution
from foreplan.ops.expr import rsqrt
from foreplan.ops.index import ScatterAdd, gather
from foreplan.ops.norm import rows
from foreplan.ops.norm.batch import BatchNorm, BatchNormTrain

# Convolutions


def _batched(x: Tensor, axes: int) -> Tensor:
    """Images with an axis of items, which PyTorch lets one leave out."""
    return x if x.ndim == axes + 2 else x.reshape(1, *x.shape)


@aten("conv1d", "conv2d", "conv3d", "convolution")
def _conv(
    c: Call,
    x: Any,
    weight: Any,
    bias: Any = None,
    stride: Any = (1,),
    padding: Any = (0,),
    dilation: Any = (1,),
    groups: Any = 1,
    *more: Any,
) -> Any:
    if c.name == "convolution":
        transposed, output_padding, groups = groups, *more[:2]
        if transposed:
            return _conv_transpose(c, x, weight, bias, stride, padding, output_padding, groups, dilation)
    w = c.tensor(weight)
    axes = w.ndim - 2
    images, gaps = _batched(c.tensor(x), axes), listed(dilation, axes)
    if padding == "valid":
        pads: tuple[tuple[int, int], ...] = ((0, 0),) * axes
    elif padding == "same":
        spans = [gap * (taps - 1) for gap, taps in zip(gaps, w.shape[2:])]
        pads = tuple((span // 2, span - span // 2) for span in spans)
    else:
        pads = tuple((p, p) for p in listed(padding, axes))
    geometry: Any = {"strides": listed(stride, axes), "pads": pads, "dilations": gaps}
    y = convolution.conv(c.b, images.value, w.value, *c.values(bias), groups=groups, **geometry)
    return c.wrap(y).reshape(c.shape)


@aten("conv_transpose1d", "conv_transpose2d", "conv_transpose3d")
def _conv_transpose(
    c: Call,
    x: Any,
    weight: Any,
    bias: Any = None,
    stride: Any = (1,),
    padding: Any = (0,),
    output_padding: Any = (0,),
    groups: int = 1,
    dilation: Any = (1,),
) -> Any:
    w = c.tensor(weight)
    axes = w.ndim - 2
    geometry: Any = {
        "strides": listed(stride, axes),
        "pads": tuple((p, p) for p in listed(padding, axes)),
        "dilations": listed(dilation, axes),
    }
    images, extra = _batched(c.tensor(x), axes), listed(output_padding, axes)
    y = convolution.conv_transpose(
        c.b, images.value, w.value, *c.values(bias), groups=groups, output_padding=extra, **geometry
    )
    return c.wrap(y).reshape(c.shape)


# Pooling


def _axes(c: Call) -> int:
    return next(int(letter) for letter in c.name if letter in "123")


@aten("max_pool1d", "max_pool2d", "max_pool3d")
@aten("max_pool1d_with_indices", "max_pool2d_with_indices", "max_pool3d_with_indices")
def _max_pool(
    c: Call, x: Any, kernel: Any, stride: Any = (), padding: Any = (0,), dilation: Any = (1,), ceil_mode: bool = False
) -> Any:
    axes = _axes(c)
    taps, images = listed(kernel, axes), _batched(c.tensor(x), axes).value
    geometry: Any = {
        "strides": listed(stride, axes) if stride else taps,
        "pads": tuple((p, p) for p in listed(padding, axes)),
        "dilations": listed(dilation, axes),
    }
    if not c.name.endswith("indices"):
        return c.wrap(pool.max_pool(c.b, images, taps, ceil_mode=ceil_mode, **geometry)).reshape(c.shape)
    y, places = (c.wrap(v) for v in pool.max_pool_places(c.b, images, taps, ceil_mode=ceil_mode, **geometry))
    channel = int(np.prod(images.shape[2:]))  # PyTorch counts the places of each channel for itself
    return [each.reshape(tuple(like.shape)) for each, like in zip((y, places % channel), c.result)]


@aten("avg_pool1d", "avg_pool2d", "avg_pool3d")
def _avg_pool(
    c: Call,
    x: Any,
    kernel: Any,
    stride: Any = (),
    padding: Any = (0,),
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> Any:
    axes = _axes(c)
    taps = listed(kernel, axes)
    images: Any = _batched(c.tensor(x), axes)
    steps, pads = listed(stride, axes) if stride else taps, tuple((p, p) for p in listed(padding, axes))
    if divisor_override is not None:  # sums, of windows that lie within zeros all around
        ends = ((m - 1) * s + k - n for m, s, k, n in zip(c.shape[-axes:], steps, taps, images.shape[-axes:]))
        pads = tuple((low, max(end - low, 0)) for (low, _), end in zip(pads, ends))
        images, pads = np.pad(images, [(0, 0), (0, 0), *pads]), ((0, 0),) * axes
        ceil_mode = False
    y = pool.avg_pool(
        *(c.b, as_tensor(images).value, taps),
        ceil_mode=ceil_mode,
        count_include_pad=count_include_pad,
        strides=steps,
        pads=pads,
    )
    found: Any = c.wrap(y)
    if divisor_override is not None:
        found = found * (float(np.prod(taps)) / divisor_override)
    return found.reshape(c.shape)


@aten("adaptive_avg_pool1d", "adaptive_avg_pool2d", "adaptive_avg_pool3d")
def _adaptive_avg_pool(c: Call, x: Any, size: Any) -> Any:
    images = _batched(c.tensor(x), _axes(c))
    return nn.adaptive_avg_pool(images, c.shape[-_axes(c) :]).reshape(c.shape)


@aten("adaptive_max_pool1d", "adaptive_max_pool2d", "adaptive_max_pool3d")
def _adaptive_max_pool(c: Call, x: Any, size: Any) -> Any:
    shape = tuple(c.result[0].shape)
    images = _batched(c.tensor(x), _axes(c))
    return [nn.adaptive_max_pool(images, shape[-_axes(c) :]).reshape(shape), None]


# Normalisation


@aten("layer_norm")
def _layer_norm(
    c: Call, x: Any, shape: Sequence[int], weight: Any = None, bias: Any = None, eps: float = 1e-5, *_: Any
) -> Tensor:
    tensor = c.tensor(x)
    axis = tensor.ndim - len(shape)
    return c.wrap(rows.layer_norm(c.b, tensor.value, *c.values(weight, bias), axis=axis, epsilon=eps))


@aten("rms_norm")
def _rms_norm(c: Call, x: Any, shape: Sequence[int], weight: Any = None, eps: float | None = None) -> Tensor:
    tensor = c.tensor(x)
    least = float(np.finfo(np.float32).eps if tensor.value.dtype.itemsize <= 4 else np.finfo(np.float64).eps)
    axis = tensor.ndim - len(shape)
    return c.wrap(rows.rms_norm(c.b, tensor.value, *c.values(weight), axis=axis, epsilon=eps or least))


@aten("group_norm")
def _group_norm(
    c: Call, x: Any, groups: int, weight: Any = None, bias: Any = None, eps: float = 1e-5, *_: Any
) -> Tensor:
    return c.wrap(rows.group_norm(c.b, c.value(x), groups, *c.values(weight, bias), epsilon=eps))


@aten("instance_norm")
def _instance_norm(
    c: Call,
    x: Any,
    weight: Any,
    bias: Any,
    running_mean: Any,
    running_var: Any,
    use_input_stats: bool,
    momentum: float,
    eps: float,
    *_: Any,
) -> Tensor:
    images = c.tensor(x)
    if running_mean is None or use_input_stats:
        y = c.wrap(rows.group_norm(c.b, images.value, images.shape[1], *c.values(weight, bias), epsilon=eps))
        if running_mean is not None:
            _follow_items(c, images, running_mean, running_var, momentum)
        return y
    return c.wrap(
        c.b.apply(BatchNorm(eps, 1 - momentum, True), *_affine(c, images, weight, bias, running_mean, running_var))
    )


def _follow_items(c: Call, images: Tensor, mean: Any, var: Any, momentum: float) -> None:
    """The running statistics follow the mean, over the items, of each item's own: its variance without bias."""
    images = nn.stop_gradient(images)
    axes = list(range(2, images.ndim))
    count = int(np.prod(images.shape[2:]))
    means = reduced(c, "mean", images, axes, True)
    squares = apply("square", lambda x, m: (x - m) * (x - m), images, means)
    spread: Any = reduced(c, "sum", squares, axes) / float(max(count - 1, 1))
    for at, old, new in ((3, mean, means.reshape(images.shape[:2])), (4, var, spread)):
        kept = c.tensor(old)
        batch = reduced(c, "mean", new, 0)
        c.written[at] = apply(
            "follow", lambda o, n: o * (1 - momentum) + n * momentum, kept, convert(batch, kept.dtype)
        )


def _affine(c: Call, x: Tensor, weight: Any, bias: Any, *others: Any) -> list[Value]:
    """The inputs of a batch normalisation, whose scale and bias PyTorch lets one leave out."""
    dtype = c.tensor(others[0]).value.dtype if others else x.value.dtype.wide
    n = x.shape[1]
    filled = (np.full(n, fill, dtype.numpy) if given is None else given for given, fill in ((weight, 1), (bias, 0)))
    return [x.value, *(c.value(each) for each in (*filled, *others))]


@aten("batch_norm")
def _batch_norm(
    c: Call,
    x: Any,
    weight: Any,
    bias: Any,
    running_mean: Any,
    running_var: Any,
    training: bool,
    momentum: float,
    eps: float,
    *_: Any,
) -> Tensor:
    images = c.tensor(x)
    if running_mean is None or (training and not c.training):
        return c.wrap(c.b.node(BatchNormTrain(eps), *_affine(c, images, weight, bias))[0])
    inputs = _affine(c, images, weight, bias, running_mean, running_var)
    frozen = c.training and not training
    return c.wrap(c.b.apply(BatchNorm(eps, 1 - momentum, frozen, unbiased=True), *inputs))


@aten("_weight_norm")
def _weight_norm(c: Call, v: Any, g: Any, dim: int = 0) -> Tensor:
    direction = c.tensor(v)
    axes = [i for i in range(direction.ndim) if i != dim % direction.ndim or dim == -1]
    total = reduced(c, "sum", apply("square", lambda v: v * v, direction), axes, True)
    return numbers(c, "weight_norm", lambda v, g, n: v * g * rsqrt(n), direction, g, total)


@aten("local_response_norm")
def _lrn(c: Call, x: Any, size: int, alpha: float = 1e-4, beta: float = 0.75, k: float = 1.0) -> Tensor:
    return c.wrap(pool.lrn(c.b, c.value(x), size, alpha, beta, k))


@aten("embedding_renorm_")
def _embedding_renorm(c: Call, table: Any, places: Any, most: float, norm: float) -> Any:
    """Rows that are looked up, and whose norm is larger, are scaled to that. What is 1 / (norm + 1e-7) is PyTorch's."""
    rows = c.tensor(table)
    sizes: Any = np.abs(rows)
    lengths = np.max(sizes, axis=1) if norm == np.inf else np.sum(sizes**norm, axis=1) ** (1 / norm)
    flat = c.tensor(places).reshape(-1)
    ones = c.tensor(np.ones(flat.shape, c.dtype.numpy))
    counts = c.wrap(c.b.apply(ScatterAdd(0, (rows.shape[0],)), flat.value, ones.value))
    shares = select((lengths > most) & (counts > 0.0), most / (lengths + 1e-7), 1.0)
    return rows * shares.reshape(-1, 1)


# Lookup


@aten("embedding")
def _embedding(
    c: Call, table: Any, ids: Any, padding_idx: int = -1, scale_grad_by_freq: bool = False, sparse: bool = False
) -> Any:
    w, at = c.tensor(table), c.tensor(ids)
    if scale_grad_by_freq:
        w = _scaled_by_count(c, w, at)
    y = c.wrap(gather(c.b, w.value, at.value, 0, from_end=False))
    if padding_idx < 0:
        return y
    is_padding = (at == padding_idx).reshape(*at.shape, 1)
    return select(is_padding, nn.stop_gradient(y), y)


def _scaled_by_count(c: Call, table: Tensor, ids: Tensor) -> Tensor:
    """A table whose rows' gradients are divided by how often each is read: the value stays."""
    from foreplan.ops.index import ScatterAdd

    flat = ids.reshape(-1)
    ones = as_tensor(np.ones(flat.shape, np.float32))
    counts = c.wrap(c.b.apply(ScatterAdd(0, table.shape[:1]), flat.value, ones.value))
    share = convert(1.0 / np.maximum(counts, 1.0), table.dtype).reshape(-1, 1)
    scaled = table * share
    return nn.straight_through(nn.stop_gradient(table), scaled)


@aten("embedding_bag", "_embedding_bag", "_embedding_bag_forward_only")
def _embedding_bag(
    c: Call,
    table: Any,
    ids: Any,
    offsets: Any,
    scale_grad_by_freq: bool = False,
    mode: int = 0,
    sparse: bool = False,
    weights: Any = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> list[Any]:
    w, at, starts = c.tensor(table), c.tensor(ids).reshape(-1), c.tensor(offsets)
    if scale_grad_by_freq:
        w = _scaled_by_count(c, w, at)
    count, bags = at.size, c.result[0].shape[0]
    # Which bag an entry is in: as many as have begun by then, less one.
    begun = starts[:bags].reshape(-1, 1) <= np.arange(count)
    bag = convert(begun, "int64").sum(0) - 1
    read = c.wrap(gather(c.b, w.value, at.value, 0, from_end=False))
    counted: Any = as_tensor(np.ones(count, np.float32))
    if padding_idx is not None and not (c.name.startswith("_") and padding_idx < 0):
        counted = convert(at != padding_idx % w.shape[0], "float32")
        read = select(counted.reshape(-1, 1) > 0.0, read, 0.0 if mode != 2 else -np.inf)
    if weights is not None:
        read = read * c.tensor(weights).reshape(-1, 1)
    if mode == 2:
        return [_bag_max(c, read, bag, bags), None, None, None]
    from foreplan.ops.index import ScatterAdd

    total = c.wrap(c.b.apply(ScatterAdd(0, (bags, w.shape[1])), bag.value, read.value))
    if mode == 1:
        sizes = c.wrap(c.b.apply(ScatterAdd(0, (bags,)), bag.value, counted.value))
        total = total / convert(np.maximum(sizes, 1.0), total.dtype).reshape(-1, 1)
    return [total, None, None, None]


def _bag_max(c: Call, read: Tensor, bag: Tensor, bags: int) -> Any:
    """The largest entries of each bag; zeros for one without entries."""
    member = np.arange(bags).reshape(-1, 1) == bag
    spread = select(member[..., None], read, -np.inf)
    high = reduced(c, "max", spread, 1)
    return select(np.isinf(high), 0.0, high)
