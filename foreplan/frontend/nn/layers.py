"""Layers: functions of tensors that make their own parameters in the model being traced.

Every layer takes a `name`. The names of its parameters begin with it (`conv1.weight`). A layer without a name is named
by its kind and a number (`conv0.weight`). Initialisers are PyTorch's defaults unless the layer says otherwise;
`weight_init` and `bias_init` replace them. Parameters have the element type of the input.
"""

from __future__ import annotations

import math
from typing import Any

from foreplan.base.arguments import choice, flag, whole
from foreplan.base.errors import ShapeError
from foreplan.frontend.nn.functions import attention, join_heads, split_heads
from foreplan.frontend.nn.images import PADDING_MODES, pad
from foreplan.frontend.nn.parameters import (
    Init,
    float_dtype,
    layer,
    parameter,
    uniform_fan_in,
    xavier_uniform,
)
from foreplan.frontend.nn.windows import Padding, PerAxis, pads_per_axis, per_axis
from foreplan.frontend.tracing.elementwise import apply
from foreplan.frontend.tracing.tensor import Tensor, takes_tensors, wrap
from foreplan.frontend.tracing.tracer import current
from foreplan.graph import Normal
from foreplan.ops.conv import ops as convolution
from foreplan.ops.expr import where
from foreplan.ops.index import gather
from foreplan.ops.matmul import matmul
from foreplan.ops.window import Geometry


@takes_tensors
def linear(
    x: Tensor,
    features: int,
    bias: bool = True,
    name: str = "",
    weight_init: Init | None = None,
    bias_init: Init | None = None,
) -> Tensor:
    """x·Wᵀ + b over the last axis: [..., in] → [..., features].

    `weight` is [features, in] and `bias` [features]; both are drawn from U(±1/√in).

    Raises:
        ShapeError: `x` has fewer than two axes.
    """
    inputs, features = x.shape[-1] if x.shape else 0, whole("linear's features", features, 0)
    with layer(name, "linear"):
        w, b = _weight_and_bias(x, (features, inputs), features if flag("bias", bias) else None, weight_init, bias_init)
        y = wrap(matmul(current().at(), x.value, w.value, transpose_b=True))
        return y if b is None else y + b


def _weight_and_bias(
    x: Tensor, shape: tuple[int, ...], biases: int | None, weight_init: Init | None, bias_init: Init | None
) -> tuple[Tensor, Tensor | None]:
    """Parameters `weight` and, unless `biases` is None, `bias`. Both are drawn from U(±1/√n), n = weight[0].size."""
    default, dtype = uniform_fan_in(math.prod(shape[1:])), float_dtype(x)
    weight = parameter("weight", shape, default if weight_init is None else weight_init, dtype)
    if biases is None:
        return weight, None
    return weight, parameter("bias", biases, default if bias_init is None else bias_init, dtype)


