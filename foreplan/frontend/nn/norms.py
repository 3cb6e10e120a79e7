"""Layers that normalise: over the batch, rows, groups of channels, or channels. See `layers` for their names."""

from __future__ import annotations

import math

from foreplan.base.arguments import flag, number_in, whole
from foreplan.base.errors import ShapeError
from foreplan.frontend.nn.parameters import buffer, float_dtype, layer, parameter
from foreplan.frontend.tracing.dispatch import as_axis
from foreplan.frontend.tracing.tensor import Tensor, takes_tensors, wrap
from foreplan.frontend.tracing.tracer import current
from foreplan.graph import DType
from foreplan.ops.norm import batch, rows


def _scale_and_bias(shape: int | tuple[int, ...], dtype: DType) -> tuple[Tensor, Tensor]:
    """The parameters `weight`, which begins at 1, and `bias`, which begins at 0."""
    return parameter("weight", shape, 1.0, dtype), parameter("bias", shape, 0.0, dtype)


@takes_tensors
def batch_norm(x: Tensor, momentum: float = 0.9, epsilon: float = 1e-5, name: str = "") -> Tensor:
    """Batch normalisation over all axes but the second (Ioffe and Szegedy 2015): [N, C, *S] → [N, C, *S].

    Training uses the batch's statistics and updates the buffers `running_mean` and `running_var` to momentum·old +
    (1 − momentum)·batch, as ONNX does; PyTorch's momentum is 1 minus this one. `weight` [C] begins at 1, `bias` [C]
    at 0.

    Raises:
        ShapeError: `x` has fewer than two axes.
        UsageError: the momentum is outside [0, 1], or epsilon is negative or infinite.
    """
    channels, dtype = _channels(x), float_dtype(x)
    with layer(name, "batch_norm"):
        scale, bias = _scale_and_bias(channels, dtype)
        mean = buffer("running_mean", channels, 0.0, dtype)
        var = buffer("running_var", channels, 1.0, dtype)
        b = current().at()
        kept = number_in("batch_norm's momentum", momentum, 0.0, math.nextafter(1.0, 2.0))
        op = batch.BatchNorm(epsilon=_epsilon(epsilon), momentum=kept)
        return wrap(b.apply(op, x.value, scale.value, bias.value, mean.value, var.value))


@takes_tensors
def layer_norm(x: Tensor, axis: int = -1, epsilon: float = 1e-5, name: str = "") -> Tensor:
    """Layer normalisation over the axes from `axis` to the last (Ba et al. 2016). The shape stays.

    `weight`, which begins at 1, and `bias`, which begins at 0, have the shape of these axes.
    """
    first, dtype = as_axis(axis, x.ndim), float_dtype(x)
    with layer(name, "layer_norm"):
        scale, bias = _scale_and_bias(x.shape[first:], dtype)
        y = rows.layer_norm(current().at(), x.value, scale.value, bias.value, axis=first, epsilon=_epsilon(epsilon))
        return wrap(y)


@takes_tensors
def rms_norm(x: Tensor, axis: int = -1, epsilon: float = 1e-6, name: str = "") -> Tensor:
    """x / √(mean(x²) + epsilon) · weight over the axes from `axis` to the last (Zhang and Sennrich 2019).

    `weight`, which begins at 1, has the shape of these axes.
    """
    first, dtype = as_axis(axis, x.ndim), float_dtype(x)
    with layer(name, "rms_norm"):
        scale = parameter("weight", x.shape[first:], 1.0, dtype)
        y = rows.rms_norm(current().at(), x.value, scale.value, axis=first, epsilon=_epsilon(epsilon))
        return wrap(y)


@takes_tensors
def group_norm(x: Tensor, groups: int, epsilon: float = 1e-5, name: str = "") -> Tensor:
    """Normalisation over groups of channels (Wu and He 2018): [N, C, *S] → [N, C, *S].

    `weight` [C] begins at 1, `bias` [C] at 0.

    Raises:
        ShapeError: the groups do not divide the channels.
        UsageError: `groups` is not a whole number of at least 1.
    """
    channels, dtype, groups = _channels(x), float_dtype(x), whole("group_norm's groups", groups, 1)
    if channels % groups:
        raise ShapeError(f"group_norm of {x!r}: {channels} channels do not make {groups} equal groups")
    with layer(name, "group_norm"):
        scale, bias = _scale_and_bias(channels, dtype)
        y = rows.group_norm(current().at(), x.value, groups, scale.value, bias.value, epsilon=_epsilon(epsilon))
        return wrap(y)


@takes_tensors
def instance_norm(x: Tensor, affine: bool = False, epsilon: float = 1e-5, name: str = "") -> Tensor:
    """Normalisation of each channel of each item over its spatial axes (Ulyanov et al. 2016): [N, C, *S] → [N, C, *S].

    With `affine`, `weight` [C] begins at 1, `bias` [C] at 0. Without it, as by default and in PyTorch, there are none.

    Raises:
        ShapeError: `x` has fewer than three axes.
    """
    channels, dtype = _channels(x), float_dtype(x)
    if x.ndim < 3:
        raise ShapeError(f"instance_norm needs [N, C, *S] with at least one spatial axis, and got {x!r}")
    with layer(name, "instance_norm"):
        vectors = [tensor.value for tensor in _scale_and_bias(channels, dtype)] if flag("affine", affine) else []
        y = rows.group_norm(current().at(), x.value, channels, *vectors, epsilon=_epsilon(epsilon))
        return wrap(y)


def _epsilon(given: float) -> float:
    return number_in("epsilon", given, 0.0, math.inf)


def _channels(x: Tensor) -> int:
    if x.ndim < 2:
        raise ShapeError(f"{x!r} has no channel axis; normalisation by channel needs [N, C, *S]")
    return x.shape[1]
