"""Images in another size: interpolation, padding, and pixels moved between channels and places."""

from __future__ import annotations

from foreplan.base.arguments import choice, flag, whole
from foreplan.base.errors import ShapeError
from foreplan.frontend.nn.windows import Padding, PerAxis, pads_per_axis, per_axis
from foreplan.frontend.tracing.tensor import Tensor, as_tensor, takes_tensors, wrap
from foreplan.frontend.tracing.tracer import current
from foreplan.ops import join
from foreplan.ops import resize as resizing


@takes_tensors
def resize(x: Tensor, size: PerAxis, mode: str = "linear", align_corners: bool = False) -> Tensor:
    """[N, C, *S] → [N, C, *size] by interpolation.

    Args:
        x: images.
        size: new extent along each spatial axis; one number for all.
        mode: "nearest" (the sample at or before), "linear" (bilinear in two dimensions) or "cubic".
        align_corners: whether the outermost samples keep their places; else pixels are areas (half-pixel centres).

    Raises:
        ShapeError: the size does not fit the axes.
        UnsupportedError: an axis is too long.
        UsageError: a size is not a whole number of at least 1, or the mode is not known.
    """
    if x.ndim < 3:
        raise ShapeError(f"resize needs images [N, C, *S] with at least one spatial axis, and got {x!r}")
    spatial = per_axis("resize's size", size, x.ndim - 2)
    nearest = choice("mode of resize", mode, ("nearest", "linear", "cubic")) == "nearest"
    coordinate = "align_corners" if flag("align_corners", align_corners) else "asymmetric" if nearest else "half_pixel"
    shape, b = (*x.shape[:2], *spatial), current().at()
    y = resizing.resize(
        b, x.value, shape, mode=mode, coordinate=coordinate, rounding="floor" if nearest else "round_prefer_floor"
    )
    return wrap(y)


@takes_tensors
def upsample(x: Tensor, scale: int = 2, mode: str = "nearest") -> Tensor:
    """[N, C, *S] with every spatial extent `scale` times as large; modes as in `resize`.

    Raises:
        UsageError: the scale is not a whole number of at least 1.
    """
    times = whole("upsample's scale", scale, 1)
    return resize(x, [n * times for n in x.shape[2:]], mode)


PADDING_MODES = {
    "constant": "constant",
    "zeros": "constant",
    "reflect": "reflect",
    "replicate": "edge",
    "edge": "edge",
    "circular": "wrap",
    "wrap": "wrap",
}


@takes_tensors
def pad(x: Tensor, padding: Padding, mode: str = "constant", value: float = 0.0) -> Tensor:
    """[N, C, *S] with margins around the spatial axes.

    Args:
        x: images of any element type.
        padding: one number for all spatial axes, or a number or a pair (low, high) for each, the first axis first.
        mode: "constant" or "zeros" (`value`), "reflect" (mirrored at the outermost element, which is not repeated),
            "replicate" or "edge" (the outermost element again), "circular" or "wrap" (the other end continues).
            PyTorch's and NumPy's words mean the same.
        value: of the margins in the mode "constant".

    Raises:
        ShapeError: the paddings do not fit the axes, or there is too little to mirror or to continue with.
        UsageError: a padding is not a whole number of at least 0, or the mode is not known.
    """
    found = PADDING_MODES[choice("padding mode", mode, PADDING_MODES)]
    if x.ndim < 3 or isinstance(padding, str):
        raise ShapeError(f"pad needs images [N, C, *S] and numbers, and got {x!r} and {padding!r}")
    ones = (1,) * (x.ndim - 2)
    margins = pads_per_axis("pad's padding", padding, x.shape[2:], ones, ones, ones)
    return wrap(
        join.pad(current().at(), x.value, [(0, 0), (0, 0), *margins], value if mode == "constant" else 0, found)
    )


@takes_tensors
def pixel_shuffle(x: Tensor, factor: int) -> Tensor:
    """[..., C·r², H, W] → [..., C, H·r, W·r] (Shi et al. 2016), r = `factor`: channel c·r² + i·r + j becomes the pixel
    (i, j) of channel c's blocks.

    Raises:
        ShapeError: `x` has fewer than three axes, or r² does not divide its channels.
        UsageError: the factor is not a whole number of at least 1.
    """
    r = whole("pixel_shuffle's factor", factor, 1)
    if x.ndim < 3 or x.shape[-3] % (r * r):
        raise ShapeError(f"pixel_shuffle by {r} needs [..., C, H, W] with channels that {r * r} divides, and got {x!r}")
    *lead, channels, height, width = x.shape
    n = len(lead)
    blocks = x.reshape(*lead, channels // (r * r), r, r, height, width)
    moved = blocks.transpose(*range(n), n, n + 3, n + 1, n + 4, n + 2)
    return as_tensor(moved.reshape(*lead, channels // (r * r), height * r, width * r))


@takes_tensors
def pixel_unshuffle(x: Tensor, factor: int) -> Tensor:
    """[..., C, H·r, W·r] → [..., C·r², H, W], r = `factor`: `pixel_shuffle` backward.

    Raises:
        ShapeError: `x` has fewer than three axes, or r does not divide its height and width.
        UsageError: the factor is not a whole number of at least 1.
    """
    r = whole("pixel_unshuffle's factor", factor, 1)
    if x.ndim < 3 or x.shape[-2] % r or x.shape[-1] % r:
        raise ShapeError(
            f"pixel_unshuffle by {r} needs [..., C, H, W] with a height and width that {r} divides, and got {x!r}"
        )
    *lead, channels, height, width = x.shape
    n = len(lead)
    blocks = x.reshape(*lead, channels, height // r, r, width // r, r)
    moved = blocks.transpose(*range(n), n, n + 2, n + 4, n + 1, n + 3)
    return as_tensor(moved.reshape(*lead, channels * r * r, height // r, width // r))