@takes_tensors
def conv(
    x: Tensor,
    features: int,
    kernel: PerAxis,
    stride: PerAxis = 1,
    padding: Padding = 0,
    groups: int = 1,
    dilation: PerAxis = 1,
    bias: bool = True,
    name: str = "",
    weight_init: Init | None = None,
    bias_init: Init | None = None,
    padding_mode: str = "zeros",
) -> Tensor:
    """Convolution in one, two or three dimensions: [N, C, *S] → [N, features, *S'].

    Args:
        x: images, channels second.
        features: output channels.
        kernel: extent along each spatial axis; one number for all.
        stride: step along each spatial axis.
        padding: elements added on both sides of each axis, zeros by default: one number, one for each axis, or pairs
            (low, high). "valid" is no padding; "same" makes each output extent ⌈input / stride⌉.
        groups: number of equal groups of channels; each is convolved alone.
        dilation: distance between taps.
        bias: whether the layer has a bias.
        name: of the layer; `weight` is [features, C/groups, *kernel], `bias` [features].
        weight_init: U(±1/√fan_in) by default, fan_in = C/groups · taps.
        bias_init: the same by default.
        padding_mode: "zeros", "reflect", "replicate" or "circular", as for `pad`.

    Raises:
        ShapeError: the groups do not divide the channels, or the kernel exceeds the padded input.
        UsageError: a size is not a whole number, or too small; the padding mode is not known.
    """
    axes, groups = _axes_and_groups("conv", x, features, groups)
    taps, steps = per_axis("conv's kernel", kernel, axes), per_axis("conv's stride", stride, axes)
    gaps = per_axis("conv's dilation", dilation, axes)
    with layer(name, "conv"):
        shape = (features, x.shape[1] // groups, *taps)
        w, b = _weight_and_bias(x, shape, features if flag("bias", bias) else None, weight_init, bias_init)
        pads = pads_per_axis("conv's padding", padding, x.shape[2:], taps, steps, gaps)
        if choice("padding mode", padding_mode, PADDING_MODES) != "zeros":
            x, pads = pad(x, pads, padding_mode), [(0, 0)] * axes
        added = None if b is None else b.value
        geometry: Geometry = {"strides": steps, "pads": pads, "dilations": gaps}
        y = convolution.conv(current().at(), x.value, w.value, added, groups=groups, **geometry)
    return wrap(y)


def _axes_and_groups(kind: str, x: Tensor, features: int, groups: int) -> tuple[int, int]:
    """The number of spatial axes and that of groups, which divide the channels."""
    axes, groups = x.ndim - 2, whole(f"{kind}'s groups", groups, 1)
    whole(f"{kind}'s features", features, 0)
    if axes < 1:
        raise ShapeError(f"{kind} needs images [N, C, *S] with at least one spatial axis, and got {x!r}")
    if x.shape[1] % groups or features % groups:
        raise ShapeError(f"{kind} of {x!r} to {features} channels: {groups} groups must divide both channels")
    return axes, groups


@takes_tensors
def conv_transpose(
    x: Tensor,
    features: int,
    kernel: PerAxis,
    stride: PerAxis = 1,
    padding: PerAxis = 0,
    output_padding: PerAxis = 0,
    groups: int = 1,
    dilation: PerAxis = 1,
    bias: bool = True,
    name: str = "",
    weight_init: Init | None = None,
    bias_init: Init | None = None,
) -> Tensor:
    """Transposed convolution: [N, C, *S] → [N, features, *S'], S' = (S − 1)·stride − 2·padding + dilation·(kernel − 1)
    + output_padding + 1.

    `weight` is [C, features/groups, *kernel]; it and `bias` are drawn from U(±1/√(features/groups · taps)). The
    arguments are those of `conv`; padding is one number, or one for each axis.

    Raises:
        ShapeError: the groups do not divide the channels.
        UsageError: a size is not a whole number, or too small.
    """
    axes, groups = _axes_and_groups("conv_transpose", x, features, groups)
    kind = "conv_transpose's"
    taps, steps = per_axis(f"{kind} kernel", kernel, axes), per_axis(f"{kind} stride", stride, axes)
    gaps = per_axis(f"{kind} dilation", dilation, axes)
    extra = per_axis(f"{kind} output_padding", output_padding, axes, 0)
    pads = [(p, p) for p in per_axis(f"{kind} padding", padding, axes, 0)]
    with layer(name, "conv_transpose"):
        shape = (x.shape[1], features // groups, *taps)
        w, b = _weight_and_bias(x, shape, features if flag("bias", bias) else None, weight_init, bias_init)
        added = None if b is None else b.value
        geometry: Geometry = {"strides": steps, "pads": pads, "dilations": gaps}
        y = convolution.conv_transpose(
            current().at(), x.value, w.value, added, groups=groups, output_padding=extra, **geometry
        )
    return wrap(y)


@takes_tensors
def prelu(x: Tensor, count: int = 1, init: Init = 0.25, name: str = "") -> Tensor:
    """x where positive, else weight·x (He et al. 2015). The shape stays.

    `weight` [count] has one slope for all, or one for each channel, that is, each index of the second axis; it begins
    at 1/4.

    Raises:
        ShapeError: `count` is neither 1 nor the number of channels.
        UsageError: `count` is not a whole number of at least 1.
    """
    count = whole("prelu's count", count, 1)
    channels = x.shape[1] if x.ndim > 1 else 1
    if count not in (1, channels):
        raise ShapeError(f"prelu of {x!r}: {count} slopes are neither one for all nor one for each of the channels")
    with layer(name, "prelu"):
        weight = parameter("weight", count, init, float_dtype(x))
        slopes = weight.reshape(count, *(1,) * (x.ndim - 2)) if count > 1 else weight
        return apply("prelu", lambda x, slope: where(x > 0.0, x, slope * x), x, slopes)


@takes_tensors
def embedding(
    ids: Tensor,
    count: int,
    features: int,
    name: str = "",
    weight_init: Init | None = None,
    dtype: str = "float32",
) -> Tensor:
    """Rows of a table: integers [...] → [..., features]; `weight` is [count, features], drawn from N(0, 1).

    `nn.shared("<name>.weight")` returns the table again, for an output layer that is tied to it. Ids are from 0 to
    count - 1: a step refuses others, as PyTorch does.
    """
    with layer(name, "embedding"):
        table = parameter("weight", (count, features), Normal(1.0) if weight_init is None else weight_init, dtype)
        return wrap(gather(current().at(), table.value, ids.value, 0, from_end=False))


@takes_tensors
def multi_head_attention(
    x: Tensor,
    heads: int,
    context: Tensor | None = None,
    mask: Any = None,
    causal: bool = False,
    bias: bool = True,
    name: str = "",
) -> Tensor:
    """Multi-head attention (Vaswani et al. 2017): [B, T, D] → [B, T, D].

    Self-attention projects `x` by `in_proj` [3·D, D] to queries, keys and values, in this order. With a context
    [B, S, C], `q_proj` [D, D] makes the queries from `x`, and `kv_proj` [2·D, C] the keys and values from the context.
    `out_proj` [D, D] comes last. The weights of projections to heads are drawn by `xavier_uniform`; biases begin at 0.

    Args:
        x: the positions that attend.
        heads: number of heads; it divides D.
        context: the positions attended to; `x` by default.
        mask: added to the scores, or boolean (True: attend); broadcasts to [B, heads, T, S].
        causal: position t attends to positions up to t.
        bias: whether projections have a bias.
        name: of the layer.

    Raises:
        ShapeError: the heads do not divide D, or a tensor does not have three axes.
        UsageError: `heads` is not a whole number of at least 1.
    """
    if wrong := [each for each in (x, context) if each is not None and each.ndim != 3]:
        raise ShapeError(f"attention needs [batch, positions, width], and got {wrong[0]!r}")
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
