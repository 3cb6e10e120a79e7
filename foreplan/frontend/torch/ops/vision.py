"""ATen ops on images: resizing, sampling at places, folds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from foreplan.base.errors import UnsupportedError
from foreplan.frontend import nn
from foreplan.frontend.torch.call import Call
from foreplan.frontend.torch.ops.reductions import listed
from foreplan.frontend.torch.table import aten
from foreplan.frontend.tracing.elementwise import convert
from foreplan.frontend.tracing.tensor import Tensor, as_tensor
from foreplan.ops.grid_sample import grid_sample
from foreplan.ops.resize import resize
from foreplan.ops.unpool import col2im, placed

_MODES = {
    "upsample_nearest1d": "nearest",
    "upsample_nearest2d": "nearest",
    "upsample_nearest3d": "nearest",
    "_upsample_nearest_exact1d": "nearest",
    "_upsample_nearest_exact2d": "nearest",
    "_upsample_nearest_exact3d": "nearest",
    "upsample_linear1d": "linear",
    "upsample_bilinear2d": "linear",
    "upsample_trilinear3d": "linear",
    "upsample_bicubic2d": "cubic",
    "_upsample_bilinear2d_aa": "linear",
    "_upsample_bicubic2d_aa": "cubic",
}


@aten(*_MODES)
def _upsample(c: Call, x: Any, size: Any, *rest: Any, **named: Any) -> Tensor:
    images, mode = c.tensor(x), _MODES[c.name]
    align = named.get("align_corners", bool(rest and rest[0] is True)) if mode != "nearest" else False
    given = [named.get("scale_factors"), *rest]
    scales = next((list(each) for each in given if isinstance(each, list | tuple)), None)
    if scales is None:
        numbers = [each for each in rest if isinstance(each, float)]
        scales = numbers if len(numbers) == images.ndim - 2 else None
    if scales is None or align:
        scales = [after / before for after, before in zip(c.shape[2:], images.shape[2:])]
    if mode == "nearest":
        exact = "exact" in c.name
        how: dict[str, Any] = {
            "coordinate": "half_pixel" if exact else "asymmetric",
            "rounding": "round_prefer_floor" if exact else "floor",
        }
        if exact:
            how["rounding"] = "round_prefer_ceil"
    else:
        how = {"coordinate": "align_corners" if align else "half_pixel"}
    if c.name.endswith("_aa") and align:  # PyTorch's centres are those of half pixels, at the step of aligned corners
        if min(c.shape[2:]) == 1 or min(images.shape[2:]) == 1:
            raise UnsupportedError("align_corners with antialias and an axis of one element")
        how, scales = {"coordinate": "half_pixel"}, [(m - 1) / (n - 1) for m, n in zip(c.shape[2:], images.shape[2:])]
    if c.name.endswith("_aa"):
        how |= {"antialias": True, "exclude_outside": True, "cubic_a": -0.5}
    factors = (1.0, 1.0, *map(float, scales))
    return c.wrap(resize(c.b, images.value, c.shape, mode=mode, scales=factors, **how))


@aten("grid_sampler", "grid_sampler_2d", "grid_sampler_3d")
def _grid_sampler(c: Call, x: Any, grid: Any, mode: int, padding: int, align: bool) -> Tensor:
    how, around = ("linear", "nearest", "cubic")[mode], ("zeros", "border", "reflection")[padding]
    images, places = (convert(c.tensor(each), c.dtype.wide) for each in (x, grid))  # as PyTorch computes where they lie
    return convert(c.wrap(grid_sample(c.b, images.value, places.value, how, around, align)), c.dtype)


@aten("affine_grid_generator")
def _affine_grid(c: Call, theta: Any, size: Sequence[int], align: bool) -> Any:
    import torch

    matrix, axes = c.tensor(theta), len(size) - 2
    unit = torch.eye(axes, axes + 1)[None]
    places = torch.nn.functional.affine_grid(unit, [1, 1, *size[2:]], align).reshape(1, -1, axes).numpy()
    base = np.concatenate([places, np.ones((*places.shape[:2], 1), places.dtype)], axis=2)
    return (as_tensor(base) @ matrix.mT).reshape(c.shape)


@aten("im2col")
def _im2col(c: Call, x: Any, kernel: Any, dilation: Any, padding: Any, stride: Any) -> Any:
    images = c.tensor(x)
    (kh, kw), (dh, dw), (ph, pw), (sh, sw) = (listed(each, 2) for each in (kernel, dilation, padding, stride))
    wide: Any = np.pad(images, [(0, 0), (0, 0), (ph, ph), (pw, pw)])
    rows = (wide.shape[2] - dh * (kh - 1) - 1) // sh + 1
    columns = (wide.shape[3] - dw * (kw - 1) - 1) // sw + 1
    taps = [
        wide[:, :, i * dh : i * dh + sh * (rows - 1) + 1 : sh, j * dw : j * dw + sw * (columns - 1) + 1 : sw]
        for i in range(kh)
        for j in range(kw)
    ]
    return np.stack(taps, axis=2).reshape(c.shape)


@aten("col2im")
def _col2im(c: Call, x: Any, size: Any, kernel: Any, dilation: Any, padding: Any, stride: Any) -> Any:
    geometry: Any = {
        "strides": listed(stride, 2),
        "pads": tuple((p, p) for p in listed(padding, 2)),
        "dilations": listed(dilation, 2),
    }
    return c.wrap(col2im(c.b, c.value(x), listed(size, 2), listed(kernel, 2), **geometry))


@aten("max_unpool2d", "max_unpool3d")
def _max_unpool(c: Call, x: Any, places: Any, *_: Any) -> Any:
    axes = int(c.name[-2])
    images, at = c.tensor(x), c.tensor(places)
    channels = int(np.prod(images.shape[: images.ndim - axes]))
    area = int(np.prod(c.shape[-axes:]))
    whole = at.reshape(channels, -1) + (np.arange(channels) * area).reshape(-1, 1)
    flat = images.reshape(channels, -1).value
    # Of several for one place one is written; each of them has the gradient of the place, as PyTorch has it.
    once, added = (c.wrap(placed(c.b, flat, whole.value, c.shape, shared)) for shared in (True, False))
    return nn.straight_through(nn.stop_gradient(once), added)
