"""Layers: functions of tensors that make their own parameters in the model being traced.

Every layer takes `name`, under which its parameters are called (`conv1.weight`); without one it is called by its kind
and a number. Initialisers are PyTorch's defaults unless the layer says otherwise; `weight_init` replaces them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from foreplan.arguments import number_in
from foreplan.errors import ShapeError
from foreplan.frontend.nn.functions import attention, join_heads, split_heads
from foreplan.frontend.nn.parameters import (
    Init,
    buffer,
    float_dtype,
    layer,
    parameter,
    uniform_fan_in,
    xavier_uniform,
)
from foreplan.frontend.tracing.dispatch import as_axis
from foreplan.frontend.tracing.tensor import Tensor
from foreplan.frontend.tracing.tracer import current
from foreplan.graph import DType, Normal
from foreplan.ops.conv import ops as convolution
from foreplan.ops.matmul import matmul
from foreplan.ops.norm import batch, rows
from foreplan.ops.window import Geometry

Padding = int | Sequence[int] | Sequence[tuple[int, int]] | str


def linear(
    x: Tensor,
    features: int,
    bias: bool = True,
    name: str = "",
    weight_init: Init | None = None,
    bias_init: Init | None = None,
) -> Tensor:
    """x·Wᵀ + b over the last axis: [..., in] → [..., features]; `weight` is [features, in], `bias` [features].

    Both are drawn from U(±1/√in).

    Raises:
        ShapeError: `x` has fewer than two axes.
    """
    inputs = x.shape[-1] if x.shape else 0
    with layer(name, "linear"):
        w, b = _weight_and_bias(x, (features, inputs), features if bias else None, weight_init, bias_init)
        y = current().wrap(matmul(current().at(), x.value, w.value, transpose_b=True))
        return y if b is None else y + b


def _weight_and_bias(
    x: Tensor, shape: tuple[int, ...], biases: int | None, weight_init: Init | None, bias_init: Init | None
) -> tuple[Tensor, Tensor | None]:
    """Parameters `weight` and, unless `biases` is None, `bias`, from U(±1/√n), n = elements of `weight[0]`."""
    default, dtype = uniform_fan_in(math.prod(shape[1:])), float_dtype(x)
    weight = parameter("weight", shape, default if weight_init is None else weight_init, dtype)
    if biases is None:
        return weight, None
    return weight, parameter("bias", biases, default if bias_init is None else bias_init, dtype)


def conv(
    x: Tensor,
    features: int,
    kernel: int | Sequence[int],
    stride: int | Sequence[int] = 1,
    padding: Padding = 0,
    groups: int = 1,
    dilation: int | Sequence[int] = 1,
    bias: bool = True,
    name: str = "",
    weight_init: Init | None = None,
    bias_init: Init | None = None,
) -> Tensor:
    """Convolution in one, two or three dimensions: [N, C, *S] → [N, features, *S'].

    Args:
        x: images, channels second.
        features: output channels.
        kernel: extent along each spatial axis; one number for all.
        stride: step along each spatial axis.
        padding: zeros on both sides of each axis, as one number, one an axis, or pairs (low, high); "valid" is
            none, "same" makes each output extent ⌈input / stride⌉.
        groups: of channels, convolved apart.
        dilation: distance of taps.
        bias: whether there is one.
        name: of the layer; `weight` is [features, C/groups, *kernel], `bias` [features].
        weight_init: U(±1/√fan_in) by default, fan_in = C/groups · taps.
        bias_init: the same by default.

    Raises:
        ShapeError: the groups do not divide the channels, or the kernel exceeds the padded input.
    """
    axes = x.ndim - 2
    taps, steps, gaps = _per_axis(kernel, axes), _per_axis(stride, axes), _per_axis(dilation, axes)
    if axes < 1 or groups < 1 or x.shape[1] % groups or features % groups:
        raise ShapeError(f"conv of {x!r} to {features} channels in {groups} groups: needs [N, C, *S], whole groups")
    with layer(name, "conv"):
        shape = (features, x.shape[1] // groups, *taps)
        w, b = _weight_and_bias(x, shape, features if bias else None, weight_init, bias_init)
        pads, added = _pads(padding, x.shape[2:], taps, steps, gaps), None if b is None else b.value
        geometry: Geometry = {"strides": steps, "pads": pads, "dilations": gaps}
        y = convolution.conv(current().at(), x.value, w.value, added, groups=groups, **geometry)
    return current().wrap(y)


def conv_transpose(
    x: Tensor,
    features: int,
    kernel: int | Sequence[int],
    stride: int | Sequence[int] = 1,
    padding: int | Sequence[int] = 0,
    output_padding: int | Sequence[int] = 0,
    groups: int = 1,
    dilation: int | Sequence[int] = 1,
    bias: bool = True,
    name: str = "",
    weight_init: Init | None = None,
    bias_init: Init | None = None,
) -> Tensor:
    """Transposed convolution: [N, C, *S] → [N, features, *S'], S' = (S − 1)·stride − 2·padding + dilation·(kernel − 1)
    + output_padding + 1.

    `weight` is [C, features/groups, *kernel]; it and `bias` are drawn from U(±1/√(features/groups · taps)).

    Raises:
        ShapeError: the groups do not divide the channels.
    """
    axes = x.ndim - 2
    if axes < 1 or groups < 1 or x.shape[1] % groups or features % groups:
        raise ShapeError(f"conv_transpose of {x!r} to {features} channels in {groups} groups: needs whole groups")
    with layer(name, "conv_transpose"):
        shape = (x.shape[1], features // groups, *_per_axis(kernel, axes))
        w, b = _weight_and_bias(x, shape, features if bias else None, weight_init, bias_init)
        steps, gaps, added = _per_axis(stride, axes), _per_axis(dilation, axes), None if b is None else b.value
        pads, extra = [(p, p) for p in _per_axis(padding, axes)], _per_axis(output_padding, axes)
        geometry: Geometry = {"strides": steps, "pads": pads, "dilations": gaps}
        y = convolution.conv_transpose(
            current().at(), x.value, w.value, added, groups=groups, output_padding=extra, **geometry
        )
    return current().wrap(y)


def _per_axis(given: int | Sequence[int], axes: int) -> tuple[int, ...]:
    found = (given,) * axes if isinstance(given, int) else tuple(int(n) for n in given)
    if len(found) != axes:
        raise ShapeError(f"{given} has {len(found)} numbers for {axes} spatial axes; give one number, or one an axis")
    return found


def _pads(
    padding: Padding, spatial: Sequence[int], taps: Sequence[int], steps: Sequence[int], gaps: Sequence[int]
) -> list[tuple[int, int]]:
    """(low, high) for each spatial axis."""
    if padding == "valid":
        return [(0, 0)] * len(spatial)
    if padding == "same":
        totals = [max((-(-n // s) - 1) * s + g * (k - 1) + 1 - n, 0) for n, k, s, g in zip(spatial, taps, steps, gaps)]
        return [(total // 2, total - total // 2) for total in totals]
    if isinstance(padding, str):
        raise ShapeError(f"padding {padding!r} is not known; use numbers, 'same' or 'valid'")
    if isinstance(padding, int):
        return [(padding, padding)] * len(spatial)
    pairs = [(p, p) if isinstance(p, int) else (int(p[0]), int(p[1])) for p in padding]
    if len(pairs) != len(spatial):
        raise ShapeError(f"padding {padding} has {len(pairs)} entries for {len(spatial)} spatial axes")
    return pairs


def _scale_and_bias(shape: int | tuple[int, ...], dtype: DType) -> tuple[Tensor, Tensor]:
    """Parameters `weight`, 1 at first, and `bias`, 0 at first."""
    return parameter("weight", shape, 1.0, dtype), parameter("bias", shape, 0.0, dtype)


def batch_norm(x: Tensor, momentum: float = 0.9, epsilon: float = 1e-5, name: str = "") -> Tensor:
    """Batch normalisation over all axes but the second (Ioffe and Szegedy 2015): [N, C, *S] → the same.

    Training uses the batch's statistics and updates `running_mean` and `running_var` to momentum·old +
    (1 − momentum)·batch, the convention of ONNX (PyTorch's momentum is 1 minus this one). `weight` begins at 1,
    `bias` at 0.
    """
    channels, dtype = _channels(x), float_dtype(x)
    with layer(name, "batch_norm"):
        scale, bias = _scale_and_bias(channels, dtype)
        mean = buffer("running_mean", channels, 0.0, dtype)
        var = buffer("running_var", channels, 1.0, dtype)
        b = current().at()
        kept = number_in("batch_norm's momentum", momentum, 0.0, math.nextafter(1.0, 2.0))
        op = batch.BatchNorm(epsilon=_epsilon(epsilon), momentum=kept)
        return current().wrap(b.apply(op, x.value, scale.value, bias.value, mean.value, var.value))


def layer_norm(x: Tensor, axis: int = -1, epsilon: float = 1e-5, name: str = "") -> Tensor:
    """Layer normalisation over the axes from `axis` to the last (Ba et al. 2016); `weight` begins at 1, `bias` at 0."""
    first, dtype = as_axis(axis, x.ndim), float_dtype(x)
    with layer(name, "layer_norm"):
        scale, bias = _scale_and_bias(x.shape[first:], dtype)
        y = rows.layer_norm(current().at(), x.value, scale.value, bias.value, axis=first, epsilon=_epsilon(epsilon))
        return current().wrap(y)


def rms_norm(x: Tensor, axis: int = -1, epsilon: float = 1e-6, name: str = "") -> Tensor:
    """x / √(mean(x²) + ε) · weight over the axes from `axis` to the last (Zhang and Sennrich 2019); begins at 1."""
    first, dtype = as_axis(axis, x.ndim), float_dtype(x)
    with layer(name, "rms_norm"):
        scale = parameter("weight", x.shape[first:], 1.0, dtype)
        y = rows.rms_norm(current().at(), x.value, scale.value, axis=first, epsilon=_epsilon(epsilon))
        return current().wrap(y)


def group_norm(x: Tensor, groups: int, epsilon: float = 1e-5, name: str = "") -> Tensor:
    """Normalisation over groups of channels (Wu and He 2018): [N, C, *S]; `weight` begins at 1, `bias` at 0.

    Raises:
        ShapeError: the groups do not divide the channels.
    """
    channels, dtype = _channels(x), float_dtype(x)
    if groups < 1 or channels % groups:
        raise ShapeError(f"group_norm of {x!r}: {channels} channels do not make {groups} groups")
    with layer(name, "group_norm"):
        scale, bias = _scale_and_bias(channels, dtype)
        y = rows.group_norm(current().at(), x.value, groups, scale.value, bias.value, epsilon=_epsilon(epsilon))
        return current().wrap(y)


def _epsilon(given: float) -> float:
    return number_in("epsilon", given, 0.0, math.inf)


def _channels(x: Tensor) -> int:
    if x.ndim < 2:
        raise ShapeError(f"{x!r} has no channel axis; normalisation by channel needs [N, C, *S]")
    return x.shape[1]


def embedding(
    ids: Tensor,
    count: int,
    features: int,
    name: str = "",
    weight_init: Init | None = None,
    dtype: str = "float32",
) -> Tensor:
    """Rows of a table: integers [...] → [..., features]; `weight` is [count, features], drawn from N(0, 1).

    The table is had again by `nn.shared("<name>.weight")`, for an output layer that is tied to it.
    """
    with layer(name, "embedding"):
        return parameter("weight", (count, features), Normal(1.0) if weight_init is None else weight_init, dtype)[ids]


def multi_head_attention(
    x: Tensor,
    heads: int,
    context: Tensor | None = None,
    mask: Tensor | None = None,
    causal: bool = False,
    bias: bool = True,
    name: str = "",
) -> Tensor:
    """Multi-head attention (Vaswani et al. 2017): [B, T, D] → [B, T, D].

    Self-attention projects with `in_proj` [3·D, D] (query, key, value in this order); with a context [B, S, D],
    queries come from `x` by `q_proj` and keys and values from the context by `kv_proj` [2·D, D]. `out_proj` [D, D]
    closes. Projections to heads are drawn by Xavier, biases begin at 0.

    Args:
        x: what asks.
        heads: divides D.
        context: what is attended to; `x` by default.
        mask: added to the scores, or boolean (True: attend); broadcasts to [B, heads, T, S].
        causal: position t attends to positions up to t.
        bias: whether projections have one.
        name: of the layer.

    Raises:
        ShapeError: the heads do not divide D.
    """
    width = x.shape[-1]
    with layer(name, "attention"):
        if context is None:
            init = xavier_uniform(width, 3 * width)
            q, k, v = split_heads(linear(x, 3 * width, bias, "in_proj", init, 0.0), heads, 3)
        else:
            (q,) = split_heads(linear(x, width, bias, "q_proj", xavier_uniform(width, width), 0.0), heads)
            init = xavier_uniform(context.shape[-1], 2 * width)
            k, v = split_heads(linear(context, 2 * width, bias, "kv_proj", init, 0.0), heads, 2)
        y = attention(q, k, v, mask, causal, heads_last=True)
        return linear(join_heads(y), width, bias, "out_proj", bias_init=0.0)
